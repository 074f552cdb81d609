"""For Python: a recipe, completed as the command line completes it, and a run, trained or being trained."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from isobatch.core import recipe
from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import UserError
from isobatch.core.flags import known_options
from isobatch.core.plan import PlanOptions
from isobatch.engine import consent
from isobatch.engine.registry import complete
from isobatch.engine.runs.ledger import LedgerStep, read_ledger
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.step_rows import is_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan


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
        found: dict[str, Any] = self.summary.get("metrics", {})
        return found

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
        from isobatch.engine.verification.replay import Replay
        from isobatch.launch.local.process_state import preserve_process_state
        from isobatch.launch.local.run_setup import locate_data, plan_for_this_machine

        consent.require(self.recipe, self.folder)
        locate_data(self._files, self.recipe, None)
        here = plan_for_this_machine(self.recipe, self.facts, PlanOptions(processes=1, compile="off"))
        with preserve_process_state():
            # Under native noise the model's own dropout modules stay: it is the user's to train further.
            recipe = dataclasses.replace(self.recipe, noise="native")
            replay = Replay(self._files, here, recipe)
            with replay.session as session:
                if not replay.load_trained():
                    raise UserError(f"{self.folder} has no checkpoint: train it first")
                return session.model.eval()

    def predictor(self, **options: Any) -> Callable[[Sequence[str | list[str]]], list[dict[str, Any]]]:
        """A function of texts that returns a dict for each, as `isobatch predict` gives. It is read once.

        A classifier of pairs takes lists of two texts, a recommender ids of users. `options`: as `predict`
        has them, such as form="onnx-int4", top=20, tokens=100. Raises UserError where a run predicts nothing.

            answer = isobatch.load("runs/mine").predictor()
            print(answer(["a quiet film with a big heart"]))
        """
        from isobatch.launch.predicting.predict import ModelOptions, open_answerer

        asked = ModelOptions(**known_options(options, (ModelOptions,)))
        consent.require(self.recipe, self.folder, asked.trust)
        return open_answerer(self._files, asked).answer

    def __repr__(self) -> str:
        figures = "".join(f", {k} {v:.4g}" for k, v in self.metrics.items() if isinstance(v, float))
        return f"<isobatch run {self.folder}: {self.status}{figures}>"


class Recipe(recipe.Recipe):
    """What is learnt: a task, and any of its recipe fields by name.

    >>> isobatch.Recipe(task="classifier", data="reviews/", lr=2e-5, epochs=3)

    Fields that are not given come from the task, its preset and its mode, as on the command line; `isobatch
    describe TASK` lists them all, with `_` for `-`. Raises UserError where a name or a value is wrong.
    """

    __slots__ = ()

    def __init__(self, task: str | Path, **values: Any) -> None:
        if isinstance(task, type):
            raise UserError(
                f"task={task.__name__}: write the class in a file, and task='./file.py:{task.__name__}'"
            )
        task = str(task)
        if "options" in values:  # a complete recipe's fields, as dataclasses.replace gives them
            super().__init__(task=task, **values)
            return
        made, _ = complete(task, values)
        for field in dataclasses.fields(recipe.Recipe):
            object.__setattr__(self, field.name, getattr(made, field.name))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> recipe.Recipe:
        """A recipe as recipe.json has it, which is complete: nothing is added."""
        found = recipe.Recipe.from_dict(values)
        consent.received(found)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, recipe.Recipe) and self.to_dict() == other.to_dict()

    __hash__ = recipe.Recipe.__hash__
