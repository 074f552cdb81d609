"""The session: model, data, sampler and plan of a recipe on one rank, from which phases are run.

Training, verification and benchmarks all use it:

with Session(recipe, facts, plan, world) as session:
    for schedule in session.schedules:
        with session.phase(schedule) as phase:
            for loaded in phase.batches(0, schedule.steps):
                phase.step(loaded)
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from isobatch.core.strategies import traits_of
from isobatch.core.terminal.status import doing
from isobatch.data.digests import PreparedFolder
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, open_on_all
from isobatch.engine.checkpointing.weight_files import load_start_weights
from isobatch.engine.loading.device_copies import to_device, to_tensors
from isobatch.engine.loading.loader import BatchLoader, LoadedStep
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.model_setup.compile_model import compile_model
from isobatch.engine.model_setup.deferred_materialization import build_hollow, build_late, outline
from isobatch.engine.model_setup.layer_blocks import checkpoint_activations
from isobatch.engine.model_setup.packing import SamplePacking
from isobatch.engine.model_setup.prepare_model import prepare_model
from isobatch.engine.noise.keyed_noise import NativeNoise
from isobatch.engine.optimization.parameter_groups import make_optimizer
from isobatch.engine.optimization.schedule import PhaseSchedule, learning_rate, phase_schedules
from isobatch.engine.registry import workload_of
from isobatch.engine.strategies.base import Strategy, strategy_class
from isobatch.engine.training.evaluate import evaluate
from isobatch.engine.training.teacher_cache import samples_used, with_teacher_outputs
from isobatch.engine.training.train_step import NO_VOTES, Stepper, StepResult, Votes
from isobatch.models.attention_functions import unregister_attention
from isobatch.models.base import StepContext, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.noise.keyed_noise import KeyedNoise
    from isobatch.engine.optimization.left_out import LeftOut
    from isobatch.models.base import Change, Teacher

CALIBRATION_BATCH = 32
"""Samples per batch given to a task's `begin_phase`."""


