"""Portable state: weights and moments by parameter name, in pieces of flattened tensors.

Any strategy and world size can write and read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from isobatch.core.errors import TrainingError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn  # noqa: TC004  heavy, and no class here has flags
    from torch.optim import Optimizer

Moments = Mapping[str, Mapping[str, Any]]
"""Parameter name -> kind of moment (such as exp_avg) -> value."""
WEIGHT = "weight/"
"""Prefix of the keys of weights and buffers: weight/NAME."""
MOMENT = "moment/"
"""Prefix of the keys of optimizer state: moment/KIND/NAME."""
HOOK = "hook/"
"""Prefix of the keys of what hooks hold: hook/HOOK/NAME, of parameter NAME's shape."""
PAGED_KINDS = ("state1", "state2")
"""bitsandbytes' names of the state that its paged optimizers let move to host memory."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Shape and dtype of a whole tensor, whose pieces may be on several ranks."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name for it, as in float32."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Consecutive elements of a flattened tensor."""

    name: str
    start: int
    values: Tensor
    """1-d."""


class Held(NamedTuple):
    """What a rank holds of a parameter: all of it, its rows, or a flat shard."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """The first element that `values` has of the flattened parameter; consecutive ones follow."""
    values: Tensor
    """Sharing its memory."""


@dataclass(frozen=True, slots=True)
class PortableState:
    """One rank's part of a checkpoint: the entries of all tensors, and this rank's own pieces."""

    entries: dict[str, TensorEntry]
    pieces: list[TensorPiece]


class StateReader(Protocol):
    """Where state is read from, one tensor at a time."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...
    def read(self, name: str) -> Tensor: ...


def tensor_entry(tensor: Tensor) -> TensorEntry:
    """The entry of a tensor."""
    return TensorEntry(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def collect_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Key -> tensor for all that training changes. Frozen weights are loaded from their source."""
    import torch

    state = {WEIGHT + name: p.detach() for name, p in changing_tensors(model)}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if value is not None:  # some optimizers count steps in a plain number
                state[f"{MOMENT}{key}/{name}"] = torch.as_tensor(value).detach()
    return state


def changing_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Trainable parameters and persistent buffers."""
    yield from ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    saved = set(model.state_dict(keep_vars=True))
    yield from ((name, b) for name, b in model.named_buffers() if name in saved and b is not None)


def rank_share(tensors: Mapping[str, Tensor], rank: int, world: int) -> PortableState:
    """One rank's share of tensors that every rank holds: shares are consecutive and of equal size (+-1).

    In order of names: an optimizer whose state was loaded keeps it in another order than one that began anew.
    """
    pieces, sizes = [], {name: tensors[name].numel() for name in sorted(tensors)}
    for name, start, stop in element_ranges(sizes, rank, world):
        pieces.append(TensorPiece(name, start, tensors[name].reshape(-1)[start:stop]))
    return PortableState({name: tensor_entry(t) for name, t in tensors.items()}, pieces)


def element_ranges(sizes: Mapping[str, int], rank: int, world: int) -> Iterator[tuple[str, int, int]]:
    """(name, start, stop) of one rank's share of all elements; `sizes`: name -> number of elements."""
    total, position = sum(sizes.values()), 0
    low, high = total * rank // world, total * (rank + 1) // world
    for name, size in sizes.items():
        start, stop = max(low, position), min(high, position + size)
        if start < stop:
            yield name, start - position, stop - position
        position += size


def saved_weight_names(saved: StateReader) -> set[str]:
    """Names of the saved weights and buffers."""
    return {k.removeprefix(WEIGHT) for k in saved.entries if k.startswith(WEIGHT)}


def check_shapes(saved: StateReader, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise TrainingError unless the saved weights are, by name and shape, those of `shapes`."""
    found = saved_weight_names(saved)
    if found != set(shapes):
        names = sorted(found ^ set(shapes))
        some = f"{', '.join(names[:3])} ({len(names)} names)"
        raise TrainingError(f"the checkpoint's weights are not this model's: {some}")
    for name, shape in shapes.items():
        if (saved_shape := saved.entries[WEIGHT + name].shape) != shape:
            raise TrainingError(f"the checkpoint's {name} has shape {saved_shape}, and this model's {shape}")


def load_weights(saved: StateReader, model: nn.Module) -> None:
    """Set weights and buffers. Raises TrainingError where names or shapes are not the model's."""
    import torch

    targets = dict(changing_tensors(model))
    check_shapes(saved, {name: tuple(t.shape) for name, t in targets.items()})
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(saved.read(WEIGHT + name))


def saved_moments(saved: StateReader) -> Iterator[tuple[str, str, str]]:
    """(key, kind of moment, parameter name) of all saved optimizer state."""
    for key in saved.entries:
        if key.startswith(MOMENT):
            kind, _, name = key.removeprefix(MOMENT).partition("/")
            yield key, kind, name


def load_moments(saved: StateReader, model: nn.Module, optimizer: Optimizer) -> None:
    """Set the optimizer's state; a new optimizer has none yet."""
    parameters = dict(model.named_parameters())
    for key, kind, name in saved_moments(saved):
        p, value = parameters[name], saved.read(key)
        if value.ndim == 0 and not value.is_floating_point():  # it was a plain number
            optimizer.state[p][kind] = value.item()
            continue
        optimizer.state[p][kind] = _placed(optimizer, p, kind, value)


def _placed(optimizer: Optimizer, p: Tensor, kind: str, value: Tensor) -> Tensor:
    """A saved value in the memory where the optimizer would have made it."""
    import torch

    if kind == "step":
        return value.to(device_of_steps(optimizer, p))
    if getattr(optimizer, "is_paged", False) and kind in PAGED_KINDS and p.device.type == "cuda":
        buffer: Tensor = optimizer.get_state_buffer(p, dtype=value.dtype)  # type: ignore[attr-defined]
        if getattr(buffer, "is_paged", False):  # small ones are not
            torch.cuda.synchronize(p.device)  # a kernel fills it with zeros
            return buffer.copy_(value)
    return value.to(p.device)


def device_of_steps(optimizer: Optimizer, p: Tensor) -> torch.device:
    """Where torch keeps the step count: on the parameter's device if fused or capturable, else on the host.

    A fused update refuses a count on another device (pytorch #104767).
    """
    import torch

    groups = optimizer.param_groups  # DeepSpeed puts a partition into its group for its update alone
    group = next((one for one in groups if any(p is other for other in one["params"])), groups[0])
    return p.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def cut_moments(moments: Moments, keep: Mapping[str, Sequence[tuple[int, Tensor]]]) -> Moments:
    """The moments with only the indices that `keep` lists of each pruned parameter.

    `keep`: parameter -> (dimension, indices that stay). 0-d state, such as a step count, stays as it is.
    """
    return {
        name: {kind: cut(value, keep.get(name, ())) for kind, value in state.items()}
        for name, state in moments.items()
    }


def cut(value: Any, keep: Sequence[tuple[int, Tensor]]) -> Any:
    """A tensor like a parameter, with only the indices that stay: (dimension, indices) each."""
    if getattr(value, "ndim", 0):
        for dimension, indices in keep:
            value = value.index_select(dimension, indices.to(value.device))
    return value
