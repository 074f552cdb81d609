"""Gradients of every parameter of every task are the same however a global batch is cut into micro-batches.

Losses alone would not show it: a factor that the cut decides may reach one parameter's gradient only.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import TrainingError
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.registry import TASKS, workload
from isobatch.engine.train.figures import differences as moved
from isobatch.engine.train.hooks import Hook, Hooks, Seen
from isobatch.engine.train.loop import run_phase
from isobatch.engine.train.step import train_step
from isobatch.tests.unit.helpers import plan, small_demos

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from isobatch.engine.train.build import Builder

BATCH, LATER = 8, 6
"""Samples of a global batch; steps after which gradients are compared again."""
CUTS = {0: (8, 5), LATER: (8, 1)}
"""By step, the sizes of micro-batches that are compared: an uneven cut, and each sample alone."""
LEAST = 1e-2
"""Parameters whose gradient is smaller than this part of the whole are compared with this part.

Softmax does not see a shift, so that the gradient of a key's bias is rounding and nothing else.
"""
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-2}
"""Largest difference of a parameter's gradients, over its norm. Measured: 6e-7 in fp32, 8e-3 in bf16."""
CANCELS = 100
"""That much more for a recommender with texts: what all items have in common cancels in the softmax, and
the gradient of the layer that all texts pass is a small rest of large terms. Measured: 5.2e-5."""
ROUNDS = 500
"""That much more where activations are rounded: of the first token alone a product has few rows, whose float
noise the cut decides, and a value half-way between two levels goes up or down. Measured: 3.1e-4."""
COMMON: dict[str, Any] = {"batch_size": BATCH, "max_length": 16, "train_fraction": 0.2, "steps": [40]}
NO_TEXT: dict[str, Any] = {"text": "off", "negatives": 8, "max_length": 128}  # which texts alone read
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "causal-lm": ("causal-lm", 0, {"dropout": 0.1}),
    "LoRA": ("causal-lm", 0, {"model": "causal-lm", "adapter": "lora", "lora_dropout": 0.1}),
    "LoRA on 4 bits": ("causal-lm", 0, {"model": "causal-lm", "adapter": "lora", "load_bits": 4}),
    "DPO": ("dpo", 0, {"model": "causal-lm", "dropout": 0.1}),
    "DPO with LoRA": ("dpo", 0, {"model": "causal-lm", "adapter": "lora", "lora_dropout": 0.1}),
    "ORPO": ("orpo", 0, {"model": "causal-lm", "dropout": 0.1}),
    "classifier": ("classifier", 0, {"dropout": 0.1}),
    "weighted classes": ("classifier", 0, {"class_weights": "balanced", "label_smoothing": 0.1}),
    "pruning": ("pruning", 0, {"teacher": "classifier", "prune_every": 4}),
    "pruning without distillation": ("pruning", 1, {"prune_every": 4}),
    "qat": ("qat", 0, {"pruned": "classifier"}),
    "qat, 8 bits": ("qat", 0, {"pruned": "classifier", "bits": 8, "embedding_bits": 32}),
    "recommender": ("recommender", 0, {"negatives": 16}),
    "recommender, LoRA": ("recommender", 1, {"negatives": 16}),
    "recommender, full": ("recommender", 0, {"text": "full", "negatives": 16}),
    "bce": ("recommender", 0, {**NO_TEXT, "loss": "bce", "l2": 0.01, "head": "neumf"}),
    "mlp": ("recommender", 0, {**NO_TEXT, "loss": "bce", "head": "mlp"}),
    "sparse tables": ("recommender", 0, {**NO_TEXT, "sparse_tables": True}),
    "cohorts": ("recommender", 0, {**NO_TEXT, "cohort": 4}),
    "sequence-vae": ("sequence-vae", 0, {"word_dropout": 0.2}),
    "transformer VAE": ("sequence-vae", 0, {"backbone": "transformer", "free_bits": 4.0}),
}
"""Name -> (task, its phase, flags); a model that is a task's name stands for a finished one of it."""
CASES |= {task: (task, 0, {}) for task in sorted(TASKS.keys() - {task for task, *_ in CASES.values()})}
"""A workload that is registered and has no case of its own is held to its defaults."""


def whole_plan(**changes: Any) -> Any:
    values = {"micro_batch_samples": BATCH, "micro_batch_tokens": 10**6, "micro_batch_cost": 1e9}
    return plan(**{**values, **changes})


def build(task: str, flags: Mapping[str, Any], precision: str = "fp32") -> Builder:
    """The training of one process, which holds a whole global batch at a time."""
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.train.build import Builder

    chosen = workload(task)
    recipe = chosen.complete({**COMMON, **flags})[0]
    world = Communicator(whole_plan())
    if precision == "bf16":  # accelerate keeps one precision for the life of a process
        world.plan = whole_plan(precision="bf16")
    return Builder(recipe, prepare(chosen.make(recipe)[1]), whole_plan(), world)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, _cache: None) -> Iterator[dict[str, str]]:
    """Task -> the folder of a model of it with random weights, for tasks that start from one."""
    found = {}
    with small_demos(tmp_path_factory.mktemp("cache")):
        for task in ("causal-lm", "classifier"):
            with build(task, {}) as builder:
                folder, state = tmp_path_factory.mktemp(task), builder.state
                state.task.export(state.model, folder, state.facts)
            found[task] = str(folder)
        yield found


