"""Weights as they lie on disk, in a run's checkpoint or export or in a folder of transformers: how two of
them differ, and how a run begins from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.checkpoint import CHECKSUMS, SavedCheckpoint
from isobatch.engine.checkpointing.digests import bytes_digest
from isobatch.engine.checkpointing.portable_state import WEIGHT, saved_weight_names

if TYPE_CHECKING:
    from torch import Tensor, nn

Weights = Mapping[str, Callable[[], "Tensor"]]
"""Parameter or buffer -> what reads it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """Its values; the file is open while they are used, and no longer."""
        with safe_open(str(self.file), framework="pt") as opened:
            values: Tensor = opened.get_tensor(self.name)
            return values


ENDING = ".safetensors"
NAMES = (f"model{ENDING}", f"adapter_model{ENDING}", "pytorch_model.bin")
"""Files that save_pretrained writes, in the order in which they are looked for."""
WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")
"""Prefixes that DDP and torch.compile leave in the names of saved weights."""
ROUNDING, OF_A_TENSOR = 1e-5, 1e-3
"""Differences of all weights, and of a tensor, relative to their norms, that are rounding in fp32. Two cuts
of 20 steps of the demo gave 2e-6 of all, and 3e-4 of the biases of keys, which no loss depends on."""


def open_weights(place: Path) -> Weights:
    """The weights of a checkpoint of ours, of a folder of transformers (also of its Trainer), or of a file.

    Raises UserError where there are none, or they cannot be read.
    """
    if not (place / CHECKSUMS).is_file():
        return {name: found.read for name, found in stored_tensors(place).items()}
    with _explained(place):
        saved = SavedCheckpoint(place)
        names = [name for name in saved.entries if name.startswith(WEIGHT)]
        return {name.removeprefix(WEIGHT): partial(saved.read, name) for name in names}


def stored_tensors(place: Path) -> dict[str, StoredTensor]:
    """Name -> tensor in the safetensors of a folder of transformers, or of a file. Raises UserError."""
    with _explained(place):
        return {WRAPPERS.sub("", found.name): found for file in _files(place) for found in _read_header(file)}


