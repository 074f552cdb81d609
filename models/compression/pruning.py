"""The workload pruning: heads and neurons of a finished classifier are removed while it goes on training.

python -m launch auto --task pruning --teacher runs/classifier-0123456789ab --data FOLDER --sparsity 0.5
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isobatch.core.errors import refuse
from isobatch.core.flags import Interval
from isobatch.core.number_ranges import Fraction, Positive, Share
from isobatch.models.base import CHANGES_SHAPE, Batch, Change, ModelSize, Phase, StepContext
from isobatch.models.classification.distillation import DistillationOptions, DistilledClassifier
from isobatch.models.classification.task import SITUATIONS
from isobatch.models.encoder import encoders, evaluation, importance, weight_surgery
from isobatch.models.encoder.importance import Granularity, HeadsAndNeurons, PruningBudget

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.core.recipe import Recipe
    from isobatch.models.protocols import Batches

NUM_REMOVALS = 5
"""How often, over the ramp, masked weights are removed: each time makes the steps after it faster."""


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
    follow_ups: ClassVar = ('predict {run} "a" "b"', "report {run}", "auto --task qat --pruned {run}")
    defaults, fast, demo = (SITUATIONS["pruning"][name] for name in ("defaults", "fast", "demo"))

    def __init__(self, recipe: Recipe, options: Any) -> None:
        super().__init__(recipe, options)
        self._sparsity: float | None = None
        """Of the model as it is; None where that must be counted anew."""

    def phases(self) -> list[Phase]:
        recover = self.options.recover
        phases = [] if self.teacher_name else [Phase(name="train", early_stopping=False)]
        phases.append(Phase(name="prune", share=1 - recover, early_stopping=False))
        return [*phases, Phase(name="recover", share=recover)] if recover else phases

    def check(self) -> None:
        super().check()
        options, every = self.options, self.options.prune_every
        no_share = isinstance(every, Interval) and (every.unit != "percent" or not every.value)
        whole = f"--ramp {options.ramp:g}: with --recover {options.recover:g} that is more than the whole run"
        unclear = f"--prune-every {every}: give steps, or a share of the ramp such as 20%"
        refuse({unclear: no_share, whole: options.ramp + options.recover > 1 + 1e-9})
        if (config := self._initial_config()) is None:
            return
        budget = self._budget(config)
        neurons, most = budget.sizes.neurons, budget.max_sparsity
        pruned, rest = encoders.is_pruned(config), neurons % options.multiple
        wrong = {
            f"{self._model_name} is pruned already; pruning starts from a dense classifier": pruned,
            f"--multiple {options.multiple}: does not divide the {neurons} neurons of a layer": rest,
            f"--sparsity {options.sparsity:g}: at most {most:.3f} can go with --granularity"
            f" {options.granularity} and --multiple {options.multiple}": options.sparsity > most,
        }
        refuse(wrong)

    def model_size(self, facts: Facts) -> ModelSize:
        """The teacher's weights stay in memory."""
        size = super().model_size(facts)
        return dataclasses.replace(size, why_unshardable=CHANGES_SHAPE, cached_bytes=size.weight_bytes)

    def begin_phase(self, model: Any, phase: str, first: Callable[[int], Iterable[Batch]]) -> None:
        """Add buffers for the running mean of the importance, if gradients count."""
        import torch

        if phase != "prune" or self.options.importance == "l2":
            return
        for linear, _ in encoders.pruned_inputs(model):
            if getattr(linear, weight_surgery.IMPORTANCE, None) is None:
                linear.register_buffer(weight_surgery.IMPORTANCE, torch.zeros_like(linear.weight[0]))

    def observe(self, model: Any, step: StepContext) -> Mapping[str, float]:
        """Update the importance from the whole batch's gradients: a running mean of |gate gradient| of each
        head and neuron. The log gets the sparsity.
        """
        if step.phase == "prune" and step.number < self._ramp_steps(step) and self.options.importance != "l2":
            for linear, group in encoders.pruned_inputs(model):
                if linear.weight.grad is None or not linear.in_features:
                    continue
                gates = importance.gate_gradient(linear.weight.detach(), linear.weight.grad)
                group_importance = gates.view(-1, group).sum(1).abs_().repeat_interleave(group)
                linear.importance.lerp_(group_importance, 1 / self.options.importance_window)
        if self._sparsity is None:
            self._sparsity = self._measure_sparsity(model)
        return {"sparsity": self._sparsity}

    def _ramp_steps(self, step: StepContext) -> int:
        """Steps of the phase over which sparsity rises."""
        share = min(1.0, self.options.ramp / (1 - self.options.recover + 1e-9))
        return max(1, round(step.total_steps * share))

    def steps_between(self, ramp: int) -> int:
        """Steps between two pruning events of a ramp."""
        every = self.options.prune_every
        return every if isinstance(every, int) else every.steps(ramp, ramp)

    def _budget(self, config: Mapping[str, Any]) -> PruningBudget:
        sizes = encoders.sizes_from_config(config, self._model_name)
        return PruningBudget(sizes, self.options.multiple, self.options.granularity)

    def _measure_sparsity(self, model: Any, masks: bool = True) -> float:
        """Removed weights (masked ones too if `masks`) over all that may be removed."""
        current = weight_surgery.current_masks(encoders.layers(model))
        left = (sum(int(k.sum()) if masks else len(k) for k in part) for part in current)
        return self._budget(model.config.to_dict()).sparsity(*left)

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
        layers = encoders.layers(model)
        weight_surgery.set_masks(layers, self._choose_kept(model, target, step))
        before = math.floor(NUM_REMOVALS * max(0, done - every) / ramp)
        removes = math.floor(NUM_REMOVALS * progress) > before
        kept_indices = weight_surgery.remove_masked(layers) if removes else {}
        if done == ramp:
            for linear, _ in encoders.pruned_inputs(model):
                linear.register_buffer(weight_surgery.IMPORTANCE, None)
        self._sparsity = self._measure_sparsity(model)
        left = weight_surgery.current_masks(layers)
        record = {"sparsity": round(self._sparsity, 6), "target": round(target, 6)}
        record |= {f"{name}_left": [int(k.sum()) for k in getattr(left, name)] for name in left._fields}
        return Change({**record, "cut": bool(kept_indices)}, kept_indices)

    def _choose_kept(self, model: Any, target: float, step: StepContext) -> HeadsAndNeurons:
        """New masks at the target sparsity, the same on every process."""
        import torch

        layers, budget = encoders.layers(model), self._budget(model.config.to_dict())
        parts = [importance.l2_scores(layers)] if "l2" in self.options.importance else []
        if "gradient" in self.options.importance:
            heads = [layer.output.importance.view(-1, layer.head_size)[:, 0] for layer in layers]
            parts.append(HeadsAndNeurons(heads, [layer.down.importance for layer in layers]))
        scores, kept = importance.sum_of_shares(*parts), weight_surgery.current_masks(layers)
        # Masks cover only what is still in the model: what was removed before is subtracted from the target.
        left = target - self._measure_sparsity(model, masks=False)
        found = importance.choose_kept(scores, kept, budget, left)
        chosen = step.broadcast_object([[k.tolist() for k in part] for part in found])
        return HeadsAndNeurons(*([torch.tensor(k, dtype=torch.bool) for k in part] for part in chosen))

    def match_shapes(self, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Shrink a dense model to saved sizes, with masks and importance if they were saved."""
        self._sparsity = None
        return weight_surgery.match_shapes(encoders.layers(model), shapes)

    def final_metrics(self, model: nn.Module, final: Path, facts: Facts, batches: Batches) -> dict[str, Any]:
        """Sparsity and sizes, and the comparison with the teacher."""
        found: dict[str, Any] = {"sparsity": self._measure_sparsity(model)}
        sizes = encoders.heads_and_neurons(model)
        found |= {"heads_left": [h for h, _ in sizes], "neurons_left": [n for _, n in sizes]}
        run = evaluation.open_runner(final)
        return {**found, **self.against_teacher(run, batches), **self.settle(run, final, facts, batches)}
