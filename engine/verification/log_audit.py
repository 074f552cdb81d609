"""Audits the rows of metrics.jsonl in one pass: seals, samples, learning rates, promised rows, decisions."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import lines_in, parse_row
from isobatch.engine.loading.sampler import extend_chain
from isobatch.engine.optimization.early_stopping import EarlyStopping
from isobatch.engine.optimization.schedule import PhaseSchedule, learning_rate
from isobatch.engine.runs.metrics_log import LEFT_OUT, LOST, SEAL, first_seal
from isobatch.engine.runs.step_rows import FIGURES, NEEDED, is_step
from isobatch.engine.runs.summary import HELD_OUT_SPLITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.core.recipe import Recipe
    from isobatch.engine.loading.sampler import Sampler
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.run_order import RunOrder

SEAL_ROW = {"phase", "step", SEAL}
_LEFT_OUT_ROW = {"phase", "step", LEFT_OUT}
_CHECKPOINT_ROW = {"phase", "step", "checkpoint", "digest"}
_FINAL_ROW = {"phase", "step", "final", "exported", "summary", "data", "decisions", "rounding", "invariance"}
"""The fields of rows that are neither a step's nor an evaluation's."""
VALID = "valid"


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

    def evaluation_is_due(self, step: int) -> bool:
        """Whether training evaluates after this step; as the phase loop decides it."""
        if step == self.schedule.steps:
            return self.judge.patience > 0
        return step % self.schedule.eval_every == 0


@dataclass(slots=True)
class LogRecord:
    """What one pass over the log found."""

    phases: list[PhaseRecord]
    problems: list[str] = field(default_factory=list)
    """A sentence each; the pass ends at the first."""
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Split -> the row of its last evaluation."""
    ending: list[dict[str, Any]] = field(default_factory=list)
    """The evaluations of the exported weights."""
    fields: dict[str, set[str]] = field(default_factory=dict)
    """Split, or `step` -> the fields of all its rows."""
    final: dict[str, Any] | None = None
    """The last row of a finished run."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """Name of a checkpoint -> its digest when it was written."""
    chains: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    """(phase, step) of a seal -> (chain, samples seen) there."""
    sealed: bool = True
    """Whether the last row has a seal after it."""
    left_out: dict[str, set[int]] = field(default_factory=dict)
    """Phase -> the steps that were left out."""
    ledger: list[tuple[str, int, int]] = field(default_factory=list)
    """(phase, first step, last step) of the stretches for which the log promises a ledger."""

    @property
    def exported_step(self) -> int:
        """The step of the last phase whose weights are exported: the best one, else the last one."""
        last = self.phases[-1]
        return last.judge.best_step if last.judge.patience and last.judge.best_step else last.step

    def phase(self, name: str) -> PhaseRecord | None:
        return next((p for p in self.phases if p.schedule.name == name), None)


class WrongRecordError(Exception):
    """What is wrong with a record, in a sentence."""


def check(holds: bool, sentence: str) -> None:
    """Raise WrongRecordError where something does not hold."""
    if not holds:
        raise WrongRecordError(sentence)


def audit_log(run: RunFolder, order: RunOrder) -> LogRecord:
    """Read the log once. `order`: what recipe and data make of its steps."""
    recipe, (metric, direction) = run.recipe, order.task.best_metric
    patience = [recipe.patience if schedule.early_stopping else 0 for schedule in order.schedules]
    judges = [EarlyStopping(direction, least, recipe.min_delta) for least in patience]
    record = LogRecord(list(map(PhaseRecord, order.schedules, judges)))
    held_out = [split for split in HELD_OUT_SPLITS if split in run.facts.samples]
    rows = _Rows(record, recipe, order.sampler, metric, held_out)
    seal = hashlib.sha256(first_seal(recipe.hash(), run.facts.fingerprint).encode())
    try:
        for line in lines_in(run.metrics):
            row = parse_row(line)
            if row is None or "phase" not in row:
                raise WrongRecordError("metrics.jsonl holds lines that no run wrote")
            record.sealed = row.keys() == SEAL_ROW
            if record.sealed:
                where = f"at or before phase {row['phase']}, step {row['step']}"
                check(row[SEAL] == seal.hexdigest()[:32], f"metrics.jsonl was changed {where}")
                seal = hashlib.sha256(str(row[SEAL]).encode())
            else:
                seal.update(line)
            rows.check(row)
        rows.check_end()
    except WrongRecordError as error:
        record.problems.append(str(error))
    return record


class _Rows:
    """Checks row by row what follows from the recipe, and keeps what later checks need.

    All checks raise WrongRecordError.
    """

    def __init__(
        self, record: LogRecord, recipe: Recipe, sampler: Sampler, metric: str, held_out: list[str]
    ) -> None:
        self.record, self.recipe, self.sampler = record, recipe, sampler
        self.metric, self.held_out = metric, held_out
        self.number = -1
        """Index of the current phase."""
        self.batches: Iterator[Any] = iter(())
        self.chain, self.step, self.samples = "", 0, 0
        self.every: int | None = None
        """Steps between rows, as the first row of an attempt says it."""
        self.ledger = False

    @property
    def phase(self) -> PhaseRecord:
        return self.record.phases[self.number]

    def check(self, row: dict[str, Any]) -> None:
        """Check a row."""
        check(LOST not in row, f"metrics.jsonl: {row.get(LOST)}")
        where, record = f"phase {row['phase']}, step {row.get('step')}", self.record
        if is_step(row) or row.keys() == _LEFT_OUT_ROW:
            is_over = bool(record.ending or record.final)
            check(not is_over, f"metrics.jsonl goes on after the end of training, at {where}")
            self._enter(row)
            self._check_before(row)
            self._check_step(row, where) if is_step(row) else self._leave_out(row)
        elif "split" in row:
            record.splits[row["split"]] = row
            record.fields.setdefault(row["split"], set()).update(row)
            self._check_evaluation(row)
        elif row.keys() == SEAL_ROW:
            record.chains[row["phase"], row["step"]] = self.chain, self.samples
        elif row.keys() == _CHECKPOINT_ROW:
            record.checkpoints[str(row["checkpoint"])] = str(row["digest"])
        else:
            check(row.keys() == _FINAL_ROW, f"metrics.jsonl: {where}: no run writes such a row")
            record.final = row

    def check_end(self) -> None:
        """Check that the current phase has the evaluation after its last step, if it was due."""
        if self.number < 0 or not self.evaluates or self.record.final is None:
            return
        phase, step = self.phase, self.phase.step
        is_there = not phase.evaluation_is_due(step) or step in phase.judged_at
        name = phase.schedule.name
        check(is_there, f"metrics.jsonl lacks the evaluation after phase {name}, step {step}")

    @property
    def evaluates(self) -> bool:
        return VALID in self.held_out

    def _enter(self, row: dict[str, Any]) -> None:
        """The phase and the place of a step's row."""
        if self.number < 0 or row["phase"] != self.phase.schedule.name:
            self.check_end()
            following = [phase.schedule.name for phase in self.record.phases[self.number + 1 :]][:1]
            is_next = following == [row["phase"]]
            check(is_next, f"metrics.jsonl: phase {row['phase']} is not the recipe's next one")
            if self.number >= 0:
                ends = f"phase {self.phase.schedule.name} ends at step {self.phase.step}"
                check(self.phase.complete, f"metrics.jsonl: {ends}")
            self.number, self.chain, self.step = self.number + 1, "", 0
            self.batches = self.sampler.batches()
        follows = self.step < row["step"] <= self.phase.schedule.steps
        stands = f"step {row['step']} stands after step {self.step}"
        check(follows, f"metrics.jsonl: phase {row['phase']}: {stands}")

    def _check_before(self, row: dict[str, Any]) -> None:
        """Check that every row and evaluation that must stand before this step's row does."""
        if self.every is not None:
            due = 1 if self.step == 0 else (self.step // self.every + 1) * self.every
            check(due >= row["step"], f"metrics.jsonl lacks phase {row['phase']}, step {due}")
        if "log_every" in row:
            self.every, self.ledger = int(row["log_every"]), bool(row.get("ledger"))
        for step in range(max(1, self.step), row["step"]) if self.evaluates else ():
            is_there = not self.phase.evaluation_is_due(step) or step in self.phase.judged_at
            check(is_there, f"metrics.jsonl lacks the evaluation after phase {row['phase']}, step {step}")
        where = f"phase {row['phase']}, step {row['step']}"
        check(not self.phase.judge.should_stop, f"metrics.jsonl goes on after early stopping, at {where}")

    def _leave_out(self, row: dict[str, Any]) -> None:
        """Take in that a step was left out: its samples are not in the chain."""
        self._take_samples(row["step"] - 1)
        next(self.batches)
        self.step = row["step"]
        self.record.left_out.setdefault(row["phase"], set()).add(self.step)
        self.phase.last = {**self.phase.last, "step": self.step}

    def _take_samples(self, step: int) -> None:
        """Extend the chain by the batches up to a step."""
        while self.step < step:
            batch = next(self.batches)
            self.chain, self.step = extend_chain(self.chain, batch), self.step + 1
            self.samples += len(batch)

    def _check_step(self, row: dict[str, Any], where: str) -> None:
        self._take_samples(row["step"])
        same = row["chain"] == self.chain
        check(same, f"{where}: the samples seen are not the recipe's ({row['chain']}, {self.chain})")
        lacking = [name for name in (*NEEDED, "tokens") if name not in row]
        check(not lacking, f"{where}: the row lacks {', '.join(lacking)}")
        schedule, before = self.phase.schedule, row["step"] - 1
        rate = learning_rate(self.recipe, schedule.lr, before, schedule.steps, schedule.steps_per_epoch)
        for name, value in {"lr": rate, "samples": self.samples}.items():
            is_it = math.isclose(row[name], value, rel_tol=1e-9)
            check(is_it, f"{where}: {name} is {row[name]}, and by the recipe {value}")
        finite = all(isinstance(row[name], int | float) and math.isfinite(row[name]) for name in FIGURES)
        check(finite, f"{where}: the loss or the gradient norm is not finite")
        self.phase.last = row
        self.record.fields.setdefault("step", set()).update(row)
        if self.ledger:
            promised = self.record.ledger
            if "log_every" in row or not promised or promised[-1][0] != row["phase"]:
                promised.append((row["phase"], row["step"], row["step"]))
            else:
                promised[-1] = (row["phase"], promised[-1][1], row["step"])

    def _check_evaluation(self, row: dict[str, Any]) -> None:
        """Judge an evaluation of training as early stopping did. Those of the end decide nothing."""
        split, step = row["split"], row["step"]
        where = f"metrics.jsonl: the evaluation of {split} after phase {row['phase']}, step {step}"
        check(split in self.held_out, f"{where}: the data has no such split")
        is_there = self.number >= 0 and row["phase"] == self.phase.schedule.name
        check(is_there, f"{where}: training was not there")
        phase, judge = self.phase, self.phase.judge
        is_due = phase.evaluation_is_due(step) and step not in phase.judged_at and step >= phase.step
        if split != VALID or not is_due:
            self._check_ending(row, where)
            return
        check(step <= phase.schedule.steps, f"{where}: the phase ends before")
        check(self.metric in row, f"metrics.jsonl: the evaluation after step {step} lacks {self.metric}")
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
        record, phase = self.record, self.phase
        is_end = phase is record.phases[-1] and phase.complete and row["step"] == record.exported_step
        check(is_end, f"{where}: none is due there")
        record.ending.append(row)
        count = sum(one["split"] == row["split"] for one in record.ending)
        check(count <= 1 + (row["split"] == self.held_out[0]), f"{where}: stands there {count} times")
