"""Audits the rows of metrics.jsonl in one pass: seals, samples, learning rates, promised rows, decisions."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import lines_in, parse_row
from isobatch.engine.loading.sampler import extend_chain
from isobatch.engine.optimization.early_stopping import EarlyStopping
from isobatch.engine.optimization.schedule import PhaseSchedule, learning_rate
from isobatch.engine.runs.metrics_log import LEFT_OUT, LOST, SEAL, first_seal
from isobatch.engine.runs.summary import HELD_OUT_SPLITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from isobatch.core.recipe import Recipe
    from isobatch.engine.loading.sampler import Sampler
    from isobatch.engine.runs.run_folder import RunFolder

_SEAL_ROW = {"phase", "step", SEAL}
_FORMS = (
    _SEAL_ROW,
    {"phase", "step", LEFT_OUT},
    {"phase", "step", "checkpoint", "digest"},
    {"phase", "step", "final", "exported", "summary", "data", "decisions", "rounding", "invariance"},
)
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


def audit_log(
    run: RunFolder,
    sampler: Sampler,
    schedules: Sequence[PhaseSchedule],
    monitor: tuple[str, str],
) -> LogRecord:
    """Read the log once. `monitor`: metric and direction of early stopping."""
    recipe = run.recipe
    phases = [
        PhaseRecord(
            s, EarlyStopping(monitor[1], recipe.patience if s.early_stopping else 0, recipe.min_delta)
        )
        for s in schedules
    ]
    record = LogRecord(phases)
    seals = _Seals(first_seal(recipe.hash(), run.facts.fingerprint))
    held_out = {split for split in HELD_OUT_SPLITS if split in run.facts.samples}
    rows = _Rows(record, recipe, sampler, monitor[0], held_out)
    for line in lines_in(run.metrics):
        row = parse_row(line)
        problem = "metrics.jsonl holds lines that no run wrote"
        if row is not None and "phase" in row:
            problem = seals.check(row, line) or rows.check(row)
        if problem:
            record.problems.append(problem)
            return record
    record.sealed = seals.sealed
    record.problems += rows.unmet()
    return record


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class _Seals:
    """Computes the seals of the rows and compares them with the logged ones."""

    def __init__(self, first: str) -> None:
        self.hash, self.sealed = hashlib.sha256(first.encode()), True

    def check(self, row: Mapping[str, Any], line: bytes) -> str:
        """The problem with a row's seal; empty without."""
        if row.keys() == _SEAL_ROW:
            computed = self.hash.hexdigest()[:32]
            self.hash = hashlib.sha256(str(row[SEAL]).encode())
        else:
            computed = None
            self.hash.update(line)
        self.sealed = computed is not None
        if computed is not None and row[SEAL] != computed:
            return f"metrics.jsonl was changed at or before phase {row['phase']}, step {row.get('step')}"
        return ""


