"""The contract of a workload: a model, a loss, an evaluation.

A task knows no loop, device, process group or optimizer. It imports torch and heavy libraries inside its
methods, so that its flags can be listed and checked without them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from isobatch.core.errors import UserError
from isobatch.core.flags import NoOptions

if TYPE_CHECKING:
    import numpy as np  # noqa: TC004  as of Tensor
    from torch import Tensor, nn  # noqa: TC004  heavy, and no class here has flags

    from isobatch.core.facts import Facts
    from isobatch.core.recipe import Recipe

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # where peft imports it, it misses kernels

Batch = Mapping[str, "Tensor"]
"""Name -> tensor with one row per sample; always `index` (B,), the samples' numbers, and `length` (B,)."""


class Loss(NamedTuple):
    """A loss as a SUM over the batch and the unit it is counted in.

    The engine divides by the unit's weight over the whole global batch, so neither accumulation nor the
    number of processes can change it. `sum` is a 0-d tensor. Units: `sample`, `cohort`, or a name from the
    source's `weights` (such as `token`).
    """

    sum: Tensor
    unit: str


class Sum(NamedTuple):
    """A part of an evaluation: a sum and its weight; the engine adds both over batches and processes."""

    value: Any
    weight: Any


class Rows(NamedTuple):
    """A part of an evaluation with one row per sample, (B, ...): rank 0 gets all, in the order of samples."""

    values: Tensor


class Noise(Protocol):
    """Random draws keyed by (seed, step, sample, site, position): the same however a batch is cut."""

    def uniform(self, site: str, shape: Sequence[int]) -> Tensor:
        """(B, *shape) in [0, 1)."""

    def normal(self, site: str, shape: Sequence[int]) -> Tensor:
        """(B, *shape), mean 0, variance 1."""

    def integers(self, site: str, shape: Sequence[int], high: int) -> Tensor:
        """(B, *shape) int64 in [0, high)."""


def _to_tensor(array: np.ndarray) -> Tensor:
    import torch

    return torch.from_numpy(array)


@dataclass(frozen=True, slots=True)
class StepContext:
    """Context of one optimizer step; nothing in it depends on micro-batching."""

    number: int
    """Optimizer steps taken before it in this phase: the first is 0. (metrics.jsonl counts from 1.)"""
    phase: str
    noise: Noise
    total_steps: int = 0
    """Steps in this phase."""
    broadcast_object: Callable[[Any], Any] = lambda value: value
    """One process's value on all of them: discrete decisions pass through it."""
    record: Callable[[str, Tensor], None] = lambda *_: None
    """`record(name, sum)` in `loss`: a tensor of a fixed shape, SUMMED over the micro-batch. The engine adds
    it up over the global batch in the losses' own reduction: it costs no collective and no wait."""
    host: Batch | None = None
    """In `loss` and `evaluate`: the micro-batch in host memory, where reading a number waits for nothing."""
    to_device: Callable[[np.ndarray], Tensor] = _to_tensor
    """A small array as a tensor on the device, by a copy that does not wait for the device's queue."""
    positions: np.ndarray | None = None
    """In `loss` of a training step: (B,) places of the micro-batch's samples in the global batch."""
    measured: Tensor | None = None
    """In `loss` of a training step: what `measure` returned, as its mean over the samples of the whole global
    batch, fp64 (fp32 on mps), on the device; see `MeasuresBatch`."""
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """In `after_step`: what `loss` recorded, summed over the global batch, fp64, on the device."""
    log: Callable[[str, Any], None] = lambda *_: None
    """`log(name, value)` in `after_step`: a figure, as JSON, for the step's row of metrics.jsonl."""


class CachedWeightTransform(ABC):
    """Mix into a module that computes with a function of its weights: computed once for a whole step.

    Between `hold` and `release` any number of forwards and backwards may happen; gradients are linear in the
    weights' function, so that they can be taken back through it at the end.
    """

    @abstractmethod
    def hold(self) -> None:
        """Compute it, and let gradients gather there."""

    @abstractmethod
    def release(self, whole: bool) -> None:
        """Take what gathered back to the weights, if all of a step did, and forget it."""


