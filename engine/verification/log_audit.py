"""Audits the rows of metrics.jsonl in one pass: seals, samples, learning rates, promised rows, decisions."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from isobatch.core.atomic_files import lines_in, parse_row
from isobatch.engine.optimization.early_stopping import EarlyStopping
from isobatch.engine.optimization.schedule import PhaseSchedule, learning_rate
from isobatch.engine.runs.metrics_log import LEFT_OUT, LOST, SEAL, first_seal
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.engine.train.figures import FIGURES, NEEDED, extend_chain, is_step
from isobatch.engine.verification.run_order import RunOrder
from isobatch.models.capabilities import monitor_of

SEAL_ROW = {"phase", "step", SEAL}
_LEFT_OUT_ROW = {"phase", "step", LEFT_OUT}
_CHECKPOINT_ROW = {"phase", "step", "checkpoint", "digest"}
_FINAL_ROW = {"phase", "step", "final", "exported", "summary", "data", "decisions", "rounding", "invariance"}
"""The fields of rows that are neither a step's nor an evaluation's."""
VALID = "valid"


class WrongRecordError(Exception):
    """What is wrong with a record, in a sentence."""


def check(holds: bool, sentence: str) -> None:
    """Raise WrongRecordError where something does not hold."""
    if not holds:
        raise WrongRecordError(sentence)


@dataclass(slots=True)
class PhaseRecord:
    """What the log says about a phase."""

    schedule: PhaseSchedule
    judge: EarlyStopping
    last: dict[str, Any] = field(default_factory=dict)
    """The row of the last step."""
    decisions: list[dict[str, Any]] = field(default_factory=list)
    """The decisions that follow from the evaluations."""
    judged_at: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Step of an evaluation -> the state of early stopping after it."""

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def complete(self) -> bool:
        """Whether training of the phase has ended, by its length or by early stopping."""
        return self.step == self.schedule.steps or self.judge.should_stop


