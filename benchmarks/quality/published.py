"""The planner's predictions beside published figures: `python -m benchmarks published`. Needs no GPU.

Memory should be within 15 % and time within 30 %; where it is not, the row says why. published_gpus.py has
speeds of more cards. Published are Qwen's README ("Profiling of Memory and Speed"),
Korthikanti et al. 2022, DeepSpeed's estimators, LLaMA-Factory's README ("Hardware Requirement") and
Unsloth's requirements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from isobatch.core.facts import Facts
from isobatch.core.recipe import Recipe
from isobatch.engine.machine.hardware import parse_hardware
from isobatch.engine.planning.cost_model import PlanningCase, step_seconds
from isobatch.engine.planning.memory_model import ExecutionChoices, kept_bytes_per_token, memory_footprint
from isobatch.models.causal_lm.adapter_sizes import BYTES_PER_WEIGHT
from isobatch.models.causal_lm.known_models import KNOWN_MODELS
from isobatch.models.causal_lm.model_sizes import size_from_config
from isobatch.models.flops import intermediate_width, key_width, layer_parameters, query_width

if TYPE_CHECKING:
    from isobatch.benchmarks.report import Row
    from isobatch.models.base import ModelSize

MEMORY, TIME = 15, 30
"""How far a prediction may be off, in percent."""
RECIPE = Recipe(task="causal-lm")
QWEN_7B = {  # the first Qwen, by the numbers of Llama's architecture
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "vocab_size": 151936},
}


def measure(quick: bool) -> list[Row]:
    return [*qwen(), *korthikanti(), *([] if quick else deepspeed()), *adapters()]


def row(source: str, what: str, unit: str, published: float, ours: float, limit: int, why: str) -> Row:
    """`why`: the reason where the prediction is off by more than `limit` percent."""
    off = round(100 * (ours / published - 1))
    return {
        **{"source": source, "what": what, "unit": unit, "published": published},
        **{"ours": float(f"{ours:.3g}"), "off %": off, "allowed %": limit},
        "reason": why if abs(off) > limit else "",
    }


def shape(name: str) -> ModelSize:
    size = size_from_config(QWEN_7B if name == "Qwen-7B" else KNOWN_MODELS[name])
    assert size is not None
    return size


def adapted(size: ModelSize, bits: int = 16, rank: int = 8, targets: str = "all") -> ModelSize:
    """The model with LoRA on all matrices of its layers or on queries and values (`qv`), which are frozen in
    bf16 or in 4 bits.
    """
    hidden, query, key, wide = size.hidden, query_width(size), key_width(size), intermediate_width(size)
    inputs = 2 * hidden if targets == "qv" else 3 * hidden + query + 2 * hidden + wide
    outputs = query + key if targets == "qv" else query + 2 * key + hidden + 2 * wide + hidden
    added = round(rank * size.layers * (inputs + outputs))
    rounded = size.layers * layer_parameters(size) if bits == 4 else 0.0
    weights = BYTES_PER_WEIGHT[4] * rounded + 2.0 * (size.parameters - rounded)
    return dataclasses.replace(
        size,
        parameters=size.parameters + added,
        trainable=added,
        adapter_inputs=round(inputs),
        frozen_bytes=weights / size.parameters,
    )


def seconds(size: ModelSize, machine: str, batch: int, rows: int, length: int, **choices: Any) -> float:
    """Predicted seconds of a step of `batch` samples of `length` tokens, `rows` of them at a time."""
    compiled = choices.pop("compile", False)
    chosen = ExecutionChoices(device="cuda", precision="bf16", **choices)
    case = PlanningCase(
        recipe=Recipe(task="causal-lm", batch_size=batch),
        facts=Facts(fingerprint="", folder="", samples={"train": batch}, lengths=(length,)),
        model_size=size,
        hardware=parse_hardware(machine),
        device="cuda",
        precision="bf16",
        attention=chosen.attention,
        compile=compiled,
    )
    return step_seconds(case, chosen, rows, rows * length)


def gigabytes(size: ModelSize, tokens: int, **choices: Any) -> float:
    chosen = ExecutionChoices(device="cuda", precision="bf16", activation_checkpointing="on", **choices)
    return memory_footprint(RECIPE, size, chosen, tokens, tokens).peak / 1e9


def qwen() -> list[Row]:
    """LoRA of rank 64 and activation checkpointing on an A100 of 80 GB, a row at a time, 8 a step."""
    size = dataclasses.replace(adapted(shape("Qwen-7B"), rank=64), head_bytes=0)
    rows = []
    for length, memory, time in ((512, 20.4, 1.5), (1024, 21.5, 2.8), (2048, 23.8, 5.2), (4096, 29.7, 10.1)):
        what = f"Qwen-7B, LoRA, {length} tokens"
        ours = seconds(size, "a100-80gb", 8, 1, length, activation_checkpointing="on")
        why = "whole logits are counted in five copies: 16 bytes each" if length > 2048 else ""
        rows.append(row("Qwen", what, "GB", memory, gigabytes(size, length), MEMORY, why))
        rows.append(row("Qwen", what, "s a step", time, ours, TIME, ""))
    return rows


def korthikanti() -> list[Row]:
    """Bytes of a layer's activations a token, s b h (34 + 5 a s / h), for the paper's model of 22 billion."""
    size = dataclasses.replace(shape("openai-community/gpt2"), layers=1, hidden=6144, heads=64, vocabulary=0)
    size = dataclasses.replace(size, intermediate=4 * 6144)
    scores = 5 * 64 * 2048 / 6144
    rows = []
    for attention, published, why in (("sdpa", 34, ""), ("eager", 34 + scores, "softmax is fp32")):
        choices = ExecutionChoices(precision="bf16", attention=attention)  # type: ignore[arg-type]
        ours = kept_bytes_per_token(size, choices, 2048) / 6144
        what = f"activations of a layer, {attention}"
        rows.append(row("Korthikanti", what, "bytes a width", round(published, 1), ours, MEMORY, why))
    return rows


def deepspeed() -> list[Row]:
    """Weights, gradients and moments a card."""
    with contextlib.redirect_stdout(sys.stderr):
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage_3
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage_2
    rows = []
    for name, nodes in (("meta-llama/Llama-2-7b-hf", 1), ("meta-llama/Llama-2-70b-hf", 8)):
        size, cards = shape(name), 8 * nodes
        for strategy, largest in (("zero2", None), ("zero3", size.vocabulary * size.hidden)):
            known = {"num_gpus_per_node": 8, "num_nodes": nodes, "cpu_offload": False}
            published = (
                stage_2(size.parameters, **known)[1]
                if largest is None
                else stage_3(size.parameters, largest, **known)[1]
            )
            choices = ExecutionChoices(device="cuda", precision="bf16", processes=cards, strategy=strategy)
            ours = memory_footprint(RECIPE, size, choices, 0, 1).state / 1e9
            why = "weights are fp32 beside 16-bit copies, whole gradients are reduced once a step"
            what = f"{name.partition('/')[2]}, {strategy} on {cards} cards"
            rows.append(row("DeepSpeed", what, "GB", round(published / 1e9, 1), ours, MEMORY, why))
    return rows


def adapters() -> list[Row]:
    """One row of 1,024 tokens, activation checkpointing. The sources say neither length nor rank."""
    seven, eight = "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B"
    fourteen, seventy = "Qwen/Qwen2.5-14B", "meta-llama/Llama-3.1-70B"
    rows = [row("LLaMA-Factory", "full, bf16, 7B", "GB", 120, gigabytes(shape(seven), 1024), MEMORY, "")]
    tables: dict[str, list[tuple[str, float, float]]] = {
        "LLaMA-Factory": [(seven, 16, 6), (fourteen, 32, 12), (seventy, 160, 48)],
        "Unsloth": [(seven, 19, 5), (eight, 22, 6), (fourteen, 33, 8.5), (seventy, 164, 41)],
    }
    reasons = {
        16: "published as twice the parameters and a fifth more, for any length",
        4: "scales of 64 weights are fp32 (Unsloth rounds them again), head and embeddings bf16, and 1.2 GB"
        " of CUDA context counts",
    }
    for source, lines in tables.items():
        for name, sixteen, four in lines:
            for bits, figure in ((16, sixteen), (4, four)):
                what = f"{'LoRA' if bits == 16 else 'QLoRA'}, {name.partition('/')[2]}"
                ours = gigabytes(adapted(shape(name), bits), 1024)
                rows.append(row(source, what, "GB", figure, ours, MEMORY, reasons[bits]))
    return rows
