"""One optimizer step: micro-batches in, reduced gradients, clip, update."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.errors import TrainingError
from engine.feed import Loaded, to_device
from engine.noise import KeyedNoise
from models.base import Loss, Step, Task

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from engine.plan import Plan
    from engine.recipe import Recipe
    from engine.world import World

SCALE_START = 2.0**16
SCALE_LEAST = 2.0**-10
SCALE_PATIENCE = 2000
"""Good steps after which an fp16 loss scale doubles."""


@dataclass(slots=True)
class Result:
    """What a step leaves behind, still on the device: read it one step later and nothing waits."""

    loaded: Loaded
    rate: float
    names: list[str]
    sums: Tensor
    """(len(names) + extra,): global loss sums over their weights, then the votes."""
    norm: Tensor
    """0-d: norm of the whole reduced gradient before clipping."""
    seconds: float = 0.0
    """From the end of the step before to the end of this one, as the host saw it."""


class Stepper:
    """Runs steps of one phase on one rank."""

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        plan: Plan,
        world: World,
        model: nn.Module,
        noise: KeyedNoise | None,
        phase: str,
    ) -> None:
        self.task, self.recipe, self.plan, self.world, self.noise = task, recipe, plan, world, noise
        self.raw, self.phase = model, phase
        self.overlapped = False
        """Never in the first step, which shows whether DDP can follow: it needs all gradients."""
        self.undecided = plan.reduction == "overlapped" and world.size > 1
        self.model = model
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.scale = SCALE_START if plan.precision == "fp16" else 1.0
        self.good_steps = 0
        self.names: list[str] | None = None
        """Names of the losses, on all ranks the same."""
        self.foreign_noise: bool | None = None
        """Whether the model was seen to draw from torch's own generators, once it has been looked at."""

    def run(self, loaded: Loaded, optimizer: Optimizer, rate: float, votes: list[float]) -> Result:
        """A whole step. `votes` are added up over the ranks beside the losses."""
        while True:
            names, sums = self.backward(loaded)
            norm = self.reduce()
            if self.plan.precision != "fp16" or not self._overflowed(norm):
                break
        for group in optimizer.param_groups:
            group["lr"] = rate
        if self.recipe.clip:
            nn.utils.clip_grads_with_norm_(self.trained, self.recipe.clip, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pulse = torch.cat([sums, torch.tensor(votes, dtype=sums.dtype, device=sums.device)])
        return Result(loaded, rate, names, self.world.sum(pulse), norm)

    def backward(self, loaded: Loaded) -> tuple[list[str], Tensor]:
        """Gradients of this rank's share, and its share of each loss over the global weight."""
        work = loaded.work
        parts: dict[str, Tensor] = {}
        for place, (micro, host) in enumerate(zip(work.mine, loaded.batches, strict=True)):
            dummy = len(micro.places) == 0
            if dummy and not self.overlapped:
                continue
            batch = to_device(host, self.world.device)
            self._bind(work.step, host["index"].numpy(), place)
            with self._synced(place == len(work.mine) - 1):
                total = torch.zeros((), device=self.world.device)
                with self.world.accelerator.autocast(), self._watching_generators():
                    losses = self.task.loss(self.model, batch, self._step(work.step))
                for name, loss in losses.items():
                    share = self._share(loss, work.totals) * (0.0 if dummy else 1.0)
                    parts[name] = parts.get(name, torch.zeros_like(share.detach())) + share.detach()
                    total = total + share
                (total * (self.scale * (self.world.size if self.overlapped else 1))).backward()
        return self._pack(parts)

    def _pack(self, parts: dict[str, Tensor]) -> tuple[list[str], Tensor]:
        """The parts in one order on every rank; a rank with nothing to do has seen none of them."""
        if self.names is None:
            self.names = sorted({name for names in self.world.gather(sorted(parts)) for name in names})
            if not self.names:
                raise TrainingError("the task's loss() returned no part: return {name: Loss(sum, unit)}")
        if odd := set(parts) - set(self.names):
            raise TrainingError(
                f"loss() returned {', '.join(odd)} at a later step only: return all parts always"
            )
        wide = torch.float32 if self.world.device.type == "mps" else torch.float64
        zero = torch.zeros((), dtype=wide, device=self.world.device)
        return self.names, torch.stack([parts[n].to(wide) if n in parts else zero for n in self.names])

    def _share(self, loss: Loss, totals: dict[str, float]) -> Tensor:
        """A part over its weight in the whole global batch; a batch that weighs nothing teaches nothing."""
        if loss.unit not in totals:
            raise TrainingError(f"loss() counts in {loss.unit!r}, and this data weighs {', '.join(totals)}")
        weight = totals[loss.unit]
        return loss.sum * (1 / weight if weight else 0.0)

    def _step(self, number: int) -> Step:
        return Step(number, self.phase, self.noise or _TorchNoise(self.world.device))

    def _bind(self, step: int, samples: np.ndarray, place: int) -> None:
        if self.noise is not None:
            self.noise.bind(step, samples, self.world.device)
        if self.noise is None or self.foreign_noise is not False:
            # At least a resumed run draws what an undisturbed one would, and no two ranks draw alike.
            torch.manual_seed(hash((self.recipe.seed, step, self.world.rank, place)) & 0x7FFFFFFF)

    @contextlib.contextmanager
    def _watching_generators(self) -> Iterator[None]:
        """Find out, in the first forward, whether the model draws noise that is not keyed."""
        if self.noise is None or self.foreign_noise is not None:
            yield
            return
        before = _generator_states(self.world.device)
        yield
        after = _generator_states(self.world.device)
        self.foreign_noise = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))

    @contextlib.contextmanager
    def _synced(self, last: bool) -> Iterator[None]:
        if self.overlapped and not last:
            with self.model.no_sync():  # type: ignore[operator]
                yield
        else:
            yield

    def reduce(self) -> Tensor:
        """The whole gradient, summed over ranks and unscaled, and its norm."""
        if not self.overlapped:
            everything_used = self.world.sum_gradients(self.trained)
            if self.undecided:
                self.undecided, self.overlapped = False, everything_used
                self.model = self.world.wrap(self.raw) if everything_used else self.raw
        gradients = [p.grad for p in self.trained if p.grad is not None]
        if self.scale != 1:
            torch._foreach_mul_(gradients, 1 / self.scale)
        return nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self.world.device)

    def _overflowed(self, norm: Tensor) -> bool:
        """fp16: void the attempt, halve the scale and redo the same step, so that the schedule stays true."""
        if math.isfinite(norm.item()):
            self.good_steps += 1
            if self.good_steps % SCALE_PATIENCE == 0:
                self.scale *= 2
            return False
        self.scale, self.good_steps = self.scale / 2, 0
        for p in self.trained:
            p.grad = None
        if self.scale < SCALE_LEAST:
            raise TrainingError(
                "fp16 gradients overflow at every loss scale: lower --lr, or use --precision fp32"
            )
        return True

    def scaling(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def set_scaling(self, state: dict[str, Any]) -> None:
        """A saved loss scale means something only where this precision scales."""
        if self.plan.precision == "fp16" and state:
            self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


class _TorchNoise:
    """Draws for tasks when the recipe chose native noise."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _refuse(self, site: str, *_: Any) -> Tensor:
        raise TrainingError(f"this task draws noise ({site}) of its own: use --noise keyed")

    uniform = normal = integers = _refuse


def checkpoint_activations(model: nn.Module, keyed: bool) -> int:
    """Recompute each block of the outermost layer lists in the backward pass; returns how many blocks.

    Keyed noise needs no generator state: the same key gives the same mask again.
    """
    import functools

    from torch.utils.checkpoint import checkpoint

    inside: set[int] = set()
    wrapped = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside.update(id(m) for m in module.modules())
            for block in module:
                block.forward = functools.partial(
                    checkpoint, block.forward, use_reentrant=False, preserve_rng_state=not keyed
                )
                wrapped += 1
    return wrapped
