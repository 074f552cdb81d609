"""Evaluations of held-out data, and what they decide: the best checkpoint, and early stopping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from isobatch.core.measures import now
from isobatch.core.terminal import SECONDS_BETWEEN_LINES, format_metrics
from isobatch.engine.optimization.early_stopping import EarlyStopping
from isobatch.engine.optimization.schedule import CLOSING_STEPS
from isobatch.engine.runs.metrics_log import MetricsLog
from isobatch.engine.runs.peak_memory import PeakMemory
from isobatch.engine.train.evaluate import at_least_few, evaluate, monitored
from isobatch.engine.train.hooks import Hook, Signal, name_of
from isobatch.engine.train.state import Training
from isobatch.models.capabilities import monitor_of


class Evaluate(Hook):
    """Measures the valid split every so many steps, and judges the metric that the task monitors."""

    def __init__(
        self,
        state: Training,
        log: MetricsLog,
        peak: PeakMemory,
        say: Callable[..., None],
        others: Sequence[Hook] = (),
        send: Callable[[Mapping[str, Any], int, str], None] = lambda *_: None,
    ) -> None:
        """`state`: of the phase that is judged. `others`: hooks whose tensors may be weights,
        which are evaluated beside.
        `send`: for figures, with their place in steps and what to put before their names.
        """
        self.training, self.log, self.peak, self.say = state, log, peak, say
        self.others, self.send = others, send
        self._shown_at = -math.inf
        direction = monitor_of(state.task, state.facts)[1]
        self.judge = EarlyStopping.of(direction, state.recipe, state.schedule)

    def ended(self) -> bool:
        return self.judge.should_stop

    def due(self, step: int) -> bool:
        schedule = self.training.schedule
        return "valid" in self.training.splits and schedule.evaluates_after(step, self.judge.patience)

    def leads(self, step: int) -> bool:
        """Whether an evaluation that may choose the best checkpoint follows, so that `verify` can redo it."""
        chooses = self.judge.patience > 0 and step + CLOSING_STEPS <= self.training.schedule.steps
        return chooses and self.due(step + CLOSING_STEPS)

    def needed(self, step: int) -> set[int]:
        """The steps of the best checkpoint so far, and of those from which it and the next one can be redone.

        Empty where early stopping is off.
        """
        if not self.judge.patience:
            return set()
        schedule, best = self.training.schedule, self.judge.best_step
        coming = min((step // schedule.eval_every + 1) * schedule.eval_every, schedule.steps)
        return {best, *(one - CLOSING_STEPS for one in (best, coming, step))}

    def at_pause(self, state: Training, step: int, asked: set[Signal]) -> set[Signal]:  # noqa: ARG002
        if not self.due(step):
            return set()
        (name, _), judge = monitor_of(state.task, state.facts), self.judge
        beside = {name_of(hook): hook.tensors() for hook in self.others if hook.weights}
        metrics = self.measure("valid", state.recipe.eval_fraction, step, beside)
        wanted, place = set[Signal](), {"phase": state.schedule.name, "step": step}
        if judge.update(monitored(metrics, name), step) and judge.patience:
            best = {"decision": "best checkpoint", "metric": name, "value": judge.best}
            self.log.log_decision({**place, **best})
            wanted.add("save")
        if judge.should_stop:
            why = f"{name} has not improved for {judge.waited} evaluations"
            stop = {"decision": "early stop", "reason": why, "best_step": judge.best_step}
            self.log.log_decision({**place, **stop})
            if step < state.schedule.steps:
                self.say(f"stopped early at step {step}: {why}")
            wanted |= {"save", "end_phase"}
        return wanted

    def better_before(self, last: Mapping[str, float], beside: Mapping[str, Mapping[str, Tensor]]) -> str:
        """That validation was best in the first half of a phase without patience, on the same samples as at
        the end; empty where it was not. `last`: metrics of the end on all of them. All ranks call this.
        """
        state, judge, name = self.training, self.judge, monitor_of(self.training.task, self.training.facts)[0]
        step, share = state.progress.step, at_least_few(state.recipe.eval_fraction, state.splits["valid"])
        if not state.schedule.early_stopping or judge.patience or not 0 < 2 * judge.best_step <= step:
            return ""
        ended = monitored(evaluate(state, "valid", share, beside=beside) if share < 1 else last, name)
        part = f", both on {100 * share:.3g} % of the rows" if share < 1 else ""
        best = f"step {judge.best_step} of {step} ({name} {judge.best:.4f}, at the end {ended:.4f}{part})"
        return f"validation was best at {best}" if judge.gain(ended) < -judge.min_delta else ""

    def measure(
        self, split: str, fraction: float, step: int, beside: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, float]:
        """Evaluate a split, log its metrics, and show them every few seconds and at the end; `step`: that of
        the weights. `beside`: see `evaluate`.
        """
        state = self.training
        fraction = at_least_few(fraction, state.splits[split])
        place = {"phase": state.schedule.name, "step": step, "split": split}
        metrics = evaluate(state, split, fraction, partial(self.log.log_answers, place), beside)
        self.peak.observe()
        self.log.log_metrics({**place, **metrics})
        if step == state.progress.step:  # else they are of earlier weights: the final figures say those
            self.send(metrics, state.progress.steps, f"{split}/")
        # A perplexity of words is for comparison with papers, and has many digits until a model knows words.
        shown = {name: value for name, value in metrics.items() if not name.endswith("word_perplexity")}
        part = f", on {100 * fraction:.3g} % of its samples" if fraction < 1 else ""
        when = f"after step {step}" if step else "before training"
        is_due = step in (0, state.schedule.steps) or now() - self._shown_at >= SECONDS_BETWEEN_LINES
        self._shown_at = now() if is_due else self._shown_at
        self.say(f"{split} {when}{part}: {format_metrics(shown, '.4f')}", is_due or split != "valid")
        return metrics

    def state(self) -> dict[str, Any]:
        return dataclasses.asdict(self.judge)

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        self.judge = EarlyStopping(**state)
