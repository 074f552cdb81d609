"""Builds the training of a recipe on one rank, and begins its phases. Runs, proofs and measurements use it:

with Builder(recipe, facts, plan, world) as builder:
    for schedule in builder.schedules:
        with builder.phase(schedule) as state:
            run_phase(state, Hooks())
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from isobatch.core.facts import Facts
from isobatch.core.plan import Plan
from isobatch.core.recipe import Recipe
from isobatch.core.strategies import traits_of
from isobatch.core.terminal import doing
from isobatch.data.base import Source
from isobatch.data.digests import PreparedFolder
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, open_on_all
from isobatch.engine.checkpointing.weight_files import load_start_weights, open_start
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.device_copies import to_device, to_tensors
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.model_setup.compile_model import compile_model
from isobatch.engine.model_setup.layer_blocks import checkpoint_activations
from isobatch.engine.model_setup.packing import SamplePacking
from isobatch.engine.model_setup.prepare_model import build_hollow, outline, prepare_model
from isobatch.engine.optimization.schedule import PhaseSchedule, schedules_of
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.summary import Progress
from isobatch.engine.train.hooks import Hooks, Seen
from isobatch.engine.train.loop import run_phase
from isobatch.engine.train.state import Binding, StepLayout, Training
from isobatch.engine.train.teacher_cache import samples_used, with_teacher_outputs
from isobatch.models.attention_functions import unregister_attention
from isobatch.models.base import Batch, Teacher
from isobatch.models.capabilities import BeginsPhase, HasTeacher, KeepsRows, MatchesShapes, build_model

CALIBRATION_BATCH = 32
"""Samples per batch given to a task's `begin_phase`."""


