"""A plan to try things under: one process of a CPU, unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from engine.plan import Plan

_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "processes": 1,
    "nodes": 1,
    "strategy": "single",
    "precision": "fp32",
    "micro_batch_samples": 4,
    "micro_batch_tokens": 60,
    "pad_multiple": 1,
    "micro_batch_cost": 4.0,
    "workers": 0,
    "prefetch": 2,
    "pin_memory": False,
    "compile": "off",
    "activation_checkpointing": False,
    "attention": "sdpa",
    "reduction": "explicit",
    "threads": 1,
    "invariance": "exact",
    "predicted_peak_memory_bytes": 0,
    "predicted_step_seconds": 1.0,
    "calibrated": False,
}


def plan(**changes: Any) -> Plan:
    """The plan with these fields changed."""
    return Plan(**{**_DEFAULTS, **changes})
