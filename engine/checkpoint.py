"""Portable checkpoints: fp32 weights and optimizer state by parameter name, in slices, without pickle.

A checkpoint folder holds one safetensors file per rank that wrote it, an index that maps names to slices,
and state.json. It does not know which strategy or world wrote it. It is written beside its place and
renamed when every rank has written and synced, so a folder of its final name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import files
from engine.errors import TrainingError, UserError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from engine.world import World

WEIGHT = "weight/"
MOMENT = "moment/"
CHECKSUMS = "checksums.json"


def take(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Name -> tensor for everything that training changes. Frozen weights come from their source again."""
    import torch

    state = {WEIGHT + name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    state |= {WEIGHT + name: b.detach() for name, b in _persistent_buffers(model)}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if value is not None:  # some optimizers count steps in a plain number
                state[f"{MOMENT}{key}/{name}"] = torch.as_tensor(value).detach()
    return state


def put(state: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer | None) -> None:
    """Set weights, buffers and optimizer state from portable state; names must match the model's."""
    import torch

    targets = {name: p for name, p in model.named_parameters() if p.requires_grad} | dict(
        _persistent_buffers(model)
    )
    found = {k.removeprefix(WEIGHT) for k in state if k.startswith(WEIGHT)}
    if found != set(targets):
        odd = sorted(found ^ set(targets))
        raise TrainingError(
            f"the checkpoint's weights are not this model's: {', '.join(odd[:3])} ({len(odd)} names)"
        )
    for name, target in targets.items():
        if (shape := state[WEIGHT + name].shape) != target.shape:
            here = tuple(target.shape)
            raise TrainingError(f"the checkpoint's {name} has shape {tuple(shape)}, and this model's {here}")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(state[WEIGHT + name])
    if optimizer is not None:
        _put_moments(state, model, optimizer)


def _put_moments(state: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    parameters = dict(model.named_parameters())
    for key, value in state.items():
        if key.startswith(MOMENT):
            kind, _, name = key.removeprefix(MOMENT).partition("/")
            p = parameters[name]
            if value.ndim == 0 and not value.is_floating_point():  # a plain number it was
                optimizer.state[p][kind] = value.item()
                continue
            # torch keeps `step` on the CPU, unless it is fused on a GPU.
            on_host = kind == "step" and not _steps_on_device(optimizer, p)
            optimizer.state[p][kind] = value.clone() if on_host else value.to(p.device, copy=True)


def _steps_on_device(optimizer: Optimizer, p: Tensor) -> bool:
    return p.device.type != "cpu" and bool(optimizer.param_groups[0].get("fused") or False)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = set(model.state_dict(keep_vars=True))
    return ((name, b) for name, b in model.named_buffers() if name in saved and b is not None)


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements start..stop of a flattened tensor, in one rank's file."""

    name: str
    rank: int
    start: int
    stop: int

    @property
    def key(self) -> str:
        return f"{self.name}@{self.start}"


def slices(sizes: Mapping[str, int], world: int) -> list[Slice]:
    """Consecutive shares of all elements, one per rank, equal to within one element."""
    total, found, position = sum(sizes.values()), [], 0
    borders = [total * r // world for r in range(world + 1)]
    for name, size in sizes.items():
        for rank in range(world):
            start, stop = max(borders[rank], position), min(borders[rank + 1], position + size)
            if start < stop:
                found.append(Slice(name, rank, start - position, stop - position))
        position += size
    return found


def save(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], world: World) -> None:
    """Write a checkpoint together: every rank its share, then one rename. All ranks call this."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        with files.naming_errors(temporary):
            temporary.mkdir(parents=True)
    world.barrier()
    share = slices({name: t.numel() for name, t in tensors.items()}, world.size)
    problem = _try_write(temporary, tensors, share, world.rank)
    problems = [p for p in world.gather(problem) if p]
    if problems:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(problems[0])
    if world.is_main:
        _seal(temporary, folder, tensors, share, state)
    world.barrier()


def _try_write(folder: Path, tensors: Mapping[str, Tensor], share: list[Slice], rank: int) -> str:
    """Every rank votes, so that a full disk on one ends the save on all. Returns the problem, or nothing."""
    try:
        with files.naming_errors(folder):
            _write_share(folder, tensors, [s for s in share if s.rank == rank], rank)
    except UserError as error:
        return str(error)
    return ""


def _write_share(folder: Path, tensors: Mapping[str, Tensor], share: list[Slice], rank: int) -> None:
    from safetensors.torch import save_file

    parts = {s.key: tensors[s.name].reshape(-1)[s.start : s.stop].cpu().clone() for s in share}
    path = folder / _file(rank)
    try:
        save_file(parts, str(path))
    except Exception as error:  # safetensors wraps the operating system's error in its own class
        reason = "No space left on device" if "No space left" in str(error) else str(error)
        raise UserError(f"cannot write {path}: {reason}") from None
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())
    files.write_json(path.with_suffix(".json"), {"bytes": path.stat().st_size, "crc32": files.crc32(path)})


def _seal(
    temporary: Path, folder: Path, tensors: Mapping[str, Tensor], share: list[Slice], state: Mapping[str, Any]
) -> None:
    index: dict[str, Any] = {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "slices": []}
        for name, t in tensors.items()
    }
    for s in share:
        index[s.name]["slices"].append([s.rank, s.start, s.stop])
    files.write_json(temporary / "index.json", index)
    files.write_json(temporary / "state.json", state)
    files.write_json(
        temporary / CHECKSUMS, {n: files.crc32(temporary / n) for n in ("index.json", "state.json")}
    )
    _replace(temporary, folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove what a save or a delete cut short by a kill left behind."""
    for path in folder.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)


def _replace(fresh: Path, folder: Path) -> None:
    if folder.exists():
        _remove(folder)
    os.replace(fresh, folder)


def _remove(folder: Path) -> None:
    """Renamed first: a delete cut short must not leave a folder that looks complete."""
    gone = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name and state.json. Raises TrainingError where anything is missing or damaged."""
    import torch
    from safetensors import safe_open

    try:
        _check_texts(folder)
        index = json.loads((folder / "index.json").read_text())
        state = json.loads((folder / "state.json").read_text())
        ranks = {rank for entry in index.values() for rank, _, _ in entry["slices"]}
        for rank in ranks:
            _check_file(folder / _file(rank))
        readers = {r: safe_open(str(folder / _file(r)), framework="pt") for r in ranks}
        tensors = {}
        for name, entry in index.items():
            flat = torch.empty(torch.Size(entry["shape"]).numel(), dtype=getattr(torch, entry["dtype"]))
            for rank, start, stop in entry["slices"]:
                flat[start:stop] = readers[rank].get_tensor(f"{name}@{start}")
            tensors[name] = flat.view(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"checkpoint {folder} is damaged: {error}") from None
    return tensors, state


def _check_texts(folder: Path) -> None:
    for name, recorded in json.loads((folder / CHECKSUMS).read_text()).items():
        if files.crc32(folder / name) != recorded:
            raise ValueError(f"{name} is not what was written")


def _check_file(path: Path) -> None:
    recorded = json.loads(path.with_suffix(".json").read_text())
    if path.stat().st_size != recorded["bytes"] or files.crc32(path) != recorded["crc32"]:
        raise ValueError(f"{path.name} is not what was written")


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def name(phase: str, step: int) -> str:
    return f"{phase}-{step}"


def listed(folder: Path, phases: list[str]) -> list[Path]:
    """Complete checkpoints in the order they were made."""
    found = [p for p in folder.glob("*-*") if (p / "index.json").exists() and not p.name.startswith(".")]
    return sorted((p for p in found if _place(p, phases)[0] >= 0), key=lambda p: _place(p, phases))


def _place(path: Path, phases: list[str]) -> tuple[int, int]:
    phase, _, step = path.name.rpartition("-")
    return (phases.index(phase), int(step)) if phase in phases and step.isdigit() else (-1, 0)


def prune(folder: Path, phases: list[str], keep: int, spare: set[str]) -> None:
    """Delete all but the newest `keep` checkpoints and those named in `spare`."""
    for path in listed(folder, phases)[:-keep]:
        if path.name not in spare:
            _remove(path)
