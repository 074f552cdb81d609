"""The metrics log: appends rows to metrics.jsonl, samples.jsonl and decisions.jsonl on the main rank."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np

    from isobatch.engine.runs.run_folder import RunFolder

SEAL = "seal"
"""Field of a row of metrics.jsonl that holds its seal."""


class MetricsLog:
    """Appends rows. Each row of metrics.jsonl has a seal: a hash over it and all rows before it.

    `writes`: whether this rank writes. `every`: steps between rows. `ledger`: log each step's samples.
    """

    def __init__(self, run: RunFolder, writes: bool, every: int = 1, ledger: bool = False) -> None:
        self.run, self.writes, self.every, self.ledger = run, writes, every, ledger
        self.seal = ""
        self.skipped: Mapping[str, Any] | None = None
        """The row of the newest step, where it was not due to be logged."""

    def truncate_after(self, phases: list[str], phase: str, step: int) -> None:
        """Remove the rows after `step` of `phase`: a resumed run trains and logs these steps again."""
        if self.writes:
            self.run.truncate_logs(phases, phase, step)
            rows = atomic_files.read_jsonl(self.run.metrics)
            self.seal = rows[-1].get(SEAL, "") if rows else ""

    def log_step(self, row: Mapping[str, Any], samples: np.ndarray) -> None:
        """Log a step if it is due, and its samples to the ledger if there is one."""
        if not self.writes:
            return
        due = row["step"] % self.every == 0 or row["step"] == 1
        self.skipped = None if due else row
        if self.ledger:  # before the metrics: a kill then never leaves a logged step without its samples
            entry = {"phase": row["phase"], "step": row["step"], "samples": samples.tolist()}
            self._append(self.run.samples, entry)
        if due:
            self.log_metrics(row)

    def flush_skipped(self) -> None:
        """Log the newest step even if it was not due, as at every checkpoint and at the end."""
        if self.skipped is not None:
            row, self.skipped = self.skipped, None
            self.log_metrics(row)

    def log_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl, with its seal."""
        if self.writes:
            row = atomic_files.finite(row)  # as it will be read again
            self.seal = seal_row(self.seal, row)
            self._append(self.run.metrics, {**row, SEAL: self.seal})

    def log_decision(self, row: Mapping[str, Any]) -> None:
        """Append a row to decisions.jsonl."""
        if self.writes:
            self._append(self.run.decisions, row)

    def _append(self, path: Path, row: Mapping[str, Any]) -> None:
        with atomic_files.explain_write_errors(path), path.open("a", encoding="utf-8") as stream:
            stream.write(atomic_files.json_text(row, ensure_ascii=False) + "\n")


def seal_row(previous: str, row: Mapping[str, Any]) -> str:
    """Sixteen hex digits over this row and, through the `previous` row's seal, all rows before it."""
    content = json.dumps({k: v for k, v in row.items() if k != SEAL}, sort_keys=True)
    return hashlib.sha256((previous + content).encode()).hexdigest()[:16]