class Session:
    """Model, data and sampler of a recipe on one rank. `session.plan` is the current plan."""

    def __init__(
        self,
        recipe: Recipe,
        facts: Facts,
        plan: Plan,
        world: Communicator,
        say: Callable[[str], None] = lambda _: None,
        record_plan: Callable[[Plan], None] = lambda _: None,
    ) -> None:
        """`say` gets messages for the user, `record_plan` every plan that replaces the previous one."""
        self.recipe, self.facts, self.world = recipe, facts, world
        self._plan, self._record_plan = plan, record_plan
        self._threads = torch.get_num_threads()
        if plan.threads:
            torch.set_num_threads(plan.threads)
        self.task, data = workload_of(recipe).make(recipe)
        self.prepared = PreparedFolder(Path(facts.folder), facts.digest)
        self.splits = {split: data.open(Path(facts.folder), split) for split in facts.samples}
        for source in self.splits.values() if plan.stream_cache_bytes else ():
            source.keep_at_most(plan.stream_cache_bytes)
        self.sampler = make_sampler(recipe, self.splits["train"], self.task.cohort)
        self.schedules = phase_schedules(recipe, self.task.phases(), self.sampler.steps_per_epoch)
        self.left_out: LeftOut = {}
        """Steps that the run leaves out; of a session without a run none."""
        self.task.training_device = world.device
        if (teacher := self.task.teacher()) is not None:
            self._add_teacher(teacher, say)
        self.model: nn.Module
        self.noise: KeyedNoise | None
        self.packing: SamplePacking | None
        self._active: ActivePhase | None = None
        self._prepared = ""
        """The phase that the model was last prepared for."""
        self._model_ended = False
        """Whether the end of a phase has destroyed the model."""
        self.build_model()

    def _add_teacher(self, teacher: Teacher, say: Callable[[str], None]) -> None:
        """Give the samples that are trained on, and held-out ones if it answers those, its answers."""
        used = {"train": samples_used(self.sampler, self.schedules)}
        if teacher.held_out:
            used |= {k: np.arange(len(source)) for k, source in self.splits.items() if k != "train"}
        build = cache(lambda: teacher.build(self.facts))  # once for all splits
        teacher_once = dataclasses.replace(teacher, build=lambda _: build())
        for split, samples in used.items():
            self.splits[split] = with_teacher_outputs(
                self.splits[split], teacher_once, self.facts, samples, self.world, say, split
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        """Undo process-wide changes: registered attention functions and the number of threads."""
        unregister_attention()
        torch.set_num_threads(self._threads)

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def phases(self) -> list[str]:
        """Names of the phases, in order."""
        return [s.name for s in self.schedules]

    def schedule_of(self, phase: str) -> PhaseSchedule:
        """The schedule of the phase of this name."""
        return next(s for s in self.schedules if s.name == phase)

    def replan(self, plan: Plan) -> None:
        """Replace the plan, keep the model: for a smaller budget, activation checkpointing, invariance."""
        if plan.activation_checkpointing and not self._plan.activation_checkpointing:
            checkpoint_activations(self.model, keyed=self.noise is not None)
        self._plan = plan
        self._record_plan(plan)

    def build_model(self) -> None:
        """Build the model anew with its initial weights."""
        doing("building the model")
        self.model, self.noise = prepare_model(
            self.task,
            self.recipe,
            self.facts,
            self._plan,
            self.world.device,
            self._build_on_rank_0 if self._rank_0_builds() else self._build,
        )
        self.packing = SamplePacking(self.model, self.noise) if self._plan.pack else None
        self._prepared, self._model_ended = "", False

    def _rank_0_builds(self) -> bool:
        """Whether the others get their shards from rank 0: not where the task looks at its model's values."""
        changes_model = type(self.task).begin_phase is not Task.begin_phase
        return traits_of(self._plan.strategy).shards_weights and self.world.size > 1 and not changes_model

    def _build_on_rank_0(self, facts: Facts) -> nn.Module:
        """The model on rank 0, and a hollow one of the same outline on the others, if it can be had.

        Rank 0 reads a pretrained model's values when they are sharded, if that can be.
        """
        if self.world.is_main:
            model = build_late(partial(self._build, facts))
            model = self._build_anew(facts) if model is None else model
        else:
            model = build_hollow(partial(self.task.build_model, facts))
        wanted = self.world.broadcast_object(outline(model) if model is not None else None)
        if model is None or outline(model) != wanted:
            return self._build_anew(facts)
        return model

    def _build_anew(self, facts: Facts) -> nn.Module:
        torch.manual_seed(self.recipe.seed)
        return self._build(facts)

    def _build(self, facts: Facts) -> nn.Module:
        """The task's model with the weights that the recipe begins with."""
        model = self.task.build_model(facts)
        if self.recipe.starts_from:
            load_start_weights(self.recipe.starts_from, model)
        return model

    def prepare_phase(self, schedule: PhaseSchedule, saved: SavedCheckpoint | None = None) -> None:
        """Let the task prepare its model for a phase; with `saved`, also match the shapes of its weights."""
        if self._model_ended:
            self.build_model()
        if self._prepared != schedule.name:
            self.model.eval()
            with torch.no_grad():
                self.task.begin_phase(self.model, schedule.name, self._first_samples)
            if not traits_of(self._plan.strategy).shards_weights:  # else as it is sharded
                self.world.broadcast_model(self.model)
            self._prepared = schedule.name
        if saved is not None:
            weights = {k: e for k, e in saved.entries.items() if k.startswith(portable_state.WEIGHT)}
            self.task.match_shapes(
                self.model, {k.removeprefix(portable_state.WEIGHT): e.shape for k, e in weights.items()}
            )

    @contextlib.contextmanager
    def phase(
        self,
        schedule: PhaseSchedule,
        saved: SavedCheckpoint | None = None,
        previous: Path | None = None,
        probe: Callable[[str], None] = lambda _: None,
    ) -> Iterator[ActivePhase]:
        """A phase with a new optimizer, restored from `saved` where given.

        `previous`: the last checkpoint of the previous phase, read if closing that phase destroyed the model.
        `probe(phase)` is called when the model is ready and the optimizer is not made yet; it may `replan`.
        """
        self.prepare_phase(schedule, saved)
        probe(schedule.name)
        self._active = active = ActivePhase(self, schedule)
        if saved is not None:
            active.strategy.restore(saved, saved.state["scaling"])
        elif previous is not None and traits_of(self._plan.strategy).ends_model and previous.exists():
            active.strategy.load_weights(open_on_all(previous, self.world), new_phase=True)
        self.model.train()
        try:
            yield active
            active.strategy.close()  # not after an error: its collectives would wait for ranks that are gone
        finally:
            self._active = None
            self._model_ended = traits_of(self._plan.strategy).ends_model

    def rehearse(
        self, schedule: PhaseSchedule, plan: Plan, steps: int, previous: Path | None = None
    ) -> list[tuple[float, float]]:
        """(loss, gradient norm) of the first steps of a phase under another plan.

        The model is then as it was when the phase began. `previous`: see `phase`.
        """
        self.prepare_phase(schedule)
        before, weights = self._plan, {k: v.clone() for k, v in self.model.state_dict().items()}
        self._plan = plan
        try:
            with self.phase(schedule, previous=previous) as active:
                stop = min(steps, schedule.steps)
                found = [active.step(loaded).loss_and_norm() for loaded in active.batches(0, stop)]
        finally:
            self._plan = before
        if not self._model_ended:  # else the phase builds it anew
            self.model.load_state_dict(weights)
        return found

    def context_for_probe(self, phase: str, samples: np.ndarray) -> StepContext:
        """Context for a memory probe: no optimizer step follows."""
        if self.noise is not None:
            self.noise.bind(0, samples, self.world.device)
        return StepContext(0, phase, self.noise or NativeNoise())

    def gather_full_model(self, saved: Path, phase: str) -> nn.Module:
        """The model with all its weights, on this process; from a checkpoint if the strategy shards it."""
        if not traits_of(self._plan.strategy).shards:
            return self.model
        model = self._build(self.facts).eval()
        with torch.no_grad():  # the phase decides which weights train, and so are in the checkpoint
            self.task.begin_phase(model, phase, partial(self._first_samples, device=torch.device("cpu")))
        portable_state.load_weights(SavedCheckpoint(saved), model)
        return model

    def evaluate(self, split: str, fraction: float = 1.0) -> dict[str, float]:
        """Metrics over a `fraction` of a split; the same on every rank."""
        return evaluate(
            self.task,
            self.model,
            self.splits[split],
            split,
            self.facts,
            self._plan,
            self.world,
            fraction,
            equal_counts=self._active is not None and self._active.strategy.equal_counts,
            seed=self.recipe.seed,
        )

    def _first_samples(
        self, count: int, device: torch.device | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """The first `count` training samples, in batches of a fixed size that does not depend on the plan."""
        steps = range(-(-count // self.recipe.batch_size))
        samples = np.concatenate([self.sampler.batch(step) for step in steps])[:count]
        samples = samples[np.argsort(self.splits["train"].lengths(samples), kind="stable")]
        for start in range(0, len(samples), CALIBRATION_BATCH):
            rows = samples[start : start + CALIBRATION_BATCH]
            yield to_device(
                to_tensors(self.splits["train"].fetch(rows), pin=False), device or self.world.device
            )


class ActivePhase:
    """Runs the steps of a phase. Made and closed by `Session.phase`."""

    def __init__(self, session: Session, schedule: PhaseSchedule) -> None:
        self.session, self.schedule = session, schedule
        self.strategy = self._make_strategy()
        self.stepper = self._make_stepper()

    def batches(self, start: int, stop: int) -> Iterator[LoadedStep]:
        """Steps start..stop-1, but those left out, with this rank's micro-batches, loaded ahead."""
        session = self.session
        loader = BatchLoader(
            session.splits["train"],
            session.sampler.batch,
            session.plan,
            session.world.rank,
            session.task.cohort,
            self.strategy.equal_counts,
            session.left_out.get(self.schedule.name, ()),
        )
        return session.world.recorder.waiting_for_data(loader.steps(start, stop))

    def learning_rate(self, step: int) -> float:
        """Learning rate of optimizer step `step` (from 0) of this phase."""
        schedule = self.schedule
        return learning_rate(self.session.recipe, schedule.lr, step, schedule.steps, schedule.steps_per_epoch)

    def step(self, loaded: LoadedStep, votes: Votes = NO_VOTES) -> StepResult:
        """One optimizer step and then the task's `after_step`. `votes`: see `Stepper.run`."""
        number = loaded.work.step
        result = self.stepper.run(loaded, self.learning_rate(number), votes)
        context = self.stepper.step_context(number, recorded=result.recorded, log=result.figures.__setitem__)
        result.change = self.session.task.after_step(self.session.model, context)
        if result.change is not None and result.change.keep:
            self._rebuild_optimizer(result.change)
        return result

    def _make_strategy(self) -> Strategy:
        session = self.session
        sparse = list(session.task.sparse_parameters(session.model))
        compile_model(session.model, session.plan)
        return strategy_class(session.plan.strategy)(
            session.model,
            lambda model: make_optimizer(session.task, model, session.plan.device, sparse),
            session.plan,
            session.world,
            session.recipe.clip,
            sparse,
        )

    def _make_stepper(self) -> Stepper:
        session = self.session
        return Stepper(
            session.task,
            session.recipe,
            session.world,
            self.strategy,
            session.noise,
            self.schedule.name,
            self.schedule.steps,
            session.packing,
        )

    def _rebuild_optimizer(self, change: Change) -> None:
        """After the task has pruned its model: make a new optimizer with the moments pruned alike."""
        moments, loss_scale = self.strategy.moments(), self.strategy.loss_scale()
        findings = self.stepper.findings
        del self.strategy, self.stepper
        if self.session.world.size > 1:
            gc.collect()  # frees the old strategy, and DDP's hooks with it
        self.strategy = self._make_strategy()
        self.strategy.load_moments(cut_moments(moments, change.keep), loss_scale)
        self.stepper = self._make_stepper()
        self.stepper.findings = findings


def cut_moments(
    moments: portable_state.Moments, keep: Mapping[str, Sequence[tuple[int, torch.Tensor]]]
) -> portable_state.Moments:
    """The moments with only the indices that `keep` lists of each pruned parameter.

    `keep`: parameter -> (dimension, indices that stay). 0-d state, such as a step count, stays as it is.
    """
    cut: dict[str, dict[str, Any]] = {}
    for name, state in moments.items():
        cut[name] = dict(state)
        for kind, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                for dimension, indices in keep.get(name, ()):
                    value = value.index_select(dimension, indices.to(value.device))
                cut[name][kind] = value
    return cut
