"""All that a process holds to run steps of a recipe by a plan; training and verifying both start here."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.plan import Plan
from isobatch.core.recipe import Recipe
from isobatch.data.base import Source
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.loader import BatchLoader, LoadedStep, to_device, to_tensors
from isobatch.engine.loading.sampler import Sampler
from isobatch.engine.noise.keyed_dropout import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.engine.optimization.optimizers import learning_rate, make_optimizer
from isobatch.engine.optimization.schedule import PhaseSchedule, phase_schedules
from isobatch.engine.registry import workload
from isobatch.engine.strategies.replicated import ReplicatedStrategy
from isobatch.engine.training.evaluate import evaluate
from isobatch.engine.training.packing import SamplePacking
from isobatch.engine.training.teacher_cache import samples_used, with_teacher_outputs
from isobatch.engine.training.train_step import (
    NativeNoise,
    Stepper,
    StepResult,
    Strategy,
    checkpoint_activations,
)
from isobatch.models.base import Change, StepContext, Task

CALIBRATION_BATCH = 32


class Session:
    """Model, data, sampler and, once a phase is entered, its optimizer and stepper."""

    def __init__(
        self,
        recipe: Recipe,
        facts: Facts,
        plan: Plan,
        world: Communicator,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.recipe, self.facts, self.plan, self.world = recipe, facts, plan, world
        self.task, data = workload(recipe.task).make(recipe)
        self.splits = {split: data.open(Path(facts.folder), split) for split in facts.samples}
        self.sampler = make_sampler(recipe, self.splits["train"], self.task.cohort)
        self.stretches = phase_schedules(recipe, self.task.phases(), self.sampler.steps_per_epoch)
        if (teacher := self.task.teacher()) is not None:
            used = samples_used(self.sampler, self.stretches)
            self.splits["train"] = with_teacher_outputs(
                self.splits["train"], teacher, facts, used, world, say
            )
        self._prepare_model()
        self._strategy: Strategy | None = None

    @property
    def strategy(self) -> Strategy:
        assert self._strategy is not None, "no phase was entered"
        return self._strategy

    def _prepare_model(self) -> None:
        self.model, self.noise = prepare_model(self.task, self.recipe, self.facts, self.plan, self.world)
        self.packing = SamplePacking(self.model, self.noise) if self.plan.pack else None
        self._begun = ""

    def renew(self) -> None:
        """A model with the initial weights, whatever was done to the one before."""
        strategy, self._strategy = self._strategy, None
        if strategy is not None:
            strategy.close()
        self._prepare_model()

    def begin(self, stretch: PhaseSchedule, saved: SavedCheckpoint | None = None) -> None:
        """Let the task make its model ready for a phase, once; in the shape of a checkpoint where given."""
        self.stretch = stretch
        if self._begun != stretch.name:
            self.model.eval()
            with torch.no_grad():
                self.task.begin_phase(self.model, stretch.name, self._first_samples)
            self.world.broadcast_model(self.model)
            self._begun = stretch.name
        if saved is not None:
            weights = {k: e for k, e in saved.entries.items() if k.startswith(portable_state.WEIGHT)}
            self.task.match_shapes(
                self.model, {k.removeprefix(portable_state.WEIGHT): e.shape for k, e in weights.items()}
            )

    def _first_samples(
        self, count: int, device: torch.device | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """`count` training samples in the recipe's order, in batches that no plan decides on."""
        steps = range(-(-count // self.recipe.batch_size))
        samples = np.concatenate([self.sampler.batch(step) for step in steps])[:count]
        samples = samples[np.argsort(self.splits["train"].lengths[samples], kind="stable")]
        for start in range(0, len(samples), CALIBRATION_BATCH):
            rows = samples[start : start + CALIBRATION_BATCH]
            yield to_device(
                to_tensors(self.splits["train"].fetch(rows), pin=False), device or self.world.device
            )

    @property
    def phases(self) -> list[str]:
        return [s.name for s in self.stretches]

    def enter(self, stretch: PhaseSchedule) -> None:
        """Begin a phase: its own optimizer, from rest. A model that was in shards begins anew."""
        self.leave()
        self.begin(stretch)
        self._strategy = self._make_strategy()
        self.stepper = self._make_stepper()
        self.model.train()

    def leave(self) -> None:
        """End a phase's hold on the model."""
        strategy, self._strategy = self._strategy, None
        if strategy is not None and strategy.close():
            self._prepare_model()

    def replan(self, plan: Plan) -> None:
        """Another budget, or activation checkpointing, for the model that is there."""
        if plan.activation_checkpointing and not self.plan.activation_checkpointing:
            checkpoint_activations(self.model, keyed=self.noise is not None)
        self.plan = plan

    def rehearsing(self, phase: str, samples: np.ndarray) -> StepContext:
        """A step's moment for samples that teach nothing."""
        if self.noise is not None:
            self.noise.bind(0, samples, self.world.device)
        return StepContext(0, phase, self.noise or NativeNoise(self.world.device))

    def whole_model(self, saved: Path) -> nn.Module:
        """The model with all its weights, on one process: from a checkpoint where it is in shards."""
        if not self.plan.strategy.startswith("zero"):
            return self.model
        model = self.task.build_model(self.facts).eval()
        with torch.no_grad():  # what trains, and so was saved, may be the phase's
            first = partial(self._first_samples, device=torch.device("cpu"))
            self.task.begin_phase(model, self.stretch.name, first)
        portable_state.load_weights(SavedCheckpoint(saved), model)
        return model

    def _make_strategy(self) -> Strategy:
        lazy = list(self.task.sparse_parameters(self.model))
        optimizer = make_optimizer(self.model, self.recipe, self.plan.device, lazy)
        if self.plan.strategy.startswith("zero"):
            from isobatch.engine.strategies.zero import ZeroStrategy

            return ZeroStrategy(self.model, optimizer, self.plan, self.world, self.recipe.clip)
        return ReplicatedStrategy(self.model, optimizer, self.plan, self.world, self.recipe.clip, lazy)

    def _make_stepper(self) -> Stepper:
        stretch = self.stretch
        return Stepper(
            self.task,
            self.recipe,
            self.world,
            self.strategy,
            self.noise,
            stretch.name,
            stretch.steps,
            self.packing,
        )

    def put(self, saved: SavedCheckpoint) -> None:
        """Go to where a checkpoint was."""
        self.strategy.put(saved, saved.state["scaling"])

    def step(self, loaded: LoadedStep, votes: Sequence[float] = ()) -> StepResult:
        """A whole step, and what the task makes of it."""
        number = loaded.work.step
        result = self.stepper.run(loaded, self.rate(number), list(votes))
        result.change = self.task.after_step(self.model, self.stepper.step_context(number))
        if result.change is not None and result.change.keep:
            self._wrap_again(result.change)
        return result

    def _wrap_again(self, change: Change) -> None:
        """The task has cut its model: an optimizer for what is left, with its moments cut alike."""
        moments, scaling, names = self.strategy.moments(), self.strategy.scaling(), self.stepper.names
        self._strategy = None
        if self.world.size > 1:
            gc.collect()  # DDP's hooks go with it
        self._strategy = self._make_strategy()
        self.strategy.put_moments(cut_moments(moments, change.keep), scaling)
        self.stepper = self._make_stepper()
        self.stepper.names, self.stepper.foreign_noise = names, False

    def feed(self) -> BatchLoader:
        source, equal = self.splits["train"], self.strategy.equal_counts
        return BatchLoader(source, self.sampler.batch, self.plan, self.world.rank, self.task.cohort, equal)

    def rate(self, step: int) -> float:
        stretch = self.stretch
        return learning_rate(self.recipe, stretch.lr, step, stretch.steps, stretch.steps_per_epoch)

    def evaluate(self, split: str, fraction: float = 1.0) -> dict[str, float]:
        source = self.splits[split]
        equal = self._strategy is not None and self._strategy.equal_counts
        return evaluate(
            self.task,
            self.model,
            source,
            split,
            self.facts,
            self.plan,
            self.world,
            fraction,
            equal,
            self.recipe.seed,
        )


def cut_moments(
    moments: portable_state.Moments, keep: Mapping[str, Sequence[tuple[int, torch.Tensor]]]
) -> portable_state.Moments:
    """The moments of parameters that were cut; what has no dimensions, such as a count of steps, stays."""
    found: dict[str, dict[str, Any]] = {}
    for name, state in moments.items():
        found[name] = dict(state)
        for kind, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                for dimension, indices in keep.get(name, ()):
                    value = value.index_select(dimension, indices.to(value.device))
                found[name][kind] = value
    return found


def make_sampler(recipe: Recipe, source: Source, cohort: int) -> Sampler:
    """The order of a recipe's training samples."""
    lengths = source.lengths if recipe.group_by_length else None
    parts = source.parts
    if parts and cohort > 1:
        raise UserError(
            f"--data {recipe.data}: this task computes {cohort} samples together, so that it takes one set"
        )
    sampler = Sampler(
        len(source), recipe.batch_size, recipe.seed, recipe.train_fraction, cohort, lengths, parts
    )
    if parts and 0 in sampler.quotas:
        raise UserError(
            f"--mix {','.join(f'{share:g}' for _, share in parts)}: of the {sampler.used:,} samples of an"
            f" epoch set {sampler.quotas.index(0) + 1} would have none: raise its share"
        )
    return sampler


def prepare_model(
    task: Task, recipe: Recipe, facts: Facts, plan: Plan, world: Communicator
) -> tuple[nn.Module, KeyedNoise | None]:
    """The model with the recipe's initial weights, on its device, set up as planned."""
    if plan.threads:
        torch.set_num_threads(plan.threads)
    torch.manual_seed(recipe.seed)
    model = task.build_model(facts)
    if not plan.strategy.startswith("zero3"):  # its shards are taken to the device one by one
        model = model.to(world.device)
    choose_attention: Any = getattr(model, "set_attn_implementation", None)
    if plan.attention != "sdpa" and choose_attention is not None:
        choose_attention({"flash": "flash_attention_2"}.get(plan.attention, plan.attention))
    _refuse_batch_statistics(model)
    noise = KeyedNoise(recipe.seed) if recipe.noise == "keyed" else None
    if noise is not None:
        key_dropout(model, noise)
    if plan.activation_checkpointing:
        checkpoint_activations(model, keyed=noise is not None)
    if plan.compile != "off":
        model.compile(mode=None if plan.compile == "on" else plan.compile)
    return model, noise


def _refuse_batch_statistics(model: nn.Module) -> None:
    """Batch norm computes over a micro-batch, which the plan cuts as it likes."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"{name} is a {type(module).__name__}: its statistics follow the micro-batch, so no two"
                " machines would learn the same; use GroupNorm or LayerNorm"
            )
