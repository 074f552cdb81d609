"""What a profile says, and what could be tried, a sentence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DEVICE_USE, MEMORY, DATA_WAIT = 0.90, 0.80, 0.10
"""Targets: more of the device's time, less of its memory, less of a step."""
PADDING = 0.10
"""Share of a step's tokens above which something is worth a trial."""
Findings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """When a measure is worth a trial, and why."""

    measure: str
    """Name of the measure that `tune` tries."""
    applies: Callable[[Findings, Mapping[str, Any]], bool]
    """(findings, the plan's fields) -> whether it may help."""
    sentence: Callable[[Findings, Mapping[str, Any]], str]


def share_of_step(found: Findings, part: str) -> float:
    """A part's share of the step."""
    return float(found["parts"][part]) / max(1e-12, sum(found["parts"].values()))


def _is_padded(found: Findings, _: Mapping[str, Any]) -> bool:
    return bool(found["padding"] > PADDING)


def _padding(found: Findings, _: Mapping[str, Any]) -> str:
    return f"{found['padding']:.0%} of the computed tokens are padding"


RULES = (
    Rule(
        "loading",
        lambda f, _: share_of_step(f, "data wait") > DATA_WAIT,
        lambda f, _: f"a step waits {share_of_step(f, 'data wait'):.0%} of its time for data",
    ),
    Rule(
        "micro-batch",
        lambda f, _: f["micro_batches"] > 1 or f["padding"] > PADDING,
        lambda f, _: (
            f"a global batch is computed in {f['micro_batches']:.0f} micro-batches of"
            f" {f['samples_per_micro_batch']:.0f} samples"
        ),
    ),
    Rule("packing", _is_padded, _padding),
    Rule("length grouping", _is_padded, _padding),
    Rule(
        "attention kernel",
        lambda _, p: p["attention"] == "eager",
        lambda *_: "attention keeps its length-squared matrices (eager)",
    ),
    Rule(
        "compile",
        lambda f, p: p["device"] == "cuda" and p["compile"] == "off" and f["device_use"] < DEVICE_USE,
        lambda f, _: f"the GPU computes {f['device_use']:.0%} of the time: it waits for launches",
    ),
    Rule("mixed precision", lambda _, p: p["precision"] == "fp32", lambda *_: "all arithmetic is in fp32"),
    Rule(
        "activation checkpointing",
        lambda f, p: p["activation_checkpointing"] and f.get("memory_share", 1) < MEMORY,
        lambda f, _: f"activations are computed twice while memory is {f['memory_share']:.0%} full",
    ),
)


def worth_a_trial(found: Findings, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measure and a sentence (`text`) of each rule that applies."""
    return [{"measure": r.measure, "text": r.sentence(found, plan)} for r in RULES if r.applies(found, plan)]


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
