"""torch.profiler on a few steps: which modules and operators take the time, and how busy the GPU is.

Parts and modules are named in the trace. An operator of the backward pass belongs to the module whose forward
operator has its sequence number (autograd gives both the same).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.engine.profiling.recorder import PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn

    from isobatch.engine.profiling.recorder import Recorder

MODULE = "module "
"""Begins the name of a module's forward pass in the trace."""
BACKWARD_NODE = "autograd::engine::evaluate_function: "
"""Begins the name of a node of the backward pass in the trace."""
TRACE_FILE, STACKS_FILE = "trace.json", "stacks.txt"
Stacks = dict[tuple[str, ...], float]
"""Names from the outermost to the innermost -> seconds of the innermost itself."""
MICROSECOND = 1e-6


class Trace:
    """A context around the steps that are traced. Everything is then read from its methods."""

    def __init__(self, model: nn.Module, recorder: Recorder, device: str, named: bool = True) -> None:
        """`device`: its type. `named`: name modules; not for a compiled model, whose graph has none."""
        import torch

        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, *([kinds.CUDA] if device == "cuda" else [])]
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)
        self._model, self._recorder, self._device, self._named = model, recorder, device, named
        self._hooks: list[Any] = []
        self.steps = 0

    def __enter__(self) -> Trace:
        if self._named:
            self._hooks = _name_modules(self._model)
        self._recorder.annotate = True
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        self._recorder.annotate = False
        for hook in self._hooks:
            hook.remove()

    def write(self, folder: Path) -> dict[str, str]:
        """Write the Chrome trace and the folded stacks; what -> file."""
        self._profile.export_chrome_trace(str(folder / TRACE_FILE))
        atomic_files.write_text(folder / STACKS_FILE, folded_text(self.stacks()))
        names = {"trace": TRACE_FILE, "stacks": STACKS_FILE}
        return {what: str(folder / name) for what, name in names.items()}

    def stacks(self) -> Stacks:
        """Part, modules, operators -> seconds a step of the operator itself, on a GPU where there is one."""
        found: Stacks = defaultdict(float)
        owners = self._owners()
        for event in self._events():
            if seconds := self._self_seconds(event):
                found[tuple(_stack(event, owners))] += seconds / max(1, self.steps)
        return dict(found)

    def modules(self, count: int) -> list[dict[str, Any]]:
        """The `count` modules that take most: their own operators' seconds a step, forward and backward.

        Layers of one kind count together: their number is a `*`.
        """
        found: dict[str, dict[str, float]] = defaultdict(lambda: {"forward": 0.0, "backward": 0.0})
        for stack, seconds in self.stacks().items():
            inside = [name for name in stack if name.startswith(MODULE)]
            if inside:
                way = "backward" if stack[0] == "backward" else "forward"
                found[re.sub(r"\d+", "*", inside[-1].removeprefix(MODULE))][way] += seconds
        largest = sorted(found.items(), key=lambda item: -sum(item[1].values()))[:count]
        return [{"module": name, **ways, "seconds": sum(ways.values())} for name, ways in largest]

    def gpu_busy(self) -> float | None:
        """Share of the traced time in which the GPU ran at least one kernel; None without a GPU."""
        import torch

        events = list(self._profile.events())
        kernels = sorted(
            (event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        )
        if self._device != "cuda" or not kernels:
            return None
        return covered(kernels) / max(1e-9, kernels[-1][1] - kernels[0][0])

    def _events(self) -> list[Any]:
        import torch

        cpu = torch.autograd.DeviceType.CPU
        return [event for event in self._profile.events() if event.device_type == cpu]

    def _self_seconds(self, event: Any) -> float:
        own = event.self_device_time_total if self._device == "cuda" else event.self_cpu_time_total
        return float(own) * MICROSECOND

    def _owners(self) -> dict[int, list[str]]:
        """Sequence number -> the modules around the forward operator that has it."""
        found: dict[int, list[str]] = {}
        for event in self._events():
            # The operator that makes the node is the last of the forward pass that sees its number.
            if event.sequence_nr >= 0 and _backward_node(event) is None:
                found[event.sequence_nr] = [name for name in _names(event) if name.startswith(MODULE)]
        return found


def _name_modules(model: nn.Module) -> list[Any]:
    """Hooks that name the forward pass of every module in the trace."""
    import torch

    open_names: list[Any] = []

    def enter(name: str) -> Any:
        def before(*_: Any) -> None:
            open_names.append(torch.profiler.record_function(MODULE + name))
            open_names[-1].__enter__()

        return before

    def leave(*_: Any) -> None:
        if open_names:
            open_names.pop().__exit__(None, None, None)

    hooks: list[Any] = []
    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(enter(name)))
            hooks.append(module.register_forward_hook(leave, always_call=True))
    return hooks


def folded_text(stacks: Mapping[tuple[str, ...], float]) -> str:
    """Brendan Gregg's folded format: `outer;inner microseconds` a line; other tools draw it."""
    lines = [
        f"{';'.join(name.replace(';', ':') for name in stack)} {round(seconds * 1e6)}"
        for stack, seconds in sorted(stacks.items())
        if seconds >= 1e-6
    ]
    return "".join(f"{line}\n" for line in lines)


def _names(event: Any) -> list[str]:
    """Names around an event and its own, the outermost first."""
    names: list[str] = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names[::-1]


def _backward_node(event: Any) -> Any:
    """The node of the backward pass that an event is part of; None in the forward pass."""
    while event is not None and not event.name.startswith(BACKWARD_NODE):
        event = event.cpu_parent
    return event


def _stack(event: Any, owners: dict[int, list[str]]) -> list[str]:
    """An event's place in the stacks: part, modules, operators."""
    names, node = _names(event), _backward_node(event)
    if node is not None:  # on a GPU the backward pass runs in a thread of its own
        inside = names[names.index(node.name) :]
        return ["backward", *owners.get(node.sequence_nr, []), *inside]
    return names if names[0] in PARTS else ["host", *names]


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of sorted intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in intervals:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