class EnoughError(Exception):
    """A step has its gradients."""


class Gradients(Hook):
    """Keeps the gradients of a step, which ends there: no weight moves."""

    def on_gradients(self, state: Any, step: int) -> Mapping[str, Any]:
        named = list(state.model.named_parameters())
        self.found = {n: p.grad.to_dense().double() for n, p in named if p.grad is not None}
        for _, p in named:
            p.grad = None
        raise EnoughError


def gradients(builder: Builder, step: int, samples: int) -> dict[str, Tensor]:
    """Gradients of a step of a phase in micro-batches of at most so many samples, without an update."""
    builder.replan(dataclasses.replace(builder.state.plan, micro_batch_samples=samples))
    (batch,), hook = builder.state.batches(step, step + 1), Gradients()
    hooks = Hooks([hook])
    with pytest.raises(TrainingError, match="failed in step"), hooks.phase(builder.state, step):
        train_step(builder.state, batch, hooks)
    assert max(len(m.positions) for m in batch.work.micro_batches) <= samples
    return hook.found


def differences(builder: Builder, step: int) -> dict[str, float]:
    """Parameter -> largest distance of its gradients under two cuts, over the norm of its gradient."""
    cohort = builder.state.task.cohort  # which is never cut
    whole, *others = (gradients(builder, step, max(samples, cohort)) for samples in CUTS[step])
    assert whole
    least = LEAST * sum(float(g.norm()) ** 2 for g in whole.values()) ** 0.5
    return {
        name: max(float((g[name] - wanted).norm()) for g in others) / max(float(wanted.norm()), least)
        for name, wanted in whole.items()
    }


def largest_differences(
    name: str, finished: Mapping[str, str], precision: str = "fp32"
) -> tuple[dict[str, float], dict[str, float]]:
    """Of a case: `differences` in the first step, and after LATER steps of one whole batch each."""
    task, phase, flags = CASES[name]
    starts = {k: finished[v] for k, v in flags.items() if k in ("model", "pruned", "teacher")}
    builder = build(task, {**flags, **starts}, precision)
    with builder, builder.phase(builder.schedules[phase]) as state:
        first = differences(builder, 0)
        builder.replan(whole_plan())
        run_phase(state, Hooks(), 0, LATER)
        return first, differences(builder, LATER)


def assert_equal(found: dict[str, float], tolerance: float) -> None:
    worst = max(found, key=lambda name: found[name])
    assert found[worst] <= tolerance, f"{worst}: {found[worst]:.1e}"


@pytest.mark.parametrize("name", CASES)
def test_no_gradient_depends_on_the_cut(name: str, finished: dict[str, str]) -> None:
    more = next((n for task, n in (("recommender", CANCELS), ("qat", ROUNDS)) if name.startswith(task)), 1)
    tolerance = TOLERANCE["fp32"] * more
    for found in largest_differences(name, finished):
        assert_equal(found, tolerance)


@pytest.mark.parametrize("name", ["causal-lm", "DPO", "classifier", "qat", "bce", "sequence-vae"])
def test_in_16_bits_only_rounding_depends_on_the_cut(name: str, finished: dict[str, str]) -> None:
    for found in largest_differences(name, finished, "bf16"):
        assert_equal(found, TOLERANCE["bf16"])


def test_a_factor_of_the_cut_would_be_seen(finished: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the gradient of an activation's step, scaled by the values of the micro-batch."""
    import torch

    name = "_fake_quantize_learnable_per_tensor_affine"
    round_ = getattr(torch, name)

    def by_batch(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return round_(x, *rest[:-1], rest[-1] * (x.shape[-1] / x.numel()) ** 0.5)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, name, by_batch)
    first, _ = largest_differences("qat", finished)
    wrong = {name for name, value in first.items() if value > TOLERANCE["fp32"]}
    assert wrong
    assert all(name.endswith((".own.scale", ".reads.scale")) for name in wrong)


def test_a_rehearsal_leaves_the_model_as_it_was(finished: dict[str, str]) -> None:
    """Another cut's figures are measured before training, and what is trained then is the same bit by bit."""
    flags = {"pruned": finished["classifier"], "dropout": 0.1}
    found = []
    for rehearses in (False, True):
        builder, seen = build("qat", flags), Seen()
        (schedule,) = builder.schedules
        with builder:
            if rehearses:
                other = dataclasses.replace(whole_plan(), micro_batch_samples=3)
                rehearsed = builder.rehearse(schedule, other, LATER)
                assert builder.state.plan == whole_plan()
            with builder.phase(schedule) as state:
                run_phase(state, Hooks([seen]), 0, LATER)
                found.append([(figures.loss, figures.norm) for figures in seen.figures])
    assert found[0] == found[1]
    assert len(rehearsed) == LATER
    assert rehearsed != found[0]
    assert 0 < max(loss for loss, _ in map(moved, rehearsed, found[0])) < 1e-2
