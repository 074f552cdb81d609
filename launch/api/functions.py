"""isobatch from Python: a recipe and a run, plan, train, verify, load and replay.

What the command line does, as functions that leave the process as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import BUG, DONE, STOPPED, WRONG_INPUT, StopRequestedError, TrainingError, UserError
from isobatch.core.flags import build_options, flags_of, known_options
from isobatch.core.plan import Plan, PlanOptions
from isobatch.core.recipe import Recipe as CompleteRecipe
from isobatch.engine import consent
from isobatch.engine.registry import complete, workload_of
from isobatch.engine.runs.ledger import LedgerStep, read_ledger
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.task_files import task_file_problem
from isobatch.engine.train.figures import is_step
from isobatch.engine.train.own_hooks import hooks_given, with_learning_hooks
from isobatch.launch.local.arguments import Request, check_request
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.launch.local.run_setup import open_run

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.engine.forensics.observed_step import StepParts
    from isobatch.engine.train.hooks import Hook


class Run:
    """A run's folder, and what is in it."""

    def __init__(self, folder: RunFolder) -> None:
        self._files = RunFolder(folder.folder.resolve())  # wherever the program goes from here

    @property
    def folder(self) -> Path:
        return self._files.folder

    @property
    def final(self) -> Path:
        """The exported model, once the run is done."""
        return self._files.final

    @property
    def recipe(self) -> Recipe:
        found = self._files.recipe
        consent.received(found)
        return Recipe(**{f.name: getattr(found, f.name) for f in dataclasses.fields(found)})

    @property
    def plan(self) -> Plan:
        """How it was run last."""
        return self._files.plan

    @property
    def facts(self) -> Facts:
        """What the data turned out to be."""
        return self._files.facts

    @property
    def status(self) -> str:
        """done, stopped, failed, or unfinished: killed, or running now."""
        return self._files.status()

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json: what the run came to; empty before its first end."""
        return self._files.summary() or {}

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the held-out split by name."""
        return dict(self.summary.get("metrics", {}))

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: a row per logged step and per evaluation."""
        return [row for row in rows_in(self._files.metrics) if is_step(row) or "split" in row]

    def ledger(self) -> Iterator[LedgerStep]:
        """Phase, step and sample numbers of every step, in order; nothing of a run without --ledger."""
        return read_ledger(self._files)

    def model(self) -> nn.Module:
        """The trained model in evaluation mode, with weights of the best checkpoint, else of the newest.

        Raises UserError where the run has no checkpoint, or would execute code that nobody here agreed to.
        """
        from isobatch.launch.commands.evaluate import replay_trained

        consent.require(self.recipe, self.folder)
        # Under native noise the model's own dropout modules stay: it is the user's to train further.
        recipe = dataclasses.replace(self.recipe, noise="native")
        with preserve_process_state(), replay_trained(self._files, recipe=recipe)[0].builder as builder:
            return builder.state.model.eval()

    def predictor(self, **options: Any) -> Callable[[Sequence[str | list[str]]], list[dict[str, Any]]]:
        """A function of texts that returns a dict for each, as `isobatch predict` gives. It is read once.

        A classifier of pairs takes lists of two texts, a recommender ids of users, a task of your own dicts
        as the rows that its `read_rows` reads. `options`: as `predict` has them, such as form="onnx-int4",
        top=20, tokens=100. Raises UserError where a run predicts nothing.

            answer = isobatch.load("runs/mine").predictor()
            print(answer(["a quiet film with a big heart"]))
        """
        from isobatch.launch.predicting.predict import ModelOptions, open_answerer

        asked = build_options(ModelOptions, options)
        consent.require(self.recipe, self.folder, asked.trust)
        return open_answerer(self._files, asked).answer

    def __repr__(self) -> str:
        figures = "".join(f", {k} {v:.4g}" for k, v in self.metrics.items() if isinstance(v, float))
        return f"<isobatch run {self.folder}: {self.status}{figures}>"


class Recipe(CompleteRecipe):
    """What is learnt: a task, and any of its recipe fields by name.

    >>> isobatch.Recipe(task="classifier", data="reviews/", lr=2e-5, epochs=3)

    Fields that are not given come from the task, its preset and its mode, as on the command line; `isobatch
    describe TASK` lists them all, with `_` for `-`. Raises UserError where a name or a value is wrong.
    """

    __slots__ = ()

    def __init__(self, task: str | Path, **values: Any) -> None:
        if isinstance(task, type):
            name = task.__name__
            raise UserError(f"task={name}: write the class in a file, and task='./file.py:{name}'")
        task = str(task)
        if "options" in values:  # a complete recipe's fields, as dataclasses.replace gives them
            super().__init__(task=task, **values)
            return
        made, _ = complete(task, values)
        for field in dataclasses.fields(CompleteRecipe):
            object.__setattr__(self, field.name, getattr(made, field.name))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CompleteRecipe:
        """A recipe as recipe.json has it, which is complete: nothing is added."""
        found = CompleteRecipe.from_dict(values)
        consent.received(found)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompleteRecipe) and self.to_dict() == other.to_dict()

    __hash__ = CompleteRecipe.__hash__


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found."""

    verified: bool
    problems: list[str]
    """What is not as the recipe says, a sentence each."""
    steps: list[dict[str, Any]]
    """Each redone step: logged and redone loss and gradient norm, and their differences."""
    unproven: list[str]
    """What could not be checked though the level asks for it, a sentence each."""
    coverage: str
    """What was checked, in words."""
    trusted: list[str]
    """What this rests on and nothing was compared with, a phrase each."""

    def __bool__(self) -> bool:
        return self.verified