class _Rows:
    """Checks row by row what follows from the recipe, and keeps what later checks need."""

    def __init__(
        self, record: LogRecord, recipe: Recipe, sampler: Sampler, metric: str, held_out: set[str]
    ) -> None:
        self.record, self.recipe, self.sampler = record, recipe, sampler
        self.metric, self.held_out, self.evaluates = metric, held_out, VALID in held_out
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

    def check(self, row: dict[str, Any]) -> str:
        """The problem with a row; empty without."""
        if LOST in row:
            return f"metrics.jsonl: {row[LOST]}"
        where = f"phase {row['phase']}, step {row.get('step')}"
        if "chain" not in row and "split" not in row and row.keys() not in _FORMS:
            return f"metrics.jsonl: {where}: no run writes such a row"
        if "chain" in row or LEFT_OUT in row:
            if self.record.ending or self.record.final:
                return f"metrics.jsonl goes on after the end of training, at {where}"
            return self._check_step(row) if "chain" in row else self._check_left_out(row)
        if "final" in row:
            self.record.final = row
        elif "checkpoint" in row:
            self.record.checkpoints[str(row["checkpoint"])] = str(row.get("digest"))
        elif SEAL in row and "split" not in row:
            self.record.chains[row["phase"], row["step"]] = self.chain, self.samples
        elif "split" in row:
            self.record.splits[row["split"]] = row
            self.record.fields.setdefault(row["split"], set()).update(row)
            return self._check_evaluation(row)
        return ""

    def _check_step(self, row: dict[str, Any]) -> str:
        return self._enter(row) or self._missing_before(row) or self._wrong_figures(row)

    def _check_left_out(self, row: dict[str, Any]) -> str:
        """Take in that a step was left out: its samples are not in the chain."""
        if problem := self._enter(row) or self._missing_before(row):
            return problem
        self._take_samples(row["step"] - 1)
        next(self.batches)
        self.step = row["step"]
        self.record.left_out.setdefault(row["phase"], set()).add(self.step)
        self.phase.last = {**self.phase.last, "step": self.step}
        return ""

    def _enter(self, row: dict[str, Any]) -> str:
        """The phase and the place of a step's row."""
        if self.number < 0 or row["phase"] != self.phase.schedule.name:
            if problem := self.unmet() if self.number >= 0 else []:
                return problem[0]
            if self.number + 1 == len(self.record.phases) or (
                self.record.phases[self.number + 1].schedule.name != row["phase"]
            ):
                return f"metrics.jsonl: phase {row['phase']} is not the recipe's next one"
            if self.number >= 0 and not self.phase.complete:
                return f"metrics.jsonl: phase {self.phase.schedule.name} ends at step {self.phase.step}"
            self.number, self.chain, self.step = self.number + 1, "", 0
            self.batches = self.sampler.batches()
        if not self.step < row["step"] <= self.phase.schedule.steps:
            return f"metrics.jsonl: phase {row['phase']}: step {row['step']} stands after step {self.step}"
        return ""

    def _take_samples(self, step: int) -> None:
        """Extend the chain by the batches up to a step."""
        while self.step < step:
            batch = next(self.batches)
            self.chain, self.step = extend_chain(self.chain, batch), self.step + 1
            self.samples += len(batch)

    def _missing_before(self, row: dict[str, Any]) -> str:
        """A row or an evaluation that must stand before this step's row."""
        if self.every is not None:
            due = 1 if self.step == 0 else (self.step // self.every + 1) * self.every
            if due < row["step"]:
                return f"metrics.jsonl lacks phase {row['phase']}, step {due}"
        if "log_every" in row:
            self.every, self.ledger = int(row["log_every"]), bool(row.get("ledger"))
        for step in range(max(1, self.step), row["step"]) if self.evaluates else ():
            if self.phase.evaluation_is_due(step) and step not in self.phase.judged_at:
                return f"metrics.jsonl lacks the evaluation after phase {row['phase']}, step {step}"
        if self.phase.judge.should_stop:
            return f"metrics.jsonl goes on after early stopping, at phase {row['phase']}, step {row['step']}"
        return ""

    def _wrong_figures(self, row: dict[str, Any]) -> str:
        where = f"phase {row['phase']}, step {row['step']}"
        self._take_samples(row["step"])
        if row["chain"] != self.chain:
            return f"{where}: the samples seen are not the recipe's ({row['chain']}, {self.chain})"
        schedule, needed = self.phase.schedule, ("loss", "lr", "grad_norm", "samples", "tokens")
        if lacking := [name for name in needed if name not in row]:
            return f"{where}: the row lacks {', '.join(lacking)}"
        rate = learning_rate(
            self.recipe, schedule.lr, row["step"] - 1, schedule.steps, schedule.steps_per_epoch
        )
        wanted = {"lr": rate, "samples": self.samples}
        for name, value in wanted.items():
            if name in row and not math.isclose(row[name], value, rel_tol=1e-9):
                return f"{where}: {name} is {row[name]}, and by the recipe {value}"
        if not all(_is_finite(row.get(name, 0)) for name in ("loss", "grad_norm")):
            return f"{where}: the loss or the gradient norm is not finite"
        self.phase.last = row
        self.record.fields.setdefault("step", set()).update(row)
        if self.ledger:
            self._promise_ledger(row["phase"], row["step"], "log_every" in row)
        return ""

    def _promise_ledger(self, phase: str, step: int, anew: bool) -> None:
        ledger = self.record.ledger
        if anew or not ledger or ledger[-1][0] != phase:
            ledger.append((phase, step, step))
        else:
            ledger[-1] = (phase, ledger[-1][1], step)

    def _check_evaluation(self, row: dict[str, Any]) -> str:
        """Judge an evaluation of training as early stopping did. Those of the end decide nothing."""
        split, step = row["split"], row["step"]
        where = f"metrics.jsonl: the evaluation of {split} after phase {row['phase']}, step {step}"
        if split not in self.held_out:
            return f"{where}: the data has no such split"
        if self.number < 0 or row["phase"] != self.phase.schedule.name:
            return f"{where}: training was not there"
        phase = self.phase
        if (
            split != VALID
            or step < phase.step
            or not phase.evaluation_is_due(step)
            or step in phase.judged_at
        ):
            return self._check_ending(row, where)
        if step > phase.schedule.steps:
            return f"{where}: the phase ends before"
        if self.metric not in row:
            return f"metrics.jsonl: the evaluation after step {step} lacks {self.metric}"
        judge, place = phase.judge, {"phase": row["phase"], "step": step}
        if judge.update(row[self.metric], step) and judge.patience:
            best = {"decision": "best checkpoint", "metric": self.metric, "value": judge.best}
            phase.decisions.append({**place, **best})
        if judge.should_stop:
            phase.decisions.append({**place, "decision": "early stop", "best_step": judge.best_step})
        phase.judged_at[step] = judge.to_dict()
        return ""

    def _check_ending(self, row: dict[str, Any], where: str) -> str:
        """An evaluation of the exported weights: of each split one, and one more of that which also has the
        figures of the export.
        """
        record, phase = self.record, self.phase
        if phase is not record.phases[-1] or not phase.complete or row["step"] != record.exported_step:
            return f"{where}: none is due there"
        record.ending.append(row)
        first = next(split for split in HELD_OUT_SPLITS if split in self.held_out)
        count = sum(one["split"] == row["split"] for one in record.ending)
        return f"{where}: stands there {count} times" if count > 1 + (row["split"] == first) else ""

    def unmet(self) -> list[str]:
        """What the current phase lacks at its end: the evaluation after its last step, if it was due."""
        if self.number < 0 or not self.evaluates:
            return []
        phase, step = self.phase, self.phase.step
        if self.record.final is None or not phase.evaluation_is_due(step) or step in phase.judged_at:
            return []
        return [f"metrics.jsonl lacks the evaluation after phase {phase.schedule.name}, step {step}"]