@contextlib.contextmanager
def _explained(place: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{place}: its weights cannot be read: {reason}") from None


def _files(place: Path) -> list[Path]:
    """The files of a model: one, or the parts that its index names. Raises UserError."""
    if place.is_file():
        return [place]
    for file in (place / name for name in NAMES):
        if file.is_file():
            return [file]
        index = file.with_name(f"{file.name}.index.json")
        if index.is_file():
            parts = set(json.loads(index.read_text())["weight_map"].values())
            return [place / Path(part).name for part in sorted(parts)]
    raise UserError(f"{place} is no run, and holds no weights: no {NAMES[0]}")


def _read_header(file: Path) -> Iterator[StoredTensor]:
    if file.suffix != ENDING:
        raise UserError(
            f"{file} is no safetensors file: others may run code when they are read; load it where you trust"
            " it, and save it with `model.save_pretrained(FOLDER)`"
        )
    with safe_open(str(file), framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            yield StoredTensor(file, name, tuple(opened.get_slice(name).get_shape()))


@dataclass(frozen=True, slots=True)
class WeightsDifference:
    """How two sets of weights differ."""

    tensors: int
    """That both have."""
    same: int
    """Of them, those that are the same bit for bit."""
    alone: tuple[list[str], list[str]]
    """Those that one side has and the other has under no name."""
    shapes: list[str]
    """Tensors of another shape."""
    difference: float
    """Of all, relative to their norm; infinite where a value is not finite on one side alone."""
    largest: list[tuple[str, float]]
    """The tensors that differ most, relative to their norm, the largest first."""
    rounding: float
    """What all may differ by; more where a side has dtypes of 16 bits."""
    beyond: list[str]
    """Those that differ by more than rounding."""

    @property
    def differs(self) -> bool:
        """Whether values of the same tensors differ beyond rounding."""
        return bool(self.beyond) or not self.difference <= self.rounding

    @property
    def equal(self) -> bool:
        """Whether nothing differs beyond rounding."""
        return bool(self.tensors) and not (any(self.alone) or self.shapes or self.differs)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


MOST_NAMED = 10


def compare_weight_files(one: Weights, other: Weights) -> WeightsDifference:
    """Compare tensor by tensor, by name; a tied head may stand under either of its names."""
    pairs, alone = _paired(one, other)
    squares, norms, rounding = 0.0, 0.0, ROUNDING
    shapes, beyond = [], []
    differing: list[tuple[str, float]] = []
    for name, there in pairs.items():
        a, b = one[name](), other[there]()
        if a.shape != b.shape:
            shapes.append(name)
            continue
        square, norm, allowed = _square_difference(a, b), _square(a), _epsilon(a, b)
        if a.is_floating_point():  # a counter of steps would outweigh all weights
            squares, norms, rounding = squares + square, norms + norm, max(rounding, allowed)
        if square or a.dtype != b.dtype:
            differing.append((name, _relative(square, norm)))
            if not differing[-1][1] <= (max(OF_A_TENSOR, allowed) if a.is_floating_point() else 0.0):
                beyond.append(name)
    return WeightsDifference(
        len(pairs),
        len(pairs) - len(differing) - len(shapes),
        alone,
        shapes,
        _relative(squares, norms),
        sorted(differing, key=lambda pair: -pair[1])[:MOST_NAMED],
        rounding,
        beyond,
    )


def _paired(one: Weights, other: Weights) -> tuple[dict[str, str], tuple[list[str], list[str]]]:
    """Name -> the other's, and the names that either alone has.

    A name that the other lacks is none of these where its values stand there under another name.
    """
    pairs = {name: name for name in one if name in other}
    left = [[n for n in a if n not in b and not _is_tied(a[n](), b)] for a, b in ((one, other), (other, one))]
    return pairs, (left[0], left[1])


def _relative(square: float, norm: float) -> float:
    """Of squares of norms."""
    return math.sqrt(square / norm) if norm else math.inf if square else 0.0


def _square(a: Tensor) -> float:
    """Of the norm of the finite values."""
    return float(a.double().nan_to_num(0.0, 0.0, 0.0).square().sum())


def _square_difference(a: Tensor, b: Tensor) -> float:
    """The square of the norm of the difference; values that are NaN on both sides are equal."""
    if a.dtype == b.dtype and a.equal(b):
        return 0.0
    difference = (a.double() - b.double()).nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)
    difference[(a == b) | (a.isnan() & b.isnan())] = 0.0
    return float(difference.square().sum())


def _epsilon(a: Tensor, b: Tensor) -> float:
    """What the coarser dtype rounds, relative to a value; nothing of integers."""
    import torch

    floats = [torch.finfo(t.dtype).eps for t in (a, b) if t.is_floating_point()]
    return max(floats) if len(floats) == 2 else 0.0


def _is_tied(values: Tensor, other: Weights) -> bool:
    return any(values.shape == (found := read()).shape and values.equal(found) for read in other.values())


def load_start_weights(origin: Mapping[str, Any], model: nn.Module) -> None:
    """Set the model's weights to those of the checkpoint that `starts_from` names.

    What that run did not train keeps its values. Raises UserError where the checkpoint is gone or another
    one, or where its weights are not this model's.
    """
    import torch

    folder = Path(origin["run"]) / "checkpoints" / origin["checkpoint"]
    if not (folder / CHECKSUMS).is_file():
        raise UserError(f"the recipe starts from {folder}, and it is not there: put it back")
    if bytes_digest(folder / CHECKSUMS) != origin["digest"]:
        raise UserError(f"the recipe starts from {folder}, and that is another checkpoint now")
    saved = SavedCheckpoint(folder)
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    names = saved_weight_names(saved)
    kinds = {_layer_kind(name) for name in names}
    further = [n for n, _ in model.named_parameters() if n not in names and _layer_kind(n) in kinds]
    if further:
        raise UserError(
            f"--from {origin['run']}: this model has more layers ({further[0]}): keep the flags that make it"
        )
    with torch.no_grad():
        for name in sorted(names):
            shape = saved.entries[WEIGHT + name].shape
            if name not in targets or tuple(targets[name].shape) != shape:
                found = f"shape {tuple(targets[name].shape)}" if name in targets else "none of that name"
                raise UserError(
                    f"--from {origin['run']}: its weights are not this model's: {name} has shape {shape}"
                    f" there, and here {found}; keep the flags that make the model"
                )
            targets[name].copy_(saved.read(WEIGHT + name))


def _layer_kind(name: str) -> str:
    """The name without the numbers of layers."""
    return re.sub(r"\d+", "#", name)
