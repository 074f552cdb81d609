"""Table of the parallel strategies and their traits: other code asks a trait, never compares a name.

A strategy is a file in engine/strategies and an entry of strategies.toml. `single` and `ddp` hold the whole
model on every process; the others hold shards of it (Rajbhandari et al. 2020, "ZeRO").
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from isobatch.core.package import traits_beside


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyTraits:
    """What a strategy needs and can do, known without importing or building it."""

    implementation: str
    """`module:Class` within isobatch: a subclass of engine.strategies.base.Strategy."""
    least_processes: int = 1
    """The smallest world size it works with."""
    most_processes: int | None = None
    """The largest world size; None for no limit."""
    shards_weights: bool = False
    """Each process holds a part of the weights and gradients: a forward pass gathers weights by layer."""
    shards_moments: bool = False
    """Each process holds a part of the optimizer's state and updates a part of the weights."""
    whole_gradients: bool = True
    """Each process keeps the sums of all gradients until they are reduced, once a step."""
    sees_gradients: bool = False
    """Gradients are whole on each process before they are clipped: tasks and hooks may look at them."""
    gathers_half: bool = False
    """In bf16, sharded weights are gathered in 16 bits."""
    offloads: bool = False
    """Weights, gradients and moments are kept in host memory."""
    equal_counts: bool = False
    """Forward passes run collectives: every rank must compute the same number of micro-batches."""
    flat_shards: bool = False
    """The optimizer sees flat pieces, not matrices: only elementwise optimizers can be used."""
    keeps_copies: bool = False
    """What it shards, it shards within groups of processes, by default those of a node: each holds a copy."""
    copy_bytes: float = 0.0
    """Bytes per trained parameter that it keeps in addition to weights, gradients and moments."""
    overlaps_reduction: bool = False
    """On GPUs, gradients are reduced during the last backward pass."""
    ends_model: bool = False
    """Closing it destroys the model: the next phase builds it again and reads the last checkpoint."""
    takes_fp16: bool = True
    """Whether it supports fp16's loss scaling."""
    compiles: bool = True
    """Whether torch.compile can trace it."""
    library: str = "torch"
    devices: Collection[str] = ("cpu", "cuda", "mps")
    tried: bool = False
    """Whether `auto` tries it, in the order of the table, where the whole model does not fit on a device."""

    @property
    def shards(self) -> bool:
        """Whether a process holds only a part of the state that training changes."""
        return self.shards_weights or self.shards_moments or self.offloads


STRATEGIES = traits_beside(__file__, StrategyTraits)
"""Name -> traits."""


def mesh_of(strategy: str, processes: int, copies: int) -> tuple[int, int]:
    """The processes as a mesh: (copies of what is sharded, processes that share each)."""
    return (copies, processes // copies) if traits_of(strategy).shards else (processes, 1)


def traits_of(strategy: str) -> StrategyTraits:
    """The traits of the strategy that a plan names."""
    return STRATEGIES[strategy]
