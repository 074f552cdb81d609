"""Memory by kind at the borders of a step's parts: weights, gradients, optimizer states, activations."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import Tensor

    from isobatch.engine.profiling.recorder import Recorder

KINDS = ("weights", "gradients", "optimizer states", "activations")
STATM = Path("/proc/self/statm")


class MemoryWatch:
    """A context around one step: what each kind takes when a part ends.

    Activations are what autograd saves for the backward pass of a micro-batch, without the weights. What
    activation checkpointing and compiled graphs keep goes another way, and counts as the rest.
    """

    def __init__(self, strategy: Any, recorder: Recorder, device: torch.device) -> None:
        self._strategy, self._recorder, self._device = strategy, recorder, device
        self._saved: dict[int, int] = {}
        self._weights = {_place(p) for p in strategy.unwrapped.parameters()}
        self.rows: list[dict[str, Any]] = []

    def __enter__(self) -> MemoryWatch:
        import torch

        self._recorder.on_change = self._observe
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._recorder.on_change = None

    def peak(self) -> dict[str, Any]:
        """The row at which the most is in use, with the `rest` beside the kinds."""
        return max(self.rows, key=lambda row: row["in use"], default={})

    def _pack(self, tensor: Tensor) -> Tensor:
        import torch

        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and _place(tensor) not in self._weights:
            self._saved[_place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def _observe(self, ends: str, begins: str) -> None:
        if ends in ("forward", "backward", "optimizer"):
            self._add_row(ends)
        if begins == "forward" or ends == "backward":
            self._saved.clear()

    def _add_row(self, after: str) -> None:
        model = self._strategy.unwrapped
        kinds = {
            "weights": _bytes([*model.parameters(), *model.buffers()]),
            "gradients": _bytes(p.grad for p in model.parameters() if p.grad is not None),
            "optimizer states": _bytes(_state_tensors(getattr(self._strategy, "optimizer", None))),
            "activations": sum(self._saved.values()) if after == "forward" else 0,
        }
        in_use = memory_in_use(self._device)
        self.rows.append({"after": after, **kinds, "rest": in_use - sum(kinds.values()), "in use": in_use})


def memory_in_use(device: torch.device) -> int:
    """Bytes of tensors on a GPU; of this process on a CPU, libraries and data included."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    if STATM.exists():
        import resource

        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    import psutil

    return int(psutil.Process().memory_info().rss)


def _state_tensors(optimizer: Any) -> Iterable[Tensor]:
    """The tensors of an optimizer's state; none where a library hides them."""
    import torch

    states = getattr(optimizer, "state", {})
    return [v for state in states.values() for v in state.values() if isinstance(v, torch.Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    found = {}
    for tensor in tensors:
        if tensor.is_sparse:
            values = tensor._values()  # noqa: SLF001  values() refuses uncoalesced gradients
            found[_place(values)] = values.untyped_storage().nbytes()
        else:
            local = getattr(tensor, "_local_tensor", tensor)  # a shard of FSDP
            found[_place(local)] = local.untyped_storage().nbytes()
    return sum(found.values())


def _place(tensor: Tensor) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())


def peak_of_tensors(run: Callable[[], None], device: torch.device) -> int:
    """Most bytes of tensors that live at once while `run` runs, beyond those before; exact on CPU and GPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        run()
    results: Any = profile.profiler.kineto_results
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    return max([0, *itertools.accumulate(change for _, change in sorted(events, key=lambda e: e[0]))])
