"""Structured pruning: heads and neurons of a finished classifier go for good while it learns on.

python -m launch auto --task pruning --teacher runs/classifier-0123456789ab --data FOLDER --sparsity 0.5
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isobatch.core.errors import UserError
from isobatch.core.number_ranges import Fraction, Positive, Share
from isobatch.models.base import CHANGES_SHAPE, Batch, Change, ModelSize, Phase, StepContext
from isobatch.models.classification.distillation import DistillationOptions, Distilled
from isobatch.models.encoder import encoders, evaluation, importance, weight_surgery
from isobatch.models.encoder.importance import Granularity, ImportanceScores, KeepMasks, PruningBudget

if TYPE_CHECKING:
    from torch import nn

CUTS = 5
"""How often, over the ramp, what is masked is cut out: each cut makes the steps after it faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningOptions(DistillationOptions):
    """The fields of pruning."""

    sparsity: Share = 0.2
    """Part to remove of the weights of all heads and neurons, or of those that --granularity names."""
    importance: Literal["l2", "gradient", "l2+gradient"] = "l2+gradient"
    """What a head or neuron is worth: its weights' size, its effect on the loss, or both."""
    importance_window: Positive = 50
    """Steps over which gradients count: the time constant of a running mean."""
    granularity: Granularity = "both"
    """What may go: attention heads, feed-forward neurons, or both."""
    multiple: Positive = 32
    """Neurons of a layer go and stay in multiples of this."""
    prune_every: Positive = 40
    """Steps between pruning events."""
    ramp: Fraction = 0.5
    """Share of the run over which sparsity rises, as a cubic (Zhu and Gupta 2017)."""
    recover: Share = 0.5
    """Share of the run that follows in its own phase, with the sizes fixed; --patience counts there."""


