"""The ledger: the sample numbers of every step, in samples.bin.

A record is a header (bytes per number, length of the phase's name, step from 1, count of samples; little
endian), the phase's name in UTF-8, and the numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isobatch.core import atomic_files
from isobatch.engine.runs.run_folder import RunFolder

_HEADER = struct.Struct("<BHII")
_NUMBERS = {4: "<u4", 8: "<u8"}


@dataclass(frozen=True, slots=True, eq=False)
class LedgerStep:
    """The samples of a global batch."""

    phase: str
    step: int
    """Optimizer step of the phase, from 1."""
    samples: np.ndarray
    """Sample numbers in the recipe's order, (batch,) int64."""


def append_step(path: Path, phase: str, step: int, samples: np.ndarray) -> None:
    """Append the samples of a step to a ledger. Raises UserError where the disk is full."""
    width = 4 if samples.max(initial=0) < 1 << 32 else 8
    name = phase.encode()
    record = _HEADER.pack(width, len(name), step, len(samples)) + name
    with atomic_files.explain_write_errors(path), path.open("ab") as stream:
        stream.write(record + samples.astype(_NUMBERS[width]).tobytes())


def read_ledger(run: RunFolder) -> Iterator[LedgerStep]:
    """The steps in a run's ledger, in order; nothing where it has none. A record cut short is left out."""
    if not run.samples.exists():
        return
    with run.samples.open("rb") as stream:
        while len(header := stream.read(_HEADER.size)) == _HEADER.size:
            width, length, step, count = _HEADER.unpack(header)
            body = stream.read(length + width * count)
            if width not in _NUMBERS or len(body) < length + width * count:
                return
            samples = np.frombuffer(body, _NUMBERS[width], offset=length).astype(np.int64)
            yield LedgerStep(body[:length].decode(errors="replace"), step, samples)
