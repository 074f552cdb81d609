"""The steps in a run's log as arrays: a million in seconds, without parsing every row as JSON."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

ROW = re.compile(
    rb'"phase": "([^"\\]*)", "step": (\d+), "epoch": [^,]+, "loss": ([^,\n]+), "lr": ([^,\n]+),'
    rb' "grad_norm": ([^,\n]+),[^c\n]*+(?:c(?!hain": ")[^c\n]*+)*+chain": "(\w+)"'
)
"""What of a step's row is compared, in the order in which rows are written."""
FIGURES = ("loss", "lr", "grad_norm")


@dataclass(frozen=True, slots=True, eq=False)
class LoggedSteps:
    """The logged steps of a run, in order: arrays with an entry for each."""

    phases: list[str]
    """Names, in the order in which they began."""
    phase: np.ndarray
    """Index into `phases`."""
    step: np.ndarray
    """Optimizer step of the phase, from 1."""
    figures: np.ndarray
    """(n, 3) fp64: FIGURES; NaN where one was not finite."""
    chain: np.ndarray
    """Hash over all samples of the phase up to here, as bytes."""

    def __len__(self) -> int:
        return len(self.step)

    def at(self, place: int) -> tuple[str, int]:
        """(phase, step) of an entry."""
        return self.phases[self.phase[place]], int(self.step[place])


def read_logged_steps(path: Path) -> LoggedSteps:
    """The steps of a metrics.jsonl. Lines that are no whole row of a step are left out."""
    rows: list[tuple[bytes, ...]] = []
    if path.exists() and path.stat().st_size:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            rows = ROW.findall(content)
    columns = list(zip(*rows, strict=True)) if rows else [()] * 6
    names = list(dict.fromkeys(columns[0]))
    numbers = {name: n for n, name in enumerate(names)}
    figures = [_numbers(column) for column in columns[2:5]]
    return LoggedSteps(
        [name.decode() for name in names],
        np.array([numbers[name] for name in columns[0]], np.int64),
        np.array(columns[1], np.int64),
        np.stack(figures, axis=1),
        np.array(columns[5], "S32"),
    )


def _numbers(column: tuple[bytes, ...]) -> np.ndarray:
    try:
        return np.array([float(text) for text in column])
    except ValueError:  # null, with the value's name in another field
        return np.array([float(text) if text != b"null" else np.nan for text in column])


def common_steps(one: LoggedSteps, other: LoggedSteps) -> tuple[np.ndarray, np.ndarray]:
    """Places in each of the steps that both logged, in order."""
    names = {name: n for n, name in enumerate(dict.fromkeys([*one.phases, *other.phases]))}
    keys = [_keys(steps, names) for steps in (one, other)]
    _, first, second = np.intersect1d(keys[0], keys[1], return_indices=True)
    return first, second


def _keys(steps: LoggedSteps, names: dict[str, int]) -> np.ndarray:
    """A number for each step that grows along the run and is the same in runs of the same phases."""
    numbers = np.array([names[name] for name in steps.phases], np.int64)
    return (numbers[steps.phase] << 40) + steps.step if len(steps) else np.zeros(0, np.int64)