class Change(NamedTuple):
    """What a task did to its model, or decided, after a step; the same on every process."""

    facts: Mapping[str, Any]
    """For decisions.jsonl, as JSON."""
    keep: Mapping[str, Sequence[tuple[int, Tensor]]] = {}
    """Parameter that was cut -> (dimension, indices that stay): the optimizer's moments are cut alike."""
    decision: str = "change of the model"
    """Its name in decisions.jsonl."""
    message: str = ""
    """A line for the user."""
    stop: bool = False
    """Whether training ends here, as failed, with `message`."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model whose answers to the training samples are computed once and kept on disk."""

    identity: str
    """Hash of its weights and of what it is asked: names the answers."""
    build: Callable[[Any], nn.Module]
    """Facts -> the model."""
    answers: Callable[[nn.Module, Batch], Mapping[str, Tensor]]
    """Model and batch -> name -> (B, ...) tensor. `loss` finds each in its batch as `teacher.NAME`."""
    held_out: bool = False
    """Whether it answers the held-out samples too, for `evaluate`."""
    per_token: bool = False
    """Whether an answer is (B, T, ...), values for each token of a sample: what stands behind its last token
    is not kept, and is 0 in the batch of `loss`."""
    name: str = "teacher"
    """What the user calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of training with its own length and optimizer settings."""

    name: str = "train"
    epochs: float = 1.0
    """Default length; the recipe's --epochs and --steps come first."""
    lr: float | None = None
    """Peak learning rate; None takes the recipe's."""
    share: float = 1.0
    """Its part of --epochs or --steps where one number is given for all phases."""
    early_stopping: bool = True
    """Whether --patience may end it and its best checkpoint is looked for."""
    rounds: bool = False
    """Whether activations or weights are rounded to levels in it: float noise moves some to the next level.
    `ModelSize.rounds` says the same of all phases."""


