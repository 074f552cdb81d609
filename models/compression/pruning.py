"""The workload pruning: heads and neurons of a finished classifier are removed while it goes on training.

python -m launch auto --task pruning --teacher runs/classifier-0123456789ab --data FOLDER --sparsity 0.5
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isobatch.core.errors import UserError
from isobatch.core.flags import Interval
from isobatch.core.number_ranges import Fraction, Positive, Share
from isobatch.models.base import CHANGES_SHAPE, Batch, Change, ModelSize, Phase, StepContext
from isobatch.models.classification.distillation import DistillationOptions, DistilledClassifier
from isobatch.models.classification.task import FAST_LEAST_STEPS, FAST_MIN_DELTA
from isobatch.models.encoder import encoders, evaluation, importance, weight_surgery
from isobatch.models.encoder.importance import Granularity, ImportanceScores, KeepMasks, PruningBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.core.recipe import Recipe

NUM_REMOVALS = 5
"""How often, over the ramp, masked weights are removed: each time makes the steps after it faster."""

FREE_FAST_SPARSITY = 0.2
"""--sparsity of fast mode: a fifth of the heads, which it was measured to remove without a loss that can be
told from chance (MiniLM on SST-2: +0.57 points, McNemar p 0.44; `accuracy` in benchmarks/LOG.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningOptions(DistillationOptions):
    """The flags of pruning."""

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
    prune_every: Positive | Interval = 40
    """Steps between pruning events, or their share of the ramp (20%)."""
    ramp: Fraction = 0.5
    """Share of the run over which sparsity rises, as a cubic (Zhu and Gupta 2017)."""
    recover: Share = 0.5
    """Share of the run that follows in its own phase, with the sizes fixed; --patience counts there."""


class Pruning(DistilledClassifier):
    """Masks heads and neurons at every pruning event, removes them at a few, then trains at the final size.

    Without --teacher the run begins with a phase of its own that trains the dense classifier.
    """

    Options: ClassVar[type] = PruningOptions
    defaults: ClassVar[Mapping[str, Any]] = {
        **DistilledClassifier.defaults,
        "epochs": [8],
        "patience": 5,
        "eval_every": "0.5ep",
    }
    fast: ClassVar[Mapping[str, Any]] = {
        "epochs": [1.2],
        "eval_every": "12.5%",
        "least_steps": FAST_LEAST_STEPS,
        "batch_size": 64,
        "eval_fraction": 0.5,
        "max_length": 64,
        "patience": 2,
        "min_delta": FAST_MIN_DELTA,
        "importance": "l2",
        "granularity": "heads",
        "sparsity": FREE_FAST_SPARSITY,
        "prune_every": "20%",
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

    def __init__(self, recipe: Recipe, options: Any) -> None:
        super().__init__(recipe, options)
        self._sparsity_cache: tuple[Any, float] | None = None

    def phases(self) -> list[Phase]:
        recover = self.options.recover
        pruning_phases = [
            Phase(name="prune", share=1 - recover, early_stopping=False),
            Phase(name="recover", share=recover),
        ]
        pruning_phases = pruning_phases[: 1 + (recover > 0)]
        if self.teacher_name:
            return pruning_phases
        return [Phase(name="train", early_stopping=False), *pruning_phases]

    def check(self) -> None:
        super().check()
        options, every = self.options, self.options.prune_every
        if isinstance(every, Interval) and (every.unit != "percent" or not every.value):
            raise UserError(f"--prune-every {every}: give steps, or a share of the ramp such as 20%")
        if options.ramp + options.recover > 1 + 1e-9:
            raise UserError(
                f"--ramp {options.ramp:g}: with --recover {options.recover:g} that is more than the whole run"
            )
        config = self._initial_config()
        if config is None:
            return
        if encoders.is_pruned(config):
            raise UserError(
                f"{self._teacher_flag}: is pruned already; pruning starts from a dense classifier"
            )
        check_sparsity(options, PruningBudget(self._sizes(config), options.multiple, options.granularity))

    def _sizes(self, config: Mapping[str, Any]) -> encoders.EncoderSizes:
        return encoders.sizes_from_config(config, self._model_name)

    def model_size(self, facts: Facts) -> ModelSize:
        """The teacher's weights stay in memory."""
        size = super().model_size(facts)
        remark = "; ".join(filter(None, [size.remark, self._removal_remark(size.parameters)]))
        return dataclasses.replace(
            size, why_unshardable=CHANGES_SHAPE, cached_bytes=size.weight_bytes, remark=remark
        )

    def _removal_remark(self, parameters: int) -> str:
        """Which share of the whole model pruning will remove, and what it leaves alone."""
        config, options = self._initial_config(), self.options
        if config is None:
            return ""
        budget = PruningBudget(self._sizes(config), options.multiple, options.granularity)
        prunable = budget.prunable_weights / parameters
        what = {"both": "heads and neurons"}.get(options.granularity, options.granularity)
        more = (
            "" if options.granularity == "both" else "; --granularity both prunes the rest of the layers too"
        )
        return (
            f"pruning will remove about {options.sparsity * prunable:.0%} of all parameters: {what} are"
            f" {prunable:.0%} of them, and --sparsity {options.sparsity:g} takes that part of those{more}"
        )

    def begin_phase(
        self,
        model: Any,
        phase: str,
        first: Callable[[int], Iterable[Batch]],
    ) -> None:
        """Add buffers for the running mean of the importance, if gradients count."""
        import torch

        if phase != "prune" or self.options.importance == "l2":
            return
        for layer in encoders.layers(model):
            for linear in (layer.output, layer.down):
                if getattr(linear, weight_surgery.IMPORTANCE, None) is None:
                    linear.register_buffer(weight_surgery.IMPORTANCE, torch.zeros_like(linear.weight[0]))

    def observe(self, model: Any, step: StepContext) -> Mapping[str, float]:
        """Update the importance from the whole batch's gradients; the log gets the sparsity."""
        if step.phase == "prune" and step.number < self._ramp_steps(step) and self.options.importance != "l2":
            self._update_importance(model)
        return {"sparsity": self._sparsity(model)}

    def _update_importance(self, model: Any) -> None:
        """Running mean of |gate gradient| of each head and neuron."""
        head, update_rate = encoders.attention_head_size(model.config), 1 / self.options.importance_window
        for layer in encoders.layers(model):
            for linear, group in ((layer.output, head), (layer.down, 1)):
                if linear.weight.grad is None or not linear.in_features:
                    continue
                gates = importance.gate_gradient(linear.weight.detach(), linear.weight.grad)
                group_importance = gates.view(-1, group).sum(1).abs_().repeat_interleave(group)
                linear.importance.lerp_(group_importance, update_rate)

    def _ramp_steps(self, step: StepContext) -> int:
        """Steps of the phase over which sparsity rises."""
        return max(
            1, round(step.total_steps * min(1.0, self.options.ramp / (1 - self.options.recover + 1e-9)))
        )

    def steps_between(self, ramp: int) -> int:
        """Steps between two pruning events of a ramp."""
        every = self.options.prune_every
        return every if isinstance(every, int) else every.steps(ramp, ramp)

    def _budget(self, model: Any) -> PruningBudget:
        sizes = self._sizes(model.config.to_dict())
        return PruningBudget(sizes, self.options.multiple, self.options.granularity)

    def _sparsity(self, model: Any) -> float:
        """Sparsity by sizes and masks, counted again only after they changed."""
        state = tuple(
            (linear.in_features, getattr(linear, weight_surgery.MASK, None) is not None)
            for layer in encoders.layers(model)
            for linear in (layer.output, layer.down)
        )
        if self._sparsity_cache is None or self._sparsity_cache[0] != state:
            self._sparsity_cache = (state, measure_sparsity(model, self._budget(model)))
        return self._sparsity_cache[1]

    def after_step(self, model: Any, step: StepContext) -> Change | None:
        """At a pruning event: mask to the target of the cubic schedule; at some, remove what is masked."""
        if step.phase != "prune":
            return None
        done, ramp = step.number + 1, self._ramp_steps(step)
        every = self.steps_between(ramp)
        if done > ramp or (done % every and done != ramp):
            return None
        progress = done / ramp
        target = self.options.sparsity * (1 - (1 - progress) ** 3)
        keep = self._choose_kept(model, target, step)
        layers, head = encoders.layers(model), encoders.attention_head_size(model.config)
        weight_surgery.set_masks(layers, keep, head)
        before = math.floor(NUM_REMOVALS * max(0, done - every) / ramp)
        kept_indices = (
            weight_surgery.remove_masked(layers) if math.floor(NUM_REMOVALS * progress) > before else {}
        )
        if done == ramp:
            for layer in layers:
                for linear in (layer.output, layer.down):
                    linear.register_buffer(weight_surgery.IMPORTANCE, None)
        self._sparsity_cache = None
        record = self._decision_record(model, target, bool(kept_indices))
        message = self.ramp_remark(record["sparsity"], every >= ramp > 1) if done == ramp else ""
        return Change(record, kept_indices, message=message)

    def ramp_remark(self, sparsity: float, in_one: bool) -> str:
        """A line at the end of the ramp where pruning removed nothing, or all at once."""
        if not sparsity:
            return f"pruning removed nothing: --sparsity {self.options.sparsity:g} is too little: raise it"
        if in_one:
            return (
                f"--prune-every {self.options.prune_every} is no less than the ramp's steps, so all went at"
                " once: --prune-every 20% follows the length of the run"
            )
        return ""

    def _choose_kept(self, model: Any, target: float, step: StepContext) -> KeepMasks:
        """New masks at the target sparsity, the same on every process."""
        import torch

        layers, head = encoders.layers(model), encoders.attention_head_size(model.config)
        parts: list[ImportanceScores] = []
        if "l2" in self.options.importance:
            parts.append(importance.l2_scores(layers, head))
        if "gradient" in self.options.importance:
            heads = [layer.output.importance.view(-1, head)[:, 0] for layer in layers]
            parts.append(ImportanceScores(heads, [layer.down.importance for layer in layers]))
        # Masks cover only what is still in the model: what was removed before is subtracted from the target.
        removed = measure_sparsity(model, self._budget(model), masks=False)
        kept = weight_surgery.current_masks(layers, head)
        found = importance.choose_kept(
            importance.sum_of_shares(*parts), kept, self._budget(model), target - removed
        )
        chosen = step.broadcast_object([[k.tolist() for k in part] for part in found])
        return KeepMasks(*([torch.tensor(k, dtype=torch.bool) for k in part] for part in chosen))

    def _decision_record(self, model: Any, target: float, removed_now: bool) -> dict[str, Any]:
        """What decisions.jsonl says of a pruning event."""
        head = encoders.attention_head_size(model.config)
        current = weight_surgery.current_masks(encoders.layers(model), head)
        return {
            "sparsity": round(measure_sparsity(model, self._budget(model)), 6),
            "target": round(target, 6),
            "heads_left": [int(k.sum()) for k in current.heads],
            "neurons_left": [int(k.sum()) for k in current.neurons],
            "cut": removed_now,
        }

    def match_shapes(self, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Shrink a dense model to saved sizes, with masks and importance if they were saved."""
        return match_saved_shapes(model, shapes)

    def final_metrics(
        self, model: nn.Module, final: Path, facts: Facts, batches: Callable[[], Iterable[Batch]]
    ) -> Mapping[str, Any]:
        """Sparsity and sizes, latency, and the comparison with the teacher."""
        found: dict[str, Any] = {"sparsity": measure_sparsity(model, self._budget(model))}
        sizes = encoders.heads_and_neurons(model)
        found |= {"heads_left": [h for h, _ in sizes], "neurons_left": [n for _, n in sizes]}
        mine = encoders.open_classifier(str(final))
        found |= evaluation.latency_metrics(evaluation.torch_runner(mine), facts)
        if (teacher_path := self._teacher_path()) is not None:
            teacher = encoders.open_classifier(teacher_path)
            found |= evaluation.compare_with_baseline(
                evaluation.predict(evaluation.torch_runner(mine), batches()),
                evaluation.predict(evaluation.torch_runner(teacher), batches()),
            )
        return found


def measure_sparsity(model: Any, budget: PruningBudget, masks: bool = True) -> float:
    """Removed weights (masked ones too if `masks`) over all that may be removed."""
    if masks:
        current = weight_surgery.current_masks(
            encoders.layers(model), encoders.attention_head_size(model.config)
        )
        heads, neurons = (sum(int(k.sum()) for k in part) for part in current)
    else:
        heads, neurons = (sum(x) for x in zip(*encoders.heads_and_neurons(model), strict=True))
    return budget.sparsity(heads, neurons)


def check_sparsity(options: PruningOptions, budget: PruningBudget) -> None:
    """Raise UserError for a --sparsity, --multiple or --granularity that this encoder cannot have."""
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


def match_saved_shapes(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Give a model the sizes, masks and importance buffers of `shapes`, in place; whether sizes changed."""
    import torch

    changed = False
    for layer in encoders.layers(model):
        for producers, consumer in ((("query", "key", "value"), "output"), (("up",), "down")):
            linear, name = getattr(layer, consumer), layer.name(consumer)
            width = shapes[f"{name}.weight"][1]
            if width != linear.in_features:
                changed = True
                for producer in producers:
                    weight_surgery.keep_outputs(getattr(layer, producer), torch.arange(width))
                weight_surgery.keep_inputs(linear, torch.arange(width))
            for buffer in (weight_surgery.MASK, weight_surgery.IMPORTANCE):
                if f"{name}.{buffer}" not in shapes:
                    linear.register_buffer(buffer, None)
                elif buffer == weight_surgery.MASK:
                    weight_surgery.mask_inputs(linear, torch.ones(width))
                else:
                    linear.register_buffer(buffer, torch.zeros_like(linear.weight[0]))
    return changed
