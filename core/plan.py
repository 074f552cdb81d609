"""The plan: how to run a recipe on a machine. It decides speed and memory, never what is learnt."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from isobatch.core.errors import UserError
from isobatch.core.flags import OneOf, check_fields, convert, flags_of
from isobatch.core.number_ranges import Count, Positive
from isobatch.core.strategies import STRATEGIES, mesh_of

UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
"""The units of sizes -> bytes."""


def size_of(text: str, whole: float = 0.0) -> float:
    """Bytes of a size such as 10GB, or of a share of `whole` such as 80%; 0 where it is neither."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[kmgt]i?b)", text.strip().lower())
    if match is None or (match[2] == "%" and float(match[1]) > 100):
        return 0.0
    return float(match[1]) * (whole / 100 if match[2] == "%" else UNITS[match[2]])


StrategyName = Annotated[str, OneOf(STRATEGIES)]
StrategyChoice = Annotated[str, OneOf(STRATEGIES, before=("auto",))]
Precision = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["on", "selective", "off"]
Invariance = Literal["exact", "rounding", "precision", "noise"]
INVARIANCES: tuple[Invariance, ...] = get_args(Invariance)
"""How exactly another plan of the recipe learns the same, the most exact first."""
REHEARSED_STEPS = 5
"""First steps of a phase that rounds, computed under another cut: flipped levels are seen from the fourth."""
PRECISION_WORDS: dict[str, Precision] = {"16-mixed": "fp16", "bf16-mixed": "bf16", "32": "fp32"}
"""Lightning's words for a precision. A mixed one is a wish: fp32 where the device has no such arithmetic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What the user may ask of the plan. `auto` leaves the choice to the planner."""

    micro_batch: Positive | None = None
    """Largest number of samples computed at once on one process."""
    processes: Positive | None = None
    """Worker processes in all."""
    workers: Count | None = None
    """Loader processes per worker process; 0 loads in a thread."""
    prefetch: Positive | None = None
    """Micro-batches kept ready, by each loader process where there are any."""
    pin_memory: Literal["auto", "on", "off"] = "auto"
    """Page-locked host memory for copies to a GPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "16-mixed", "bf16-mixed", "32"] = "auto"
    """Number format of the arithmetic; trained weights, gradients and moments stay fp32."""
    strategy: StrategyChoice = "auto"
    """How processes share the model."""
    copies: Positive | None = None
    """Under hsdp: groups of processes that hold a whole model each; by default one a node."""
    compile: Literal["auto", "on", "off", "max-autotune", "reduce-overhead"] = "auto"
    """torch.compile the model; max-autotune times products' kernels too, for a long run."""
    activation_checkpointing: Literal["auto", "on", "selective", "off"] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more arithmetic; selective keeps
    the results of products and attention, and hardly takes longer."""
    attention: Literal["auto", "sdpa", "eager", "flash"] = "auto"
    """The attention kernel."""
    pack: Literal["auto", "on", "off"] = "auto"
    """Samples of a micro-batch end to end, each by itself in attention, in place of padding."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """The kind of device."""
    memory_limit: str | None = None
    """Device memory to stay under: 10GB or 80%."""
    stream_cache: str | None = None
    """Most of the data from a store that a node keeps on its disk, such as 100GB; by default 20GB."""
    preset_options: dict[str, str] = field(default_factory=dict, compare=False, metadata={"derived": True})
    """Options that the recipe's preset asks for, and not the user -> the preset's name."""

    measured_options: dict[str, str] = field(default_factory=dict, compare=False, metadata={"derived": True})
    """Options that a begun run has -> the reason."""

    def why(self, option: str) -> str:
        """Who asks for an option, as the plan's reason for it."""
        if option in self.measured_options:
            return self.measured_options[option]
        preset = self.preset_options.get(option)
        return f"the preset {preset} asks for it" if preset else "you asked for it"

    def __post_init__(self) -> None:
        check_fields(self)
        limit, kept = self.memory_limit, self.stream_cache
        if limit is not None and not size_of(limit, 1.0):
            raise UserError(f"--memory-limit {limit}: is not a size such as 10GB or a share such as 80%")
        if kept is not None and not size_of(kept):
            raise UserError(f"--stream-cache {kept}: is not a size such as 100GB")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every choice the planner made, with its reason."""

    device: Literal["cpu", "cuda", "mps"]
    processes: int
    """World size: processes over all nodes."""
    nodes: int
    strategy: StrategyName
    precision: Precision
    micro_batch_samples: int
    """Largest number of samples in a micro-batch."""
    micro_batch_tokens: int
    """Largest number of padded tokens in a micro-batch."""
    pad_multiple: int
    """Lengths are padded up to a multiple of this."""
    micro_batch_cost: float
    """Fixed cost of a micro-batch (mostly kernel launches), as a number of tokens that cost the same."""
    workers: int
    prefetch: int
    pin_memory: bool
    compile: Literal["on", "off", "max-autotune", "reduce-overhead"]
    activation_checkpointing: Recompute
    attention: Literal["sdpa", "eager", "flash"]
    pack: bool
    """Whether the samples of a micro-batch are packed end to end, so that no padding is computed."""
    reduction: Literal["overlapped", "explicit"]
    """When gradients are reduced over processes: during the last backward pass, or once after it."""
    threads: int
    """Compute threads per process (torch.set_num_threads); 0 keeps torch's default."""
    invariance: Invariance
    predicted_peak_memory_bytes: int
    """Per process, in the memory of the training device."""
    predicted_step_seconds: float
    calibrated: bool
    """Whether the predictions rest on measurements of this kind of device."""
    copies: int = 1
    """Of what the strategy shards."""
    stream_cache_bytes: int = 0
    """Most of the data from a store that a node keeps on its disk; 0 where the data is on this machine."""
    least_memory_bytes: int = 0
    """Least that training needs per process: one sample at a time, with activation checkpointing."""
    usable_memory_bytes: int = 0
    """What may be used of the training device's memory for each process."""
    memory_bound_bytes: int = 0
    """Most bytes per process: micro-batches as large as the budget allows, and the largest excess seen."""
    device_memory_bytes: int = 0
    """Memory of the training device for each process."""
    host_memory_bytes: int = 0
    """Of a node's RAM, where a GPU trains: what is offloaded, else weights until they are on the GPU."""
    predicted_memory_by_stage: dict[str, int] = field(default_factory=dict, metadata={"derived": True})
    """Stage (load, train, save, evaluate, export) -> predicted peak bytes per process."""
    rounding: tuple[float, float] | None = None
    """Under invariance rounding: how far another cut moved the first steps (loss, relative gradient norm), as
    measured when training began; None before."""
    reasons: dict[str, str] = field(default_factory=dict, metadata={"derived": True})

    @property
    def mesh(self) -> tuple[int, int]:
        """(copies of what is sharded, processes that share each), whose product are the processes."""
        return mesh_of(self.strategy, self.processes, self.copies)

    def changed(self, reason: str, **fields: Any) -> Plan:
        """The plan with these fields changed, for a reason."""
        return dataclasses.replace(self, **fields, reasons={**self.reasons, **dict.fromkeys(fields, reason)})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """A plan from plan.json; fields that this version does not know are ignored.

        Raises UserError where a field is missing or has no value of its type.
        """
        flags = flags_of(cls)
        try:
            typed = {name: convert(flag, values[name]) for name, flag in flags.items() if name in values}
            mappings: dict[str, Any] = {
                f.name: dict(values.get(f.name, {})) for f in dataclasses.fields(cls) if f.metadata
            }
            return cls(**typed, **mappings)
        except (TypeError, ValueError) as error:
            raise UserError(f"plan.json: {error}: delete it, and `resume` plans anew") from None
