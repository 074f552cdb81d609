"""What a profile says, and what could be tried, a sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

DEVICE_USE, MEMORY, DATA_WAIT = 0.90, 0.80, 0.10
"""Targets: more of the device's time, less of its memory, less of a step."""
PADDING = 0.10
"""Share of a step's tokens above which something is worth a trial."""
Findings = dict[str, Any]


def worth_a_trial(found: Findings, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measures of `tune` that may help, each with the reason (`text`). `plan`: the plan's fields."""
    data_wait = found["parts"]["data wait"] / max(1e-12, sum(found["parts"].values()))
    use, memory, padding = found["device_use"], found.get("memory_share", 1.0), found["padding"]
    padded = f"{padding:.0%} of the computed tokens are padding"
    cut = (
        f"a global batch is computed in {found['micro_batches']:.0f} micro-batches of"
        f" {found['samples_per_micro_batch']:.0f} samples"
    )
    launches = plan["device"] == "cuda" and plan["compile"] == "off" and use < DEVICE_USE
    rows = (
        ("loading", data_wait > DATA_WAIT, f"a step waits {data_wait:.0%} of its time for data"),
        ("micro-batch", found["micro_batches"] > 1 or padding > PADDING, cut),
        ("packing", padding > PADDING, padded),
        ("length grouping", padding > PADDING, padded),
        ("attention kernel", plan["attention"] == "eager", "attention keeps its length-squared matrices"),
        ("compile", launches, f"the GPU computes {use:.0%} of the time: it waits for launches"),
        ("mixed precision", plan["precision"] == "fp32", "all arithmetic is in fp32"),
        (
            "activation checkpointing",
            plan["activation_checkpointing"] and memory < MEMORY,
            f"activations are computed twice while memory is {memory:.0%} full",
        ),
    )
    return [{"measure": measure, "text": text} for measure, applies, text in rows if applies]


def profile_lines(found: Findings) -> list[str]:
    """The findings for a person."""
    step, parts = found["step_seconds"], found["parts"]
    rows = [*sorted(parts.items(), key=lambda item: -item[1]), ("sum", sum(parts.values()))]
    lines = [f"a step takes {step * 1e3:.1f} ms (mean of {found['steps']}), of which"]
    lines += [f"  {name:<14}{took * 1e3:>9.1f} ms {took / step:>6.1%}" for name, took in rows if took]
    lines += ["", "operators that take most, in the traced step"]
    lines += [
        f"  {row['seconds'] * 1e3:>8.1f} ms  {row['operator']} ({row['calls']} times)"
        for row in found["operators"]
    ]
    computes = "the cores compute" if found["device"] == "cpu" else "the GPU computes"
    lines += ["", f"{computes} {found['device_use']:.0%} of the time (target: above {DEVICE_USE:.0%})"]
    if "memory_share" in found:
        lines.append(f"memory is {found['memory_share']:.0%} full (target: below {MEMORY:.0%})")
    lines += [
        "",
        "worth a trial (`tune` measures what it brings):" if found["advice"] else "nothing is amiss",
    ]
    for row in found["advice"]:
        flags = f": {', '.join(row['flags'])}" if row.get("flags") else ""
        lines.append(f"  {row['measure']}{flags} ({row['text']})")
    return [*lines, *(f"{what}: {file}" for what, file in found["files"].items())]
