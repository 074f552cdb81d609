"""Table of the parallel strategies and their traits: other code asks a trait, never compares a name.

A strategy is a file in engine/strategies and an entry here. `single` and `ddp` hold the whole model on every
process; the others hold shards of it (Rajbhandari et al. 2020, "ZeRO").
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    devices: tuple[str, ...] = ("cpu", "cuda", "mps")
    tried: bool = False
    """Whether `auto` tries it, in the order of the table, where the whole model does not fit on a device."""

    @property
    def shards(self) -> bool:
        """Whether a process holds only a part of the state that training changes."""
        return self.shards_weights or self.shards_moments or self.offloads


_REPLICATED = "engine.strategies.replicated:ReplicatedStrategy"
_ZERO_1 = StrategyTraits(
    implementation="engine.strategies.zero:ZeroStrategy",
    least_processes=2,
    shards_moments=True,
    flat_shards=True,
    copy_bytes=4.0,
    ends_model=True,
    takes_fp16=False,
    library="DeepSpeed",
    devices=("cpu", "cuda"),
)
"""DeepSpeed updates an fp32 copy of the weights in flat partitions."""
_ZERO_2 = replace(_ZERO_1, tried=True)
_ZERO_3 = replace(
    _ZERO_2, shards_weights=True, whole_gradients=False, gathers_half=True, equal_counts=True, compiles=False
)
STRATEGIES = {
    "single": StrategyTraits(implementation=_REPLICATED, most_processes=1, sees_gradients=True),
    "ddp": StrategyTraits(
        implementation=_REPLICATED, least_processes=2, sees_gradients=True, overlaps_reduction=True
    ),
    "zero1": _ZERO_1,
    "zero2": _ZERO_2,
    "zero3": _ZERO_3,
    "zero3-offload": replace(_ZERO_3, offloads=True, least_processes=1),
    "fsdp2": replace(  # its shards are flat in that a process has only some rows of a matrix
        _ZERO_3,
        implementation="engine.strategies.fsdp2:FullyShardStrategy",
        copy_bytes=0.0,
        library="torch",
        tried=False,
    ),
}
"""Name -> traits."""


def traits_of(strategy: str) -> StrategyTraits:
    """The traits of the strategy that a plan names."""
    return STRATEGIES[strategy]