class LogRecord:
    """What one pass over the log found. Every row is checked against what follows from recipe and data."""

    def __init__(self, run: RunFolder, order: RunOrder) -> None:
        """Read the log. `order`: what recipe and data make of its steps. Raises WrongRecordError."""
        self.recipe, self.sampler = run.recipe, order.sampler
        self.metric, direction = monitor_of(order.task, run.facts)
        self.held_out = [split for split in HELD_OUT_SPLITS if split in run.facts.samples]
        judges = (EarlyStopping.of(direction, run.recipe, schedule) for schedule in order.schedules)
        self.phases = list(map(PhaseRecord, order.schedules, judges))
        self.splits: dict[str, dict[str, Any]] = {}
        """Split -> the row of its last evaluation."""
        self.before: dict[str, Any] = {}
        """The evaluation before training, if there was one."""
        self.ending: list[dict[str, Any]] = []
        """The evaluations of the exported weights."""
        self.fields: dict[str, set[str]] = {}
        """Split, or `step` -> the fields of all its rows."""
        self.final: dict[str, Any] | None = None
        """The last row of a finished run."""
        self.checkpoints: dict[str, str] = {}
        """Name of a checkpoint -> its digest when it was written."""
        self.chains: dict[tuple[str, int], tuple[str, int]] = {}
        """(phase, step) of a seal -> (chain, samples seen) there."""
        self.sealed = True
        """Whether the last row has a seal after it."""
        self.left_out: dict[str, set[int]] = {}
        """Phase -> the steps that were left out."""
        self.ledger: list[tuple[str, int, int]] = []
        """(phase, first step, last step) of the stretches for which the log promises a ledger."""
        self.changes: list[dict[str, Any]] = []
        """Rows of decisions.jsonl about changes of the model while it trained."""
        self.unproven: list[str] = []
        """What the records themselves say was not as it should be, a sentence each."""
        self._number = -1 if any(phase.schedule.steps for phase in self.phases) else 0
        """Index of the current phase; -1 before the first step that there is to be."""
        self._batches: Iterator[Any] = iter(())
        self._chain, self._step, self._samples = "", 0, 0
        self._every: int | None = None
        """Steps between rows, as the first row of an attempt says it."""
        self._promises_ledger = False
        seal = hashlib.sha256(first_seal(run).encode())
        for line in lines_in(run.metrics):
            row = parse_row(line)
            if row is None or "phase" not in row:
                raise WrongRecordError("metrics.jsonl holds lines that no run wrote")
            self.sealed = row.keys() == SEAL_ROW
            if self.sealed:
                where = f"at or before phase {row['phase']}, step {row['step']}"
                check(row[SEAL] == seal.hexdigest()[:32], f"metrics.jsonl was changed {where}")
                seal = hashlib.sha256(str(row[SEAL]).encode())
            else:
                seal.update(line)
            self._check_row(row)
        if self.final is not None and self._number >= 0:
            self._check_evaluated(self._now.step, self._now.step)

    @property
    def steps(self) -> int:
        """Optimizer steps whose samples were checked."""
        return sum(phase.step for phase in self.phases)

    @property
    def exported_step(self) -> int:
        """The step of the last phase whose weights are exported."""
        return self.phases[-1].judge.exported(self.phases[-1].step)

    def phase(self, name: str) -> PhaseRecord | None:
        return next((p for p in self.phases if p.schedule.name == name), None)

    @property
    def _now(self) -> PhaseRecord:
        return self.phases[self._number]

    def _check_row(self, row: dict[str, Any]) -> None:
        check(LOST not in row, f"metrics.jsonl: {row.get(LOST)}")
        where = f"metrics.jsonl: phase {row['phase']}, step {row.get('step')}"
        if is_step(row) or row.keys() == _LEFT_OUT_ROW:
            check(not (self.ending or self.final), f"{where}: it goes on after the end of training")
            self._enter(row, where)
            self._check_before(row, where)
            self._check_step(row, where) if is_step(row) else self._leave_out(row)
        elif "split" in row:
            self.splits[row["split"]] = row
            self.fields.setdefault(row["split"], set()).update(row)
            self._check_evaluation(row, f"{where}: the evaluation of {row['split']}")
        elif row.keys() == SEAL_ROW:
            self.chains[row["phase"], row["step"]] = self._chain, self._samples
        elif row.keys() == _CHECKPOINT_ROW:
            self.checkpoints[str(row["checkpoint"])] = str(row["digest"])
        else:
            check(row.keys() == _FINAL_ROW, f"{where}: no run writes such a row")
            self.final = row

    def _check_evaluated(self, first: int, last: int) -> None:
        """Check that the current phase has the evaluations that are due after these steps."""
        name, phase = self._now.schedule.name, self._now
        for step in range(max(1, first), last + 1) if VALID in self.held_out else ():
            is_due = phase.schedule.evaluates_after(step, phase.judge.patience)
            lacks = f"metrics.jsonl lacks the evaluation after phase {name}, step {step}"
            check(not is_due or step in phase.judged_at, lacks)

    def _enter(self, row: dict[str, Any], where: str) -> None:
        """The phase and the place of a step's row."""
        if self._number < 0 or row["phase"] != self._now.schedule.name:
            following = [phase.schedule.name for phase in self.phases[self._number + 1 :]][:1]
            check(following == [row["phase"]], f"{where}: this phase is not the recipe's next one")
            if self._number >= 0:
                self._check_evaluated(self._now.step, self._now.step)
                ends = f"phase {self._now.schedule.name} ends at step {self._step}"
                check(self._now.complete, f"metrics.jsonl: {ends}")
            self._number, self._chain, self._step = self._number + 1, "", 0
            self._batches = self.sampler.batches()
        follows = self._step < row["step"] <= self._now.schedule.steps
        check(follows, f"{where}: it stands after step {self._step}")

    def _check_before(self, row: dict[str, Any], where: str) -> None:
        """Check that every row and evaluation that must stand before this step's row does."""
        if self._every is not None:
            due = 1 if self._step == 0 else (self._step // self._every + 1) * self._every
            check(due >= row["step"], f"metrics.jsonl lacks phase {row['phase']}, step {due}")
        if "log_every" in row:
            self._every, self._promises_ledger = int(row["log_every"]), bool(row.get("ledger"))
        self._check_evaluated(self._step, row["step"] - 1)
        check(not self._now.judge.should_stop, f"{where}: it goes on after early stopping")

    def _leave_out(self, row: dict[str, Any]) -> None:
        """Take in that a step was left out: its samples are not in the chain."""
        self._take_samples(row["step"] - 1)
        next(self._batches)
        self._step = row["step"]
        self.left_out.setdefault(row["phase"], set()).add(self._step)
        self._now.last = {**self._now.last, "step": self._step}

    def _take_samples(self, step: int) -> None:
        """Extend the chain by the batches up to a step."""
        while self._step < step:
            batch = next(self._batches)
            self._chain, self._step = extend_chain(self._chain, batch), self._step + 1
            self._samples += len(batch)

    def _check_step(self, row: dict[str, Any], where: str) -> None:
        self._take_samples(row["step"])
        seen = f"{where}: the samples seen are not the recipe's ({row['chain']}, {self._chain})"
        check(row["chain"] == self._chain, seen)
        lacking = [name for name in (*NEEDED, "tokens") if name not in row]
        check(not lacking, f"{where}: the row lacks {', '.join(lacking)}")
        schedule, before = self._now.schedule, row["step"] - 1
        rate = learning_rate(self.recipe, schedule.lr, before, schedule.steps, schedule.steps_per_epoch)
        for name, value in {"lr": rate, "samples": self._samples}.items():
            is_it = math.isclose(row[name], value, rel_tol=1e-9)
            check(is_it, f"{where}: {name} is {row[name]}, and by the recipe {value}")
        finite = all(isinstance(row[name], int | float) and math.isfinite(row[name]) for name in FIGURES)
        check(finite, f"{where}: the loss or the gradient norm is not finite")
        self._now.last = row
        self.fields.setdefault("step", set()).update(row)
        if self._promises_ledger:
            if "log_every" in row or not self.ledger or self.ledger[-1][0] != row["phase"]:
                self.ledger.append((row["phase"], row["step"], row["step"]))
            else:
                self.ledger[-1] = (row["phase"], self.ledger[-1][1], row["step"])

    def _check_evaluation(self, row: dict[str, Any], where: str) -> None:
        """Judge an evaluation of training as early stopping did. Those of the end decide nothing."""
        split, step = row["split"], row["step"]
        check(split in self.held_out, f"{where}: the data has no such split")
        if step == 0 and split == VALID and self._number < 0 and not self.before:
            self.before = row
            return
        is_there = self._number >= 0 and row["phase"] == self._now.schedule.name
        check(is_there, f"{where}: training was not there")
        phase, judge = self._now, self._now.judge
        is_new = step not in phase.judged_at and step >= phase.step
        if split != VALID or not is_new or not phase.schedule.evaluates_after(step, judge.patience):
            self._check_ending(row, where)
            return
        check(step <= phase.schedule.steps, f"{where}: the phase ends before")
        check(self.metric in row, f"{where}: it lacks {self.metric}")
        place = {"phase": row["phase"], "step": step}
        if judge.update(row[self.metric], step) and judge.patience:
            best = {"decision": "best checkpoint", "metric": self.metric, "value": judge.best}
            phase.decisions.append({**place, **best})
        if judge.should_stop:
            phase.decisions.append({**place, "decision": "early stop", "best_step": judge.best_step})
        phase.judged_at[step] = dataclasses.asdict(judge)

    def _check_ending(self, row: dict[str, Any], where: str) -> None:
        """Check an evaluation of the exported weights: of each split one, and one more of that which also has
        the figures of the export.
        """
        last = self.phases[-1]
        is_end = self._now is last and last.complete and row["step"] == self.exported_step
        check(is_end, f"{where}: none is due there")
        self.ending.append(row)
        count = sum(one["split"] == row["split"] for one in self.ending)
        check(count <= 1 + (row["split"] == self.held_out[0]), f"{where}: stands there {count} times")