class Pruning(Distilled):
    """Masks at every event, cuts at a few milestones, then recovers.

    Without --teacher the run begins with a phase of its own that trains the dense classifier.
    """

    Options: ClassVar[type] = PruningOptions
    defaults: ClassVar[Mapping[str, Any]] = {
        **Distilled.defaults,
        "epochs": [8],
        "patience": 5,
        "eval_every": "0.5ep",
    }
    fast: ClassVar[Mapping[str, Any]] = {
        "epochs": [4],
        "batch_size": 64,
        "train_fraction": 0.3,
        "eval_fraction": 0.5,
        "max_length": 64,
        "patience": 2,
        "importance": "l2",
        "granularity": "heads",
        "prune_every": 100,
        "importance_window": 20,
        "distill_hidden": False,
    }
    demo: ClassVar[Mapping[str, Any]] = {
        "model": "tiny",
        "max_length": 64,
        "lr": 1e-3,
        "epochs": [3],
        "prune_every": 10,
        "patience": 0,
    }

    def __init__(self, recipe: Any, options: Any) -> None:
        super().__init__(recipe, options)
        self._counted: tuple[Any, float] | None = None

    def phases(self) -> list[Phase]:
        recover = self.options.recover
        own = [
            Phase(name="prune", share=1 - recover, early_stopping=False),
            Phase(name="recover", share=recover),
        ]
        own = own[: 1 + (recover > 0)]
        return own if self.teacher_word else [Phase(name="train", early_stopping=False), *own]

    def check(self) -> None:
        super().check()
        options = self.options
        if options.ramp + options.recover > 1 + 1e-9:
            raise UserError(
                f"--ramp {options.ramp:g}: with --recover {options.recover:g} that is more than the whole run"
            )
        config = self._raw_config()
        if config is None:
            return
        if encoders.is_pruned(config):
            raise UserError(
                f"{self._teacher_flag}: is pruned already; pruning starts from a dense classifier"
            )
        refuse_sparsity(options, PruningBudget(self._sizes(config), options.multiple, options.granularity))

    def _sizes(self, config: Mapping[str, Any]) -> encoders.EncoderSizes:
        return encoders.sizes_from_config(config, self._name)

    def model_size(self, facts: Any) -> ModelSize:
        return dataclasses.replace(super().model_size(facts), why_unshardable=CHANGES_SHAPE)

    def begin_phase(self, model: Any, phase: str, first: Callable[[int], Iterable[Batch]]) -> None:
        """Place for the running mean of what gates are worth, where gradients count."""
        import torch

        if phase != "prune" or self.options.importance == "l2":
            return
        for layer in encoders.layers(model):
            for linear in (layer.output, layer.down):
                if getattr(linear, weight_surgery.IMPORTANCE, None) is None:
                    linear.register_buffer(weight_surgery.IMPORTANCE, torch.zeros_like(linear.weight[0]))

    def observe(self, model: Any, step: StepContext) -> Mapping[str, float]:
        if step.phase == "prune" and step.number < self._ramp(step) and self.options.importance != "l2":
            self._remember_gates(model)
        return {"sparsity": self._sparsity(model)}

    def _remember_gates(self, model: Any) -> None:
        head, fresh = encoders.attention_head_size(model.config), 1 / self.options.importance_window
        for layer in encoders.layers(model):
            for linear, group in ((layer.output, head), (layer.down, 1)):
                if linear.weight.grad is None or not linear.in_features:
                    continue
                gates = importance.gate_gradient(linear.weight.detach(), linear.weight.grad)
                worth = gates.view(-1, group).sum(1).abs_().repeat_interleave(group)
                linear.importance.lerp_(worth, fresh)

    def _ramp(self, step: StepContext) -> int:
        """Steps over which sparsity rises."""
        return max(
            1, round(step.total_steps * min(1.0, self.options.ramp / (1 - self.options.recover + 1e-9)))
        )

    def _budget(self, model: Any) -> PruningBudget:
        sizes = self._sizes(model.config.to_dict())
        return PruningBudget(sizes, self.options.multiple, self.options.granularity)

    def _sparsity(self, model: Any) -> float:
        """From sizes and masks; counted again only where they changed."""
        state = tuple(
            (linear.in_features, getattr(linear, weight_surgery.MASK, None) is not None)
            for layer in encoders.layers(model)
            for linear in (layer.output, layer.down)
        )
        if self._counted is None or self._counted[0] != state:
            self._counted = (state, sparsity_of(model, self._budget(model)))
        return self._counted[1]

    def after_step(self, model: Any, step: StepContext) -> Change | None:
        if step.phase != "prune":
            return None
        done, ramp, every = step.number + 1, self._ramp(step), self.options.prune_every
        if done > ramp or (done % every and done != ramp):
            return None
        progress = done / ramp
        target = self.options.sparsity * (1 - (1 - progress) ** 3)
        keep = self._chosen(model, target, step)
        layers, head = encoders.layers(model), encoders.attention_head_size(model.config)
        weight_surgery.set_masks(layers, keep, head)
        before = math.floor(CUTS * max(0, done - every) / ramp)
        cuts = weight_surgery.remove_masked(layers) if math.floor(CUTS * progress) > before else {}
        if done == ramp:
            for layer in layers:
                for linear in (layer.output, layer.down):
                    linear.register_buffer(weight_surgery.IMPORTANCE, None)
        self._counted = None
        return Change(self._decided(model, target, bool(cuts)), cuts)

    def _chosen(self, model: Any, target: float, step: StepContext) -> KeepMasks:
        import torch

        layers, head = encoders.layers(model), encoders.attention_head_size(model.config)
        parts: list[ImportanceScores] = []
        if "l2" in self.options.importance:
            parts.append(importance.l2_scores(layers, head))
        if "gradient" in self.options.importance:
            heads = [layer.output.importance.view(-1, head)[:, 0] for layer in layers]
            parts.append(ImportanceScores(heads, [layer.down.importance for layer in layers]))
        # What was cut out before counts as removed: the masks are those of the model as it is now.
        gone = sparsity_of(model, self._budget(model), masks=False)
        kept = weight_surgery.current_masks(layers, head)
        found = importance.choose_kept(
            importance.sum_of_shares(*parts), kept, self._budget(model), target - gone
        )
        chosen = step.broadcast_object([[k.tolist() for k in part] for part in found])
        return KeepMasks(*([torch.tensor(k, dtype=torch.bool) for k in part] for part in chosen))

    def _decided(self, model: Any, target: float, was_cut: bool) -> dict[str, Any]:
        head = encoders.attention_head_size(model.config)
        left = weight_surgery.current_masks(encoders.layers(model), head)
        return {
            "sparsity": round(sparsity_of(model, self._budget(model)), 6),
            "target": round(target, 6),
            "heads_left": [int(k.sum()) for k in left.heads],
            "neurons_left": [int(k.sum()) for k in left.neurons],
            "cut": was_cut,
        }

    def match_shapes(self, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Cut a dense model to saved sizes, with masks and running means where some were saved."""
        return fit(model, shapes)

    def final_metrics(
        self, model: nn.Module, final: Path, facts: Any, batches: Callable[[], Iterable[Batch]]
    ) -> Mapping[str, Any]:
        """What is left, how fast it is, and how it compares with its teacher."""
        found: dict[str, Any] = {"sparsity": sparsity_of(model, self._budget(model))}
        sizes = encoders.heads_and_neurons(model)
        found |= {"heads_left": [h for h, _ in sizes], "neurons_left": [n for _, n in sizes]}
        mine = encoders.open_classifier(str(final))
        found |= evaluation.latency_metrics(evaluation.torch_runner(mine), facts)
        if (place := self._teacher_place()) is not None:
            teacher = encoders.open_classifier(place)
            found |= evaluation.compare_with_baseline(
                evaluation.predict(evaluation.torch_runner(mine), batches()),
                evaluation.predict(evaluation.torch_runner(teacher), batches()),
            )
        return found


def sparsity_of(model: Any, budget: PruningBudget, masks: bool = True) -> float:
    """Weights of removed (and masked) heads and neurons over those of all that may go."""
    if masks:
        left = weight_surgery.current_masks(
            encoders.layers(model), encoders.attention_head_size(model.config)
        )
        heads, neurons = (sum(int(k.sum()) for k in part) for part in left)
    else:
        heads, neurons = (sum(x) for x in zip(*encoders.heads_and_neurons(model), strict=True))
    return budget.sparsity(heads, neurons)


def refuse_sparsity(options: PruningOptions, budget: PruningBudget) -> None:
    """A sparsity, multiple or granularity that cannot be had, in one line."""
    s = budget.sizes
    if s.neurons % options.multiple:
        fits = [m for m in (64, 32, 16, 8, 4, 2, 1) if s.neurons % m == 0]
        raise UserError(
            f"--multiple {options.multiple}: the layers have {s.neurons} neurons, which it does not divide;"
            f" {fits[0]} would"
        )
    if options.sparsity > budget.max_sparsity:
        raise UserError(
            f"--sparsity {options.sparsity:g}: at most {budget.max_sparsity:.3f} can go with --granularity"
            f" {options.granularity} and --multiple {options.multiple}"
        )


def fit(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Give a model the sizes, masks and running means that `shapes` have; whether anything changed."""
    import torch

    changed = False
    for layer in encoders.layers(model):
        for makers, reader in ((("query", "key", "value"), "output"), (("up",), "down")):
            linear, name = getattr(layer, reader), layer.name(reader)
            width = shapes[f"{name}.weight"][1]
            if width != linear.in_features:
                changed = True
                for maker in makers:
                    weight_surgery.keep_outputs(getattr(layer, maker), torch.arange(width))
                weight_surgery.keep_inputs(linear, torch.arange(width))
            for buffer in (weight_surgery.MASK, weight_surgery.IMPORTANCE):
                if f"{name}.{buffer}" not in shapes:
                    linear.register_buffer(buffer, None)
                elif buffer == weight_surgery.MASK:
                    weight_surgery.mask_inputs(linear, torch.ones(width))
                else:
                    linear.register_buffer(buffer, torch.zeros_like(linear.weight[0]))
    return changed