CHANGES_SHAPE = "it changes the model's shape"
TRAINS_A_PART = "a step trains a part of the parameters"
"""Reasons for ModelSize.why_unshardable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The size of a model, from which its memory and time follow. Zero where a notion does not apply."""

    parameters: int
    trainable: int
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    intermediate: int = 0
    vocabulary: int = 0
    """Width of an output projection computed for every token."""
    head_bytes: int = 0
    """Most fp32 logits that are made of it at a time, if it works in chunks."""
    logit_copies: float = 1.0
    """How many times the memory of a cross-entropy's logits its loss needs."""
    teacher_bytes: float = 0.0
    """Weights of a teacher, whose answers are computed on each process before the model is built."""
    recurrent_layers: int = 0
    """Layers that compute the tokens of a row one after another, as a GRU does."""
    query_width: int = 0
    """Of all attention heads together, where it is not `hidden`."""
    key_width: int = 0
    """Of keys, and of values, where heads share them (grouped-query attention)."""
    gated: bool = False
    """Whether the MLP has three matrices (SwiGLU, GeGLU), not two."""
    adapter_inputs: int = 0
    """Widths of what the adapters of a layer read, added up."""
    frozen_bytes: float = 4.0
    """Mean bytes of a frozen weight. Those that train have 4."""
    cached_bytes: float = 0.0
    """What the model holds beside weights and the micro-batch: caches, a text encoder's own batch."""
    step_flops: float = 0.0
    """FLOPs of a step beside those of its tokens, such as a text encoder's."""
    keyed_dropout: bool = False
    """Whether its layers draw keyed noise for dropout."""
    keyed_scores: bool = True
    """Whether the scores of its attention draw, too."""
    ranked: int = 0
    """Scores that are ranked for each held-out sample."""
    fit_bytes: float = 0.0
    """Peak of what a run's end fits in host memory beside the model, such as baselines."""
    fit_seconds: float = 0.0
    """Of a core, for these fits."""
    distinct: int = 0
    """Most different inputs that held-out samples have, where it is known."""
    needs_transformers: bool = True
    """Whether the process imports transformers' models for it."""
    packs: bool = False
    """Whether attention can be told where a sample ends and the next begins."""
    rounds: bool = False
    """Whether a phase rounds activations or weights to levels."""
    remark: str = ""
    """What a plan should say of this model beside."""
    smaller: Callable[[], Mapping[str, ModelSize]] = field(default=dict, compare=False)
    """Flags that would train less of it -> its size with them."""
    why_unshardable: str = ""
    """Why every process must hold all of the model, if it must: as in `it changes the model's shape`."""
    why_whole_weights: str = ""
    """Why every process must hold all weights, if it must; the optimizer's state may be sharded."""

    @property
    def frozen(self) -> int:
        """Parameters that do not train."""
        return self.parameters - self.trainable

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, as they are held between steps."""
        return 4.0 * self.trainable + self.frozen_bytes * self.frozen


class Task(ABC):
    """A workload. Subclass, say what to build and what to minimise; the engine does the rest."""

    Options: ClassVar[type] = NoOptions
    """A frozen dataclass of this workload's recipe fields; each becomes a flag."""
    data: ClassVar[type | str | None] = None
    """The kind of data: a class from data/ or your own; or `module:Class` within isobatch."""
    streamed: ClassVar[str] = ""
    """The kind where data stays in a store, if there is one; its options are those of `data`."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Recipe values that differ from the common defaults."""
    measured_files: ClassVar[tuple[str, ...]] = ()
    """Files that `final_metrics` adds to final/, which follow from held-out data and not from the export."""
    fast: ClassVar[Mapping[str, Any]] = {}
    """Recipe values of --mode fast."""
    demo: ClassVar[Mapping[str, Any]] = {}
    """Recipe values when no data is given: small enough for a minute on two cores."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named values for --preset: of the recipe and, below the user's own plan flags, of the plan."""
    monitor: tuple[str, str] = ("loss", "min")
    """The metric that early stopping and the best checkpoint follow, and by which finished runs are compared;
    its good direction, min or max."""
    plot_every: int = 0
    """Steps between drawings of the run's figures into plots/, also at the end; 0 draws none unasked."""
    follow_ups: ClassVar[tuple[str, ...]] = ("verify {run}", "report {run}", "replay {run} --step 1")
    """Three commands to type when a run is done; {run} is its folder. `auto` gets its --data."""
    set_beside: ClassVar[tuple[str, ...]] = ()
    """What the names of metrics of baselines begin with, and of other ways to measure, as `popularity` in
    `popularity_hr@10`: a table sets them beside the model's own. Of two with one beginning the longer comes
    first."""
    cohort: int = 1
    """Samples that must be computed together."""
    measures_before: bool = False
    """Whether the model as training finds it is measured, too, where --before does not say it."""
    rows_per_sample: ClassVar[int] = 1
    """Rows that the model gets for each sample, one after the other: 2 for pairs of texts. Noise has a row
    for each, and the length of a sample counts all of them."""

    def __init__(self, recipe: Recipe, options: Any) -> None:
        """`recipe`: the common fields, read by attribute; `options`: an instance of `Options`."""
        self.recipe = recipe
        self.options = options

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG003  for tasks to use
        """Recipe values that follow from those asked for; what was asked for itself comes first."""
        return {}

    def phases(self) -> list[Phase]:
        """The stretches of training, in order."""
        return [Phase()]

    def fewest_steps(self, facts: Facts) -> int:
        """Fewest optimizer steps on this data, to which --epochs that give fewer are lengthened."""
        return int(self.recipe.least_steps)

    def check(self) -> None:
        """Raise UserError with one line if the recipe cannot be had; called before anything heavy."""
        return

    def fetch(self) -> None:
        """Bring here what `build_model` opens; called once, before any process trains."""
        return

    @abstractmethod
    def build_model(self, facts: Facts) -> nn.Module:
        """The model on the CPU in fp32. The engine has seeded torch: the same weights on every machine."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        """The losses of a micro-batch, each a sum with its unit; the engine minimises their total."""

    def evaluate(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        """Parts of the metrics; by default the training losses.

        `step.noise` draws the same numbers for a sample in every evaluation, whatever was trained.
        """
        losses = self.loss(model, batch, step)
        rows = len(batch["index"])
        weights: dict[str, Any] = {"sample": rows, "cohort": -(-rows // self.cohort)}
        weights |= {k[:-7]: batch[k].sum() for k in batch if k.endswith(".weight")}
        return {name: Sum(part.sum, weights[part.unit]) for name, part in losses.items()}

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Facts) -> dict[str, float]:
        """Named metrics from reduced parts: (value, weight) for a Sum, an array in sample order for Rows.

        Called on rank 0 alone, which has all rows; what it returns goes to every rank.
        """
        means = {name: float(part.value) / float(part.weight) for name, part in parts.items()}
        return means if "loss" in means else {"loss": sum(means.values()), **means}

    def model_size(self, facts: Facts) -> ModelSize:
        """The model's size, by default counted on a model without storage."""
        import torch

        with torch.device("meta"):
            model = self.build_model(facts)
        if not isinstance(model, torch.nn.Module):
            raise UserError(f"build_model() returned a {type(model).__name__}: return a torch.nn.Module")
        parameters = list(model.parameters())
        return ModelSize(
            parameters=sum(p.numel() for p in parameters),
            trainable=sum(p.numel() for p in parameters if p.requires_grad),
            why_unshardable=TRAINS_A_PART if hasattr(self, "turn_of") else "",
        )

    def export(self, model: nn.Module, folder: Path, facts: Facts) -> None:
        """Write the trained model so that others can open it; by default its weights as safetensors."""
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))
