"""What an adapter adds to a model and saves: numbers of weights, and their bytes, for the planner."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes

if TYPE_CHECKING:
    from isobatch.models.base import ModelSize
    from isobatch.models.causal_lm.adapter_counts import AdapterCounts

BYTES_PER_WEIGHT = {16: 4.0, 8: 1.0 + 4 / 1024, 4: 0.5 + 4 / 64}
"""Bits -> bytes of a frozen weight: 4 bits have a float scale per 64 weights, 8 bits about one per row."""
WHY_UNSHARDABLE = "bitsandbytes' weights cannot be cut"
"""Why every process must hold all of a model with weights in 8 or 4 bits (ModelSize.why_unshardable)."""


def memory_saving_flags(options: Any) -> dict[str, dict[str, Any]]:
    """Flags under which training would take less memory than with `options` -> their option values."""
    flags: dict[str, dict[str, Any]] = {
        "--adapter lora": {"adapter": "lora"},
        "--adapter lora --load-bits 8": {"adapter": "lora", "load_bits": 8},
        "--adapter qlora": {"adapter": "qlora", "load_bits": 4},
    }
    if options.adapter == "none":
        return flags
    return {k: v for k, v in flags.items() if v.get("load_bits", 16) < options.load_bits}


def adapted_model_size(
    full_model: ModelSize, found: AdapterCounts, options: Any, optimizer: str
) -> ModelSize:
    """The size of `full_model` with an adapter; its remark says what a user should know of the choice."""
    frozen = full_model.parameters + found.added - found.trainable
    of_tables = 2.0 if options.frozen_dtype == "bf16" else 4.0
    of_matrices = of_tables if options.load_bits == 16 else BYTES_PER_WEIGHT[options.load_bits]
    saved = (4.0 - of_matrices) * found.frozen_matrices + (4.0 - of_tables) * found.frozen_tables
    weights = 4.0 * frozen - saved
    return dataclasses.replace(
        full_model,
        parameters=full_model.parameters + found.added,
        trainable=found.trainable,
        frozen_bytes=weights / max(frozen, 1),
        adapter_inputs=found.inputs // max(full_model.layers, 1),
        why_unshardable=full_model.why_unshardable if options.load_bits == 16 else WHY_UNSHARDABLE,
        remark="; ".join(_remarks(full_model, found, options, optimizer, weights)),
    )


def _remarks(
    full_model: ModelSize, found: AdapterCounts, options: Any, optimizer: str, weights: float
) -> list[str]:
    where = ", ".join(f"{count} {name}" for name, count in found.targets.items())
    total = full_model.parameters + found.added
    if found.trained_tables:
        where += f", and {' and '.join(options.also_train)} ({found.trained_tables:,} weights in fp32)"
    remarks = [
        f"{options.adapter} of rank {options.lora_r} on {where} trains {found.trainable:,} of"
        f" {total:,} parameters ({found.trainable / total:.2%})"
    ]
    if found.experts:
        remarks.append(
            f"an adapter does not reach the mixture's experts: their {found.experts:,} weights stay frozen"
        )
    if options.load_bits != 16:
        remarks.append(
            f"weights in {options.load_bits} bits take {weights / 1e6:,.0f} MB in place of"
            f" {4 * full_model.parameters / 1e6:,.0f} on a GPU; that is all they save, and on a CPU nothing"
        )
    if "8bit" in optimizer:
        remarks.append(
            f"--optimizer {optimizer} saves {6 * found.trainable / 1e6:.1f} MB at most: so little is trained"
        )
    return remarks


def memory_remark(full_model: ModelSize, optimizer: str) -> str:
    """Bytes of weights, gradients and optimizer state of full fine-tuning, and of the cheaper ways; or ""."""
    if optimizer != "adamw":
        return ""
    ways = (16, 10, 4, BYTES_PER_WEIGHT[4])
    adam, eight_bit, lora, qlora = (format_bytes(size * full_model.parameters) for size in ways)
    return (
        f"weights, gradients and moments take {adam}; with --optimizer adamw8bit {eight_bit}, --adapter lora"
        f" {lora}, on a GPU --adapter qlora {qlora}"
    )
