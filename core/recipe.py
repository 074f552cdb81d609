"""The recipe: every setting that can change what is learnt, and nothing about the machine.

Its hash names the run. A recipe is built once, from the task's defaults, its preset, mode and demo, and the
user's flags. From then on it is complete: recipe.json holds every value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from isobatch.core import number_ranges
from isobatch.core.errors import UserError
from isobatch.core.flags import Interval, OneOf, check_fields, flags_of, options_to_dict
from isobatch.core.optimizers import OPTIMIZERS

DEMO = "demo"
DERIVED = {"options", "starts_from"}
"""Fields of a recipe that are no flags."""
TASK_CODE = "code"
"""Among the options of a user's own task: the hash of its files. It is no flag."""
HOOK_CODE = "hook_code"
"""Among the options: name -> hash of the files of each hook that changes what is learnt. It is no flag."""
SHORT_MODEL_NAMES = {
    **{name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    "distilgpt2": "distilbert/distilgpt2",
}
"""Short names of models that moved to an owner on the Hub -> their Hub ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The fields that every task has. A task's own fields are in `options`."""

    task: str
    """The workload: a name from `describe`, or ./file.py:Class for your own."""
    mode: Literal["full", "fast"] = "full"
    """fast trades quality for time by changing recipe fields only, and prints which (--fast for short)."""
    preset: str | None = None
    """A named set of values of this task, for the recipe and perhaps for the plan."""
    data: str = DEMO
    """A folder, a file, a hub id, addresses in a store (s3://bucket/*.parquet), or demo."""
    format: str | None = None
    """The form of the data where the name does not tell."""
    model: str | None = None
    """A preset to train from scratch, a folder, or a hub id."""
    tokenizer: str | None = None
    """A folder, file or hub id; by default the model's own, else one trained on the data."""
    revision: str | None = None
    """The hub revision of the model."""
    seed: number_ranges.Seed = 0
    """Decides the order of the samples, the initial weights and all noise."""
    epochs: tuple[number_ranges.Rate, ...] | None = None
    """Passes over the data; one number, or one per phase."""
    steps: tuple[number_ranges.Count, ...] | None = None
    """Optimizer steps in place of epochs; one number, or one per phase. 0, of a recommender with --from: new
    users and items get their rows and texts, and nothing is trained."""
    phase: str | None = None
    """Train only this phase."""
    least_steps: number_ranges.Count = 0
    """Fewest optimizer steps of the run: --epochs that give fewer, on small data, are lengthened to them. Of
    many classes each is seen 200 times at least, too; 0 for neither."""
    batch_size: number_ranges.Positive = 32
    """The GLOBAL batch in samples: the same on any number of processes."""
    max_length: number_ranges.Positive = 128
    """Longest sample in tokens."""
    lr: number_ranges.Rate = 1e-3
    """Peak learning rate. Of causal-lm 5e-5 where --model is a loaded one, and 2e-4 with --adapter."""
    weight_decay: number_ranges.Rate = 0.01
    """Decay of weight matrices; biases and norms have none. Decoupled from the gradients, but for sgd, which
    adds it to them before the momentum, as L2 does."""
    warmup: Interval = Interval(0, "steps")
    """Linear rise of the learning rate: steps, or a share of the phase (5%) or of an epoch (0.1ep). Of W
    steps the first is at 1/W of --lr, not at 0, and the last at --lr."""
    schedule: Literal["linear", "cosine", "constant", "wsd"] = "linear"
    """The learning rate after warm-up. wsd: warm-up, stable, decay; `resume RUN --decay` ends a stable part
    at any step."""
    decay: Interval = Interval(20, "percent")
    """The last part of --schedule wsd, in which the rate falls to 0: steps, or a share of the phase (20%) or
    of an epoch."""
    decay_shape: Literal["sqrt", "linear"] = "sqrt"
    """Of that part: 1 - sqrt(x) over its share x (Hägele et al. 2024, "Scaling Laws and Compute-Optimal
    Training Beyond Fixed Training Durations"), or 1 - x."""
    clip: number_ranges.Rate = 1.0
    """Largest norm of the whole gradient; 0 for none."""
    dropout: number_ranges.Probability | None = None
    """Sets every dropout of the model; by default the model's own."""
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    """8-bit states change what is learnt, so they are recipe. `own` is what a task's file makes."""
    train_fraction: number_ranges.Fraction = 1.0
    """Share of the training samples: a seeded subset, the same on every machine."""
    eval_fraction: number_ranges.Fraction = 1.0
    """Share of the validation samples used while training: a seeded subset, the same on every machine; of 200
    and fewer all."""
    eval_every: Interval | None = None
    """How often to evaluate while training: steps, or a share of the phase (10%) or of an epoch (0.5ep);
    by default once an epoch, in a phase of more than 50 epochs every second, third, ... one."""
    patience: number_ranges.Count = 0
    """Stop after this many evaluations without improvement and keep the best; 0 never stops early."""
    min_delta: number_ranges.Rate = 0.0
    """What counts as an improvement."""
    group_by_length: bool = False
    """Batches of like lengths: faster, but another order of samples."""
    noise: Literal["keyed", "native"] = "keyed"
    """keyed: the same dropout noise on any machine. native: torch's own, which depends on the cut."""
    adam_beta1: number_ranges.Momentum = 0.9
    """Decay of Adam's mean of gradients."""
    adam_beta2: number_ranges.Momentum = 0.999
    """Decay of Adam's mean of squared gradients."""
    adam_eps: number_ranges.AboveZero = 1e-8
    """Added to the root of that mean."""
    ema: number_ranges.Momentum | None = None
    """Keep an average of the weights too, in which each step leaves this share of the average before, such as
    0.999. It is evaluated beside them (ema_loss) and exported to final/ema; they learn what they did."""
    label_smoothing: number_ranges.Probability = 0.0
    """Share of a target's probability that is spread evenly over all classes, or tokens, while training."""
    lr_floor: number_ranges.Share = 0.0
    """Where --schedule cosine ends, as a share of --lr."""
    order: Literal["rows", "shards"] = "rows"
    """rows: every epoch permutes all samples. shards: it permutes groups of neighbours, and the samples of
    --shuffle-window groups among themselves, so that each group is read once; data in a store has this."""
    shuffle_window: number_ranges.Positive = 32
    """Groups whose samples are mixed by --order shards: more mix better and take longer to begin."""
    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    """What to do where the loss or gradient norm of a step jumps: say so; go back and leave the step out; or
    leave out the 20 steps before it as well."""
    options: dict[str, Any] = field(default_factory=dict, metadata={"derived": True})
    """The task's own fields."""
    starts_from: dict[str, Any] | None = field(default=None, metadata={"derived": True})
    """Set by --from: the run, the checkpoint and its digest whose weights this run begins with."""

    def __post_init__(self) -> None:
        # A task's own file may register optimizers, and is not imported yet: the registry asks again.
        check_fields(self, "optimizer" if ".py" in self.task and self.optimizer not in OPTIMIZERS else "")
        every = self.eval_every
        if self.epochs is not None and self.steps is not None:
            raise UserError("--epochs and --steps exclude each other: give one of them")
        if "minutes" in (self.warmup.unit, self.decay.unit, every and every.unit):
            counted = "--warmup, --decay and --eval-every are counted in steps, epochs or a share of the run"
            raise UserError(f"{counted}: minutes depend on the machine")
        if every and every.value == 0:
            raise UserError(f"--eval-every {every}: must be above 0; leave it out to evaluate once an epoch")
        if self.epochs is not None and not all(e > 0 for e in self.epochs):
            raise UserError(f"--epochs {','.join(map(str, self.epochs))}: must be above 0")

    def to_dict(self) -> dict[str, Any]:
        return options_to_dict(self)

    def values(self) -> dict[str, Any]:
        """Its fields as JSON, with the task's own among them."""
        return {name: value for name, value in self.to_dict().items() if name not in DERIVED} | self.options

    def to_compare(self) -> dict[str, Any]:
        """Its fields, and what no flag sets: the run it begins with."""
        begun = Path(self.starts_from["run"]).name if self.starts_from else None
        return {**self.values(), "starts_from": begun}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from recipe.json. Raises UserError where a field is unknown or has the wrong type."""
        flags = flags_of(cls)
        if "task" not in values:
            raise UserError("recipe.json names no task")
        if unknown := set(values) - set(flags) - DERIVED - {"hash", "run"}:
            raise UserError(f"recipe.json has unknown fields: {', '.join(sorted(unknown))}")
        of_derived = (values.get("options", {}), values.get("starts_from") or {})
        if not all(isinstance(value, dict) for value in of_derived):
            raise UserError("recipe.json: options or starts_from is no object")
        return cls(**{k: v for k, v in values.items() if k in flags or k in DERIVED})

    def hash(self) -> str:
        """The first twelve hex digits of `digest`: what a run is called after. Not for what must be safe."""
        return self.digest()[:12]

    def digest(self) -> str:
        """SHA-256 over every field, in hex."""
        text = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


def side_by_side(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Name -> its value in each; None where one has none."""
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name) for column in columns] for name in names}


def differing(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Name -> its value in each, where they differ."""
    rows = side_by_side(columns)
    return {name: values for name, values in rows.items() if any(v != values[0] for v in values)}