def plan(recipe: CompleteRecipe, *, hardware: str | None = None, **options: Any) -> Plan:
    """The plan for this machine, or for `hardware` such as "8xh100"; trains nothing.

    `options`: fields of `isobatch.PlanOptions`, such as micro_batch=4. Raises UserError.
    """
    from isobatch.engine.loading.prepare import prepare
    from isobatch.engine.machine.detect import detect
    from isobatch.engine.machine.hardware import parse_hardware
    from isobatch.engine.planning.planner import make_plan

    request = _request(recipe, options, False, PlanOptions)
    task, data = request.workload.make(recipe)
    facts = prepare(data)
    machine = parse_hardware(hardware) if hardware else detect()
    return make_plan(recipe, facts, task.model_size(facts), machine, request.plan)


def train(
    recipe: CompleteRecipe, *, hooks: Sequence[Hook | type[Hook]] = (), trust: bool = False, **options: Any
) -> Run:
    """Train a recipe here to its end, as `isobatch auto` does; returns the run.

    A finished run of the same recipe and data is returned as it is, a stopped one goes on. One process
    trains in this one, several are started as children. `options`: fields of `isobatch.PlanOptions` and
    `isobatch.RunOptions`, such as processes=2, out="runs", again=True, quiet=True. `hooks`: classes in files,
    or objects, which one process can have. `trust`: code that somebody else's recipe brings may be executed.

    Raises UserError for wrong input, TrainingError where the training fails for a named reason, and
    StopRequestedError where it was stopped from outside. Interrupted, it can be called again.
    """
    from isobatch.launch.local.launch_run import find_or_train

    with hooks_given(hooks) as words:
        options |= {"hook": (*options.get("hook", ()), *words)} if words else {}
        request = _request(recipe, options, trust, PlanOptions, RunOptions)
        with preserve_process_state():
            os.environ["ISOBATCH_STARTED"] = str(time.time())
            run, verdict = find_or_train(request, owns_process=False, trust=trust)
    if verdict.code != DONE:
        kinds: dict[int, type[Exception]] = {BUG: RuntimeError, WRONG_INPUT: UserError}
        kinds[STOPPED] = StopRequestedError
        reason = verdict.reason or f"see {run.folder}/launcher.log"
        raise kinds.get(verdict.code, TrainingError)(reason)
    return Run(run)


def load(folder: str | Path, *, trust: bool = False) -> Run:
    """A run by its folder. With `trust` the code that came with it may be executed.

    To load executes none; `Run.model` does. Raises UserError where there is no run.
    """
    run = RunFolder.open(folder)
    if trust:
        consent.require(run.recipe, run.folder, trust)
    return Run(run)


def verify(run: Run | str | Path, **options: Any) -> Verification:
    """Redo logged steps of a run in another cut and compare.

    `options`: steps=3, processes=1, strategy="auto", micro_batch=None, data=None, base=None, trust=False, as
    `isobatch verify` has them. Raises UserError.
    """
    from isobatch.launch.local.verify_run import VerifyOptions, verify_run

    found = run if isinstance(run, Run) else load(run)
    asked = build_options(VerifyOptions, options)
    with preserve_process_state():
        report = verify_run(open_run(found.folder, asked.trust, asked.base), asked, owns_process=False)
    return Verification(**{field.name: report[field.name] for field in dataclasses.fields(Verification)})


@contextlib.contextmanager
def replay(
    run: Run | str | Path, step: int, *, samples: Sequence[int] = (), phase: str | None = None, **options: Any
) -> Iterator[StepParts]:
    """`(model, batch, step)` of a step of a run, redone here from its nearest checkpoint in one process.

    `task.loss(model, batch, step)` is then what the run computed. `samples`: only these of the batch.
    `options`: precision, device, data, base, trust, as `isobatch replay` has them. Raises UserError.

        with isobatch.replay("runs/mine", 120) as (model, batch, step):
            print(model(batch["input_ids"]).logits)
    """
    from isobatch.engine.forensics.observed_step import open_step
    from isobatch.launch.forensics.replay import ReplayOptions, open_replay

    found = run if isinstance(run, Run) else load(run)
    asked = ReplayOptions(**known_options(options, (ReplayOptions,)), step=step, phase=phase)
    with preserve_process_state():
        opened = open_replay(open_run(found.folder, asked.trust, asked.base), asked)
        with open_step(*opened, samples) as parts:
            yield parts


def _request(recipe: CompleteRecipe, options: dict[str, Any], trust: bool, *kinds: type) -> Request:
    if not isinstance(recipe, CompleteRecipe):
        raise UserError(f"{recipe!r} is no recipe: make one, as in isobatch.Recipe(task='classifier')")
    if changed := task_file_problem(recipe):
        raise UserError(f"{changed}: make the recipe again")
    if trust or not consent.is_allowed(recipe):
        consent.require(recipe, trust=trust)
    consent.require_reading(recipe, None)
    chosen = workload_of(recipe)
    values, planned = known_options(options, kinds), flags_of(PlanOptions)
    asked = chosen.plan_options(recipe.preset, {k: v for k, v in values.items() if k in planned})
    kept = RunOptions(**{k: v for k, v in values.items() if k not in planned})
    request = Request(chosen, with_learning_hooks(recipe, kept.hook), asked, kept, {}, [])
    check_request(request)
    return request