class Builder:
    """Model, data, sampler and phases of a recipe; `builder.state` is what the loop trains."""

    def __init__(
        self,
        recipe: Recipe,
        facts: Facts,
        plan: Plan,
        world: Communicator,
        say: Callable[[str], None] = lambda _: None,
        record_plan: Callable[[Plan], None] = lambda _: None,
        left_out: Mapping[str, frozenset[int]] = MappingProxyType({}),
    ) -> None:
        """`say` gets messages for the user, `record_plan` every plan that replaces the previous one.

        `left_out`: phase -> steps, from 1, that are not computed.
        """
        self._record_plan = record_plan
        self._threads = torch.get_num_threads()
        if plan.threads:
            torch.set_num_threads(plan.threads)
        task, data = workload_of(recipe).make(recipe)
        self.prepared = PreparedFolder(Path(facts.folder), facts.digest)
        splits = {split: data.open(Path(facts.folder), split) for split in facts.samples}
        for source in splits.values() if plan.stream_cache_bytes else ():
            source.keep_at_most(plan.stream_cache_bytes)
        sampler = make_sampler(recipe, splits["train"], task.cohort)
        self.schedules = [
            dataclasses.replace(schedule, left_out=left_out.get(schedule.name, frozenset()))
            for schedule in schedules_of(task, facts, sampler.steps_per_epoch)
        ]
        first = self.schedules[0]
        none_yet: Any = None
        self.state = Training(
            task, facts, plan, world, splits, sampler, Progress(first.name), none_yet, Binding(), first,
            none_yet, StepLayout(),
        )  # fmt: skip
        if isinstance(task, HasTeacher) and (teacher := task.teacher()) is not None:
            self._add_teacher(teacher, say)
        self._prepared = ""
        """The phase that the model was last prepared for."""
        self._model_ended = False
        """Whether the end of a phase has destroyed the model."""
        self.build_model()

    def _add_teacher(self, teacher: Teacher, say: Callable[[str], None]) -> None:
        """Give the samples that are trained on, and held-out ones if it answers those, its answers."""
        state, splits = self.state, self.state.splits
        used = {"train": samples_used(state.sampler, self.schedules)}
        if teacher.held_out:
            used |= {k: np.arange(len(source)) for k, source in splits.items() if k != "train"}
        build = cache(lambda: teacher.build(state.facts))  # once for all splits
        teacher_once = dataclasses.replace(teacher, build=lambda _: build())
        for split, samples in used.items():
            splits[split] = with_teacher_outputs(
                splits[split], teacher_once, state.facts, samples, state.world, say, split
            )

    def hold_out(self, name: str, source: Source, fingerprint: str) -> None:
        """Add a held-out split that is not of the run's data; `fingerprint`: what it is known by."""
        state, task = self.state, self.state.task
        state.splits[name] = source
        if isinstance(task, HasTeacher) and (teacher := task.teacher()) is not None and teacher.held_out:
            facts = dataclasses.replace(state.facts, fingerprint=fingerprint)
            more = teacher, facts, np.arange(len(source)), state.world, lambda _: None, name
            state.splits[name] = with_teacher_outputs(source, *more)

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        """Undo process-wide changes: registered attention functions and the number of threads."""
        unregister_attention()
        torch.set_num_threads(self._threads)

    @property
    def phases(self) -> list[str]:
        """Names of the phases, in order."""
        return [s.name for s in self.schedules]

    def schedule_of(self, phase: str) -> PhaseSchedule:
        """The schedule of the phase of this name."""
        return next(s for s in self.schedules if s.name == phase)

    def replan(self, plan: Plan) -> None:
        """Replace the plan, keep the model: for a smaller budget, activation checkpointing, invariance."""
        state = self.state
        if plan.activation_checkpointing != state.plan.activation_checkpointing:
            how, keyed = plan.activation_checkpointing, state.binding.noise is not None
            checkpoint_activations(state.model, how, keyed)
        state.plan = plan
        self._record_plan(plan)

    def build_model(self) -> None:
        """Build the model anew with its initial weights."""
        doing("building the model")
        state = self.state
        shards = traits_of(state.plan.strategy).shards_weights and state.world.size > 1
        # The others get their shards from rank 0: not where the task looks at its model's values.
        on_rank_0 = shards and not isinstance(state.task, BeginsPhase)
        build = self._build_on_rank_0 if on_rank_0 else self._build
        state.model, noise = prepare_model(state.task, state.facts, state.plan, state.world.device, build)
        state.binding = Binding(noise, SamplePacking(state.model, noise) if state.plan.pack else None)
        self._prepared, self._model_ended = "", False

    def _build_on_rank_0(self, facts: Facts) -> nn.Module:
        """The model on rank 0, and a hollow one of the same outline on the others, if it can be had."""
        if self.state.world.is_main:
            model: nn.Module | None = self._build(facts)
        else:
            model = build_hollow(partial(self.state.task.build_model, facts))
        wanted = self.state.world.broadcast_object(outline(model) if model is not None else None)
        if model is None or outline(model) != wanted:
            torch.manual_seed(self.state.recipe.seed)
            return self._build(facts)
        return model

    def _build(self, facts: Facts) -> nn.Module:
        """The task's model with the weights that the recipe begins with."""
        model = build_model(self.state.task, facts, self.state.world.device)
        if self.state.recipe.starts_from:
            load_start_weights(self.state.recipe.starts_from, model, self.state.task, facts)
        return model

    def prepare_phase(self, schedule: PhaseSchedule, saved: SavedCheckpoint | None = None) -> None:
        """Let the task prepare its model for a phase; with `saved`, also match the shapes of its weights."""
        if self._model_ended:
            self.build_model()
        state, task = self.state, self.state.task
        state.schedule = schedule
        if self._prepared != schedule.name:
            state.model.eval()
            if isinstance(task, BeginsPhase):
                with torch.no_grad():
                    task.begin_phase(state.model, schedule.name, self._first_samples)
            if not traits_of(state.plan.strategy).shards_weights:  # else as it is sharded
                state.world.broadcast_model(state.model)
            self._prepared = schedule.name
        if saved is not None and isinstance(task, MatchesShapes):
            names = portable_state.saved_weight_names(saved)
            shapes = {name: saved.entries[portable_state.WEIGHT + name].shape for name in names}
            task.match_shapes(state.model, shapes)

    @contextlib.contextmanager
    def phase(
        self,
        schedule: PhaseSchedule,
        saved: SavedCheckpoint | None = None,
        previous: Path | None = None,
        probe: Callable[[], None] = lambda: None,
    ) -> Iterator[Training]:
        """A phase with a new optimizer, restored from `saved` where given.

        `previous`: the last checkpoint of the previous phase, read if closing that phase destroyed the model.
        `probe()` is called when the model is ready and the optimizer is not made yet; it may `replan`.
        """
        self.prepare_phase(schedule, saved)
        state = self.state
        compile_model(state.model, state.plan)  # before the memory that it takes is probed
        probe()
        state.layout = StepLayout()
        state.make_strategy()
        if saved is not None:
            state.progress = Progress(**saved.state["progress"])
            state.strategy.restore(saved, saved.state["scaling"])
        else:
            state.progress = state.progress.next(schedule.name)
            if state.recipe.starts_from and schedule.name == self.phases[0]:
                self._go_on_from(state.recipe.starts_from)
            if previous is not None and traits_of(state.plan.strategy).ends_model and previous.exists():
                state.strategy.load_weights(open_on_all(previous, state.world), new_phase=True)
        state.model.train()
        none_left: Any = None
        try:
            yield state
            state.strategy.close()  # not after an error: its collectives would wait for ranks that are gone
        finally:
            state.strategy = none_left
            self._model_ended = traits_of(state.plan.strategy).ends_model

    def _go_on_from(self, origin: Mapping[str, Any]) -> None:
        """Take over the optimizer's state where a run goes on with other rows of the same tables."""
        state, strategy = self.state, self.state.strategy
        if not isinstance(state.task, KeepsRows):
            return
        saved: Any = open_start(origin, state.task, state.facts)
        same = RunFolder(Path(origin["run"])).recipe.optimizer == state.recipe.optimizer
        trained = {*(part.name for part in strategy.parts()), *strategy.buffers()}
        if same and portable_state.saved_weight_names(saved) == trained:
            strategy.restore(saved)

    def rehearse(
        self, schedule: PhaseSchedule, plan: Plan, steps: int, previous: Path | None = None
    ) -> list[tuple[float, float]]:
        """(loss, gradient norm) of the first steps of a phase under another plan.

        The model and the progress are then as they were. `previous`: see `phase`.
        """
        self.prepare_phase(schedule)
        state, seen = self.state, Seen()
        before, progress = state.plan, state.progress
        weights = {k: v.clone() for k, v in state.model.state_dict().items()}
        state.plan = plan
        try:
            with self.phase(schedule, previous=previous):
                run_phase(state, Hooks([seen]), 0, min(steps, schedule.steps))
        finally:
            state.plan, state.progress = before, progress
        if not self._model_ended:  # else the phase builds it anew
            state.model.load_state_dict(weights)
        return [(figures.loss, figures.norm) for figures in seen.figures]

    def gather_full_model(self, saved: Path, phase: str) -> nn.Module:
        """The model with all its weights, on this process; from a checkpoint if the strategy shards it."""
        state = self.state
        if not traits_of(state.plan.strategy).shards:
            return state.model
        model = self._build(state.facts).eval()
        if isinstance(state.task, BeginsPhase):
            with torch.no_grad():  # the phase decides which weights train, and so are in the checkpoint
                on_host = partial(self._first_samples, device=torch.device("cpu"))
                state.task.begin_phase(model, phase, on_host)
        portable_state.load_weights(SavedCheckpoint(saved), model)
        return model

    def _first_samples(self, count: int, device: torch.device | None = None) -> Iterator[Batch]:
        """The first `count` training samples, in batches of a fixed size that does not depend on the plan."""
        state, source = self.state, self.state.splits["train"]
        steps = range(-(-count // state.recipe.batch_size))
        samples = np.concatenate([state.sampler.batch(step) for step in steps])[:count]
        samples = samples[np.argsort(source.lengths(samples), kind="stable")]
        for start in range(0, len(samples), CALIBRATION_BATCH):
            rows = samples[start : start + CALIBRATION_BATCH]
            yield to_device(to_tensors(source.fetch(rows), pin=False), device or state.world.device)
