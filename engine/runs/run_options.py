"""Run options: output folder, checkpoints, logging and restarts. They do not change what is learnt."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from isobatch.core.errors import UserError
from isobatch.core.flags import Interval, check_fields
from isobatch.core.number_ranges import Count, Positive
from isobatch.data.streaming.store import refuse_secrets

MOST_NAME_BYTES = 200
"""File systems take 255, and a folder that is being made has a longer name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options of a launch; each field is a flag."""

    out: str = "runs"
    """Folder that holds the runs."""
    name: str | None = None
    """Name of the run's folder; by default task and recipe hash."""
    resume: str = "auto"
    """auto goes on with a stopped run of the same recipe, never starts anew, or a run's folder."""
    again: bool = False
    """Start a new run although a finished one has this recipe."""
    save_every: Interval = Interval(10, "minutes")
    """How often to save a checkpoint: steps, a share of the phase (10%) or of an epoch, or minutes (10m)."""
    keep: Positive = 2
    """Checkpoints kept."""
    checkpoint_copy: str | None = None
    """Also keep the checkpoints there, sent in the background: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, or any
    URL that fsspec knows. `resume s3://BUCKET/PREFIX/RUN` goes on from them on another machine."""
    before: bool | None = None
    """Measure the validation split before the first step, too; by default where a loaded language model is
    trained on."""
    log_every: Positive = 1
    """Steps between rows of metrics.jsonl."""
    tracker: Literal["none", "tensorboard", "wandb", "mlflow", "trackio"] = "none"
    """Also report metrics there."""
    ledger: bool = False
    """Write the sample numbers of every step to samples.bin."""
    hook: tuple[str, ...] = ()
    """Your own hooks: ./file.py:Class, several with commas between them. They see every step and may stop the
    run; none changes what is learnt, unless its class says so."""
    anomaly: bool = False
    """Find the operation that made a NaN; slow."""
    hang_timeout: Count = 1800
    """Seconds without an answer from another process after which the run ends."""
    max_restarts: Count = 3
    """How often a run goes on by itself after a process died or stood still."""
    debug: bool = False
    """Show tracebacks of the user's errors too."""
    quiet: bool = False
    """No progress on the terminal."""
    stop_at: float | None = field(default=None, metadata={"derived": True})
    """The share of the steps of its one phase after which the next evaluation stops it, saved, as a signal
    does: a sweep's --halving sets it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.save_every.value == 0:
            raise UserError(f"--save-every {self.save_every}: must be above 0")
        if self.checkpoint_copy is not None:
            refuse_secrets(self.checkpoint_copy, "--checkpoint-copy", "run.json")
            if "://" not in self.checkpoint_copy:
                shown = self.checkpoint_copy.rpartition("@")[2]  # what stands before may be a password
                raise UserError(f"--checkpoint-copy {shown}: is no URL such as s3://bucket/prefix")
        if self.name is not None and (self.name.startswith(".") or {"/", os.sep} & set(self.name)):
            raise UserError(f"--name {self.name}: is a folder's name in --out, without / and no dot in front")
        if self.name is not None and (size := len(os.fsencode(self.name))) > MOST_NAME_BYTES:
            raise UserError(f"--name {self.name[:20]}...: has {size} bytes, and may have {MOST_NAME_BYTES}")

    def sends(self) -> list[str]:
        """Where a run with these options sends its checkpoints and figures."""
        copy = [] if self.checkpoint_copy is None else [f"checkpoints to {self.checkpoint_copy}"]
        return copy + ([] if self.tracker == "none" else [f"figures to {self.tracker}"])
