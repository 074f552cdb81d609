"""The metrics log: appends rows to metrics.jsonl, samples.bin and decisions.jsonl on the main rank.

metrics.jsonl is sealed in segments. A seal is a row `{"phase", "step", "seal"}` that stands at every
checkpoint and at the end: 32 hex digits of SHA-256 over the seal before it and the bytes of all rows since.
The first seal follows from recipe and data. A checkpoint holds the sizes of the logs at its seal, so that a
resumed run cuts them there without reading them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core import atomic_files
from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import TrainingError
from isobatch.engine.checkpointing.checkpoint import recorded_digest
from isobatch.engine.runs.ledger import append_step
from isobatch.engine.runs.log_reader import last_row_before
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.summary import Progress

LEFT_OUT = "left_out"
"""Field of the row that stands in the place of a step that the run leaves out."""
LOST = "lost"
"""Field of the row that stands in the place of rows that were gone when the run was resumed."""
SEAL = "seal"
"""Field of metrics.jsonl that holds a seal."""


class MetricsLog:
    """Appends rows, and seals them.

    `writes`: whether this rank writes. `every`: steps between rows. `ledger`: log each step's samples.
    """

    def __init__(self, run: RunFolder, writes: bool, every: int = 1, ledger: bool = False) -> None:
        self.run, self.writes, self.every = run, writes, every
        self.ledger = ledger
        self.skipped: Mapping[str, Any] | None = None
        """The row of the newest step, where it was not due to be logged."""
        self._promise: dict[str, Any] = {"log_every": every, "ledger": ledger}
        """What this process logs; in its first row of a step."""
        self._hash = hashlib.sha256()

    def begin(self, phases: list[str]) -> None:
        """Start the logs of a new run. What an attempt without a checkpoint left is removed."""
        if self.writes:
            for path in (self.run.metrics, self.run.samples, self.run.answers):
                path.unlink(missing_ok=True)
            self.run.keep_until(self.run.decisions, phases, phases[0], 0)
            self._continue(first_seal(self.run))

    def resume(self, saved: Mapping[str, Any], phases: list[str], phase: str, step: int) -> str:
        """Cut the logs where a checkpoint was saved: a resumed run trains and logs the later steps again.

        `saved`: what `seal` returned then. Returns what the logs have lost since then; in metrics.jsonl a row
        says so in its place.
        """
        if not self.writes:
            return ""
        for log in (self.run.decisions, self.run.answers):
            self.run.keep_until(log, phases, phase, step)
        _cut(self.run.samples, saved["ledger"])
        said = []
        if _size(self.run.samples) < saved["ledger"]:  # its last record may be cut
            self.run.samples.unlink(missing_ok=True)
            said = ["samples.bin: it was cut, and begins anew"]
        row = last_row_before(self.run.metrics, saved["metrics"])
        if row is not None and row.get(SEAL) == saved[SEAL]:
            _cut(self.run.metrics, saved["metrics"])
            self._continue(saved[SEAL])
            return "; ".join(said)
        size = _size(self.run.metrics)
        self.run.keep_until(self.run.metrics, phases, phase, step)
        seal = next((row[SEAL] for row in reversed(list(rows_in(self.run.metrics))) if SEAL in row), "")
        self._continue(seal or first_seal(self.run))
        then = f"{size} bytes, {saved['metrics']} when the checkpoint was saved"
        lost = f"rows up to step {step} of {phase} were lost or changed ({then})"
        self.log_metrics({"phase": phase, "step": step, LOST: lost})
        return "; ".join([*said, f"metrics.jsonl: {lost}"])

    def _continue(self, seal: str) -> None:
        self._hash = hashlib.sha256(seal.encode())

    def log_step(self, row: Mapping[str, Any], samples: np.ndarray) -> None:
        """Log a step if it is due, and its samples to the ledger if there is one."""
        if not self.writes:
            return
        if self.ledger:  # first: a kill then never leaves a logged step without its samples
            append_step(self.run.samples, row["phase"], row["step"], samples)
        self.skipped = row
        if row["step"] % self.every == 0 or row["step"] == 1:
            self.flush_skipped()

    def flush_skipped(self) -> None:
        """Log the newest step even if it was not due, as at every checkpoint and at the end."""
        if self.skipped is not None:
            row, promise, self.skipped, self._promise = self.skipped, self._promise, None, {}
            self.log_metrics({**row, **promise})

    def log_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl."""
        if self.writes:
            self._hash.update(_append(self.run.metrics, row))

    def seal(self, phase: str, step: int) -> dict[str, Any]:
        """Seal the rows so far. Returns the seal and the sizes of the logs in bytes, for a checkpoint."""
        if not self.writes:
            return {}
        seal = self._hash.hexdigest()[:32]
        atomic_files.append_row(self.run.metrics, {"phase": phase, "step": step, SEAL: seal})
        for path in filter(Path.exists, (self.run.metrics, self.run.samples)):
            with path.open("rb") as stream:  # else a checkpoint might outlive its rows
                os.fsync(stream.fileno())
        self._hash = hashlib.sha256(seal.encode())
        return {SEAL: seal, "metrics": _size(self.run.metrics), "ledger": _size(self.run.samples)}

    def log_checkpoint(self, progress: Progress, folder: Path) -> None:
        """Log the digest of a checkpoint, so that it is sealed with the rows."""
        where = {"phase": progress.phase, "step": progress.step}
        self.log_metrics({**where, "checkpoint": folder.name, "digest": recorded_digest(folder)})

    def log_answers(self, place: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
        """Append what a model wrote to answers.jsonl; `place`: phase, step and split of the evaluation."""
        for row in rows if self.writes else ():
            atomic_files.append_row(self.run.answers, {**place, **row})

    def log_decision(self, row: Mapping[str, Any]) -> None:
        """Append a row to decisions.jsonl."""
        if self.writes:
            atomic_files.append_row(self.run.decisions, row)


def first_seal(run: RunFolder) -> str:
    """What the first seal of a run's log follows."""
    return f"{run.recipe.hash()} {run.facts.fingerprint}"


def _append(path: Path, row: Mapping[str, Any]) -> bytes:
    """As `append_row`, which alone knows of numbers that JSON has not: a step enters no other file for it."""
    try:
        line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except ValueError:
        return atomic_files.append_row(path, row)
    except TypeError as error:
        raise TrainingError(f"a figure of a task or a hook is no number, text or list: {error}") from None
    try:
        with path.open("ab") as stream:
            stream.write(line)
    except OSError:
        with atomic_files.explain_write_errors(path):
            raise
    return line


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _cut(path: Path, size: int) -> None:
    if _size(path) > size:
        os.truncate(path, size)
