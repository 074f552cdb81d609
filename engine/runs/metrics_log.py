"""The rows of metrics.jsonl, samples.jsonl and decisions.jsonl, written by one rank."""

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


class MetricsLog:
    """Appends rows. Each row of metrics.jsonl is sealed: a hash over it and all rows before it."""

    def __init__(self, run: RunFolder, writes: bool, every: int = 1, ledger: bool = False) -> None:
        self.run, self.writes, self.every, self.ledger = run, writes, every, ledger
        self.seal = ""
        self.skipped: Mapping[str, Any] | None = None
        """The newest step, where it was not due to be logged."""

    def truncate_after(self, phases: list[str], phase: str, step: int) -> None:
        """Drop what was logged after `step`: it will be trained and written again."""
        if self.writes:
            self.run.truncate_logs(phases, phase, step)
            rows = atomic_files.read_jsonl(self.run.metrics)
            self.seal = rows[-1].get(SEAL, "") if rows else ""

    def log_step(self, row: Mapping[str, Any], samples: np.ndarray) -> None:
        """Log a step where it is due, and its samples where a ledger is kept."""
        if not self.writes:
            return
        due = row["step"] % self.every == 0 or row["step"] == 1
        self.skipped = None if due else row
        if self.ledger:  # first: a step that is logged is then in the ledger, whenever a kill comes
            entry = {"phase": row["phase"], "step": row["step"], "samples": samples.tolist()}
            self._append(self.run.samples, entry)
        if due:
            self.log_metrics(row)

    def flush_skipped(self) -> None:
        """Log the newest step even if it was not due: where training stands is always on record."""
        if self.skipped is not None:
            row, self.skipped = self.skipped, None
            self.log_metrics(row)

    def log_metrics(self, row: Mapping[str, Any]) -> None:
        if self.writes:
            self.seal = seal_row(self.seal, row)
            self._append(self.run.metrics, {**row, SEAL: self.seal})

    def log_decision(self, row: Mapping[str, Any]) -> None:
        if self.writes:
            self._append(self.run.decisions, row)

    def _append(self, path: Path, row: Mapping[str, Any]) -> None:
        with atomic_files.explain_write_errors(path), path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def seal_row(before: str, row: Mapping[str, Any]) -> str:
    """Sixteen hex digits over this row and, through `before`, all rows above it."""
    content = json.dumps({k: v for k, v in row.items() if k != SEAL}, sort_keys=True)
    return hashlib.sha256((before + content).encode()).hexdigest()[:16]
