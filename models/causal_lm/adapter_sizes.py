"""What an adapter adds to a model and saves: numbers of weights, and their bytes, for the planner."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

from isobatch.models.base import ModelSize
from isobatch.models.causal_lm.model_sizes import LLAMA_LIKE, ModelShape
from isobatch.models.lora import adapted_experts, check_targets, in_layers, is_target, wanted_names

BYTES_PER_WEIGHT = {16: 4.0, 8: 1.0 + 4 / 1024, 4: 0.5 + 4 / 64}
"""Bits -> bytes of a frozen weight: 4 bits have a float scale per 64 weights, 8 bits about one per row."""
WHY_UNSHARDABLE = "bitsandbytes' weights cannot be cut"
"""Why every process must hold all of a model with weights in 8 or 4 bits (ModelSize.why_unshardable)."""
USUAL_TARGETS = {"gpt2": ["c_attn"], **{kind: ["q_proj", "v_proj"] for kind in LLAMA_LIKE}}
"""What peft adapts where --lora-targets is auto; for other models peft, seconds to import, is asked."""


class AdapterCounts(NamedTuple):
    """What an adapter adds to a model and trains, in numbers of weights."""

    trainable: int
    targets: dict[str, int]
    """Last part of a module's name -> how many modules of this name have an adapter."""
    added: int
    """Weights that the model has more with the adapter."""
    inputs: int
    """Widths of what the adapted matrices read, added up over the model."""
    trained_tables: int
    """Weights in the embeddings and the head that train whole; `trainable` holds them too."""


def adapter_counts(shape: ModelShape, options: Any) -> AdapterCounts:
    """What an adapter adds and trains. Raises UserError where --lora-targets names no matrix.

    An adapter of rank r on a matrix (m, n) has r (m + n) weights, DoRA's n more; so has each expert.
    """
    check_targets([m.name for m in shape.matrices], options.lora_targets)
    usual = USUAL_TARGETS.get(shape.model_type) if options.lora_targets == "auto" else None
    names = usual or wanted_names(options.lora_targets, shape.model_type)
    chosen = set(in_layers([m.name for m in shape.matrices], options.lora_layers))
    adapted = [m for m in shape.matrices if m.name in chosen and is_target(m.name, names)]
    magnitudes = sum(m.outputs for m in adapted) if options.adapter == "dora" else 0
    experts = [shape.expert_tensors[name] for name in adapted_experts(shape.expert_tensors, options)]
    added = sum(options.lora_r * (m.inputs + m.outputs) for m in adapted) + magnitudes
    added += sum(options.lora_r * count * (m + n) for count, m, n in experts)
    of_adapted = sum(m.outputs for m in adapted if m.bias)
    biases = {"none": 0, "lora_only": of_adapted, "all": shape.biases}[options.lora_bias]
    also_train = options.also_train or ()
    tables = shape.embeddings * ("embeddings" in also_train) + shape.head * ("head" in also_train)
    if also_train and not shape.head:  # tied
        tables = shape.embeddings
    targets = Counter(m.name.rpartition(".")[2] for m in adapted)
    inputs = sum(m.inputs for m in adapted)
    return AdapterCounts(added + biases + tables, targets, added, inputs, tables)


def with_smaller(shape: ModelShape, options: Any) -> ModelSize:
    """The size of a loaded model, with that of each adapter that may need less memory. Raises UserError."""

    def smaller() -> dict[str, ModelSize]:
        lora = dataclasses.replace(options, adapter="lora", frozen_dtype="bf16")
        adapters = {"lora": lora, "qlora": dataclasses.replace(lora, adapter="qlora", load_bits=4)}
        return {f"--adapter {name}": adapted_model_size(shape, own) for name, own in adapters.items()}

    found = shape.size if options.adapter == "none" else adapted_model_size(shape, options)
    return dataclasses.replace(found, smaller=smaller)


def adapted_model_size(shape: ModelShape, options: Any) -> ModelSize:
    """The size with an adapter; its remark says what a user should know of the choice. Raises UserError."""
    whole, found = shape.size, adapter_counts(shape, options)
    frozen, total = whole.parameters + found.added - found.trainable, whole.parameters + found.added
    of_tables = 2.0 if options.frozen_dtype == "bf16" else 4.0
    of_matrices = of_tables if options.load_bits == 16 else BYTES_PER_WEIGHT[options.load_bits]
    weights = 4.0 * frozen - (4.0 - of_matrices) * sum(m.inputs * m.outputs for m in shape.matrices)
    weights -= (4.0 - of_tables) * (shape.tables - found.trained_tables)
    remark = (
        f"{options.adapter} of rank {options.lora_r} on"
        f" {', '.join(f'{count} {name}' for name, count in found.targets.items())} trains"
        f" {found.trainable:,} of {total:,} parameters ({found.trainable / total:.2%})"
    )
    if shape.experts and not options.lora_experts:
        remark += f"; the {shape.experts:,} weights of the mixture's experts stay frozen"
    return dataclasses.replace(
        whole,
        parameters=total,
        trainable=found.trainable,
        frozen_bytes=weights / max(frozen, 1),
        adapter_inputs=found.inputs // max(whole.layers, 1),
        why_unshardable=whole.why_unshardable if options.load_bits == 16 else WHY_UNSHARDABLE,
        cached_bytes=whole.cached_bytes + (4.0 * found.added if options.lora_init == "pissa" else 0.0),
        remark=remark,
    )
