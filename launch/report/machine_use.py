"""How a run used its machine: figures beside their targets, memory beside its prediction, and curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes
from isobatch.models.protocols import Drawing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CURVES = (
    *("samples_per_second", "tokens_per_second", "step_seconds", "data_seconds", "memory_bytes", "padding"),
    *("gpu_utilisation", "gpu_memory_bytes", "power_watts", "gpu_temperature", "mfu"),
)
"""Fields of metrics.jsonl that say how the machine was used."""
GPU_USE, MEMORY, DATA_WAIT = 90.0, 80.0, 10.0
"""Targets in percent: GPU use above, memory and waiting for data below."""
WORTH_A_WORD = 0.1
"""Share of the time that a run waited for a core."""
MEASURED_STAGES, PREDICTED_STAGES = "peak_memory_by_stage", "predicted_memory_by_stage"
"""Field of summary.json and of the plan: stage -> peak bytes of a process."""


def use_table(
    curves: Mapping[str, list[Any]], summary: Mapping[str, Any], plan: Mapping[str, Any]
) -> list[list[str]]:
    """Rows (figure, value, target, whether it is met); a figure that nobody measured has no row."""
    rows = []
    if (use := _mean(curves, "gpu_utilisation")) is not None:
        rows.append(["GPU use", f"{use:.0f} %", f"above {GPU_USE:.0f} %", _verdict(use > GPU_USE)])
    peak, device = peak_memory(curves, summary), device_memory(plan)
    if peak and device:
        share = 100 * peak / device
        target = f"under {MEMORY:.0f} %"
        rows.append(["memory", f"{share:.0f} % of {format_bytes(device)}", target, _verdict(share < MEMORY)])
    if (wait := data_wait(curves)) is not None:
        rows.append(["data wait", f"{100 * wait:.1f} %", "under 10 %", _verdict(100 * wait < DATA_WAIT)])
    if (waited := _number(summary.get("core_wait"))) and waited >= WORTH_A_WORD:
        rows.append(["cores held by other programs", f"{waited:.0%} of the time", "", ""])
    # Samples of length 1, such as pairs of ids, have as many tokens as samples, and no padding.
    is_of_pairs = _mean(curves, "tokens_per_second") == _mean(curves, "samples_per_second")
    for label, name, form in (
        ("power", "power_watts", "{:.0f} W"),
        ("GPU temperature", "gpu_temperature", "{:.0f} °C"),
        ("model FLOP utilisation", "mfu", "{:.1%}"),
        ("padding", "padding", "{:.1%}"),
        ("samples a second", "samples_per_second", "{:,.1f}"),
        ("tokens a second", "tokens_per_second", "{:,.0f}"),
        ("seconds a step", "step_seconds", "{:.4g}"),
    ):
        if name in ("padding", "tokens_per_second") and is_of_pairs:
            continue
        if (value := _mean(curves, name)) is not None:
            rows.append([label, form.format(value), "", ""])
    return rows


def memory_table(
    curves: Mapping[str, list[Any]], summary: Mapping[str, Any], plan: Mapping[str, Any]
) -> list[list[str]]:
    """Rows (stage, predicted, measured, difference), by stage where the run has them, and the whole run's."""
    measured, predicted = _stages(summary.get(MEASURED_STAGES)), _stages(plan.get(PREDICTED_STAGES))
    rows = [_memory_row(stage, predicted.get(stage), measured.get(stage)) for stage in measured | predicted]
    whole = plan.get("predicted_peak_memory_bytes")
    at = summary.get("peak_memory_stage")
    name = f"whole run (highest while: {at})" if isinstance(at, str) else "whole run"
    rows.append(_memory_row(name, _number(whole), peak_memory(curves, summary)))
    return [row for row in rows if row[1] or row[2]]


def _stages(found: Any) -> dict[str, float]:
    if not isinstance(found, dict):
        return {}
    return {str(stage): value for stage, value in found.items() if _number(value)}


def _memory_row(name: str, predicted: float | None, measured: float | None) -> list[str]:
    both = predicted and measured
    difference = f"{100 * (predicted / measured - 1):+.0f} %" if both and predicted and measured else ""
    return [name, *(format_bytes(value) if value else "" for value in (predicted, measured)), difference]


def peak_memory(curves: Mapping[str, list[Any]], summary: Mapping[str, Any]) -> float | None:
    """Peak bytes of a process so far."""
    found = _number(summary.get("peak_memory_bytes"))
    logged = [value for value in curves.get("memory_bytes", []) if value]
    return found or max(logged, default=None)


def data_wait(curves: Mapping[str, list[Any]]) -> float | None:
    """Share of the logged steps' time that was spent waiting for data."""
    pairs = zip(curves.get("data_seconds", []), curves.get("step_seconds", []), strict=False)
    known = [(wait, step) for wait, step in pairs if wait is not None and step]
    whole = sum(step for _, step in known)
    return sum(wait for wait, _ in known) / whole if whole else None


def device_memory(plan: Mapping[str, Any]) -> float | None:
    """Bytes of memory of the device that a process trained on; None where an older plan does not tell."""
    return _number(plan.get("device_memory_bytes"))


def use_drawings(curves: Mapping[str, list[Any]], predicted_memory: float | None) -> list[Drawing]:
    """Throughput, the time of a step, memory and, where there is one, the GPU over the steps."""
    return [_drawing(curves["step"], *panel) for panel in _panels(curves, predicted_memory) if panel[1]]


def _drawing(
    steps: list[int], title: str, lines: list[tuple[str, float, list[Any]]], level: tuple[str, float] | None
) -> Drawing:
    def draw(ax: Any) -> None:
        for label, scale, values in lines:
            ax.plot(steps, [None if v is None else v * scale for v in values], lw=1, label=label)
        if level is not None:
            ax.axhline(level[1], ls="--", lw=0.9, color="#57606a", label=level[0])
        ax.set(xlabel="step")
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_ylim(bottom=0)
        if len(lines) > 1 or level is not None:
            ax.legend(fontsize=8, frameon=False)

    return Drawing(title, draw, 3.8, 2.4)


Panel = tuple[str, list[tuple[str, float, list[Any]]], tuple[str, float] | None]
"""(title, lines as (label, factor, values), a level as (label, height))."""


def _panels(curves: Mapping[str, list[Any]], predicted_memory: float | None) -> Sequence[Panel]:
    def lines(*wanted: tuple[str, float, str]) -> list[tuple[str, float, list[Any]]]:
        return [(label, scale, curves[name]) for label, scale, name in wanted if name in curves]

    predicted = ("predicted", predicted_memory / 1e9) if predicted_memory else None
    return [
        ("samples a second", lines(("", 1.0, "samples_per_second")), None),
        ("milliseconds", lines(("step", 1e3, "step_seconds"), ("data wait", 1e3, "data_seconds")), None),
        ("GB of memory", lines(("measured", 1e-9, "memory_bytes")), predicted),
        ("GPU use, %", lines(("measured", 1.0, "gpu_utilisation")), ("target", GPU_USE)),
        ("watts", lines(("", 1.0, "power_watts")), None),
    ]


def _mean(curves: Mapping[str, list[Any]], name: str) -> float | None:
    values = [value for value in curves.get(name, []) if value is not None]
    return sum(values) / len(values) if values else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, float | int) and not isinstance(value, bool) and value > 0 else None


def _verdict(met: bool) -> str:
    return "met" if met else "missed"
