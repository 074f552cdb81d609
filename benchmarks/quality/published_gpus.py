"""What others published of training on GPUs, beside ours: `python -m benchmarks published-gpus`.

Needs no GPU. published_gpus.csv has tokens a second and card, and GB that torch allocated, at the published
layout. A model is a known one's name, or width x layers x heads of an MPT. Half of the speeds, drawn by
SEED, are what two constants are fitted to: the share of the peak before Hopper, and from it on. Of the
other half 8 of 10 should be within SPEED percent, and memory within MEMORY; a row that is not says why.

Sources: llm-foundry's scripts/train/benchmarking/README.md (FlashAttention, fused norms), torchtitan's
benchmarks/llama3_h100_202412_torchtitan.md and docs/performance.md (every second product recomputed: here
the nearest that fits), fms-fsdp's README and issue 89, nanoGPT's issues 110 and 182, modded-nanogpt's
README (llm.c), litgpt's tutorials/resource-tables.md (LoRA of rank 8 on queries and values).
"""

from __future__ import annotations

import csv
import dataclasses
import random
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from isobatch.benchmarks.quality import published
from isobatch.engine.machine.hardware import parse_hardware
from isobatch.engine.planning import calibration
from isobatch.engine.planning.memory_model import FRAGMENTATION, ExecutionChoices, memory_footprint
from isobatch.models.causal_lm.model_sizes import whole_size
from isobatch.models.flops import intermediate_width

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isobatch.benchmarks.report import Row
    from isobatch.models.base import ModelSize

SEED, SPEED, MEMORY = 0, 15, 10
MPT_VOCABULARY = 50368
with Path(__file__).with_name("published_gpus.csv").open(newline="") as _table:
    ROWS = list(csv.DictReader(_table))
SPEEDS = [line for line in ROWS if line["unit"] == "tokens/s"]
FITTED = random.Random(SEED).sample(SPEEDS, len(SPEEDS) // 2)
CONSTANTS = ("PUBLISHED", "HOPPER")


def measure(quick: bool) -> list[Row]:
    """A row of each line; then the constants, as fitted and as they are."""
    return [*map(compared, ROWS), *([] if quick else map(fitted, CONSTANTS))]


def compared(line: Mapping[str, str]) -> Row:
    limit, used = (SPEED if line in SPEEDS else MEMORY), "fitted" if line in FITTED else "held out"
    what, figure = f"{line['what']}, {line['machine']}", float(line["published"])
    found, reason = ours(line), line["reason"]
    if line["flags"] == "qlora":
        with_inputs = found + frozen_inputs(line)
        reason += f": with it {100 * (with_inputs / figure - 1):+.0f} %"
    rest = line["unit"], figure, found, limit, reason
    return {"used": used, **published.row(line["source"], what, *rest)}


def ours(line: Mapping[str, str]) -> float:
    """Tokens a second and card, or GB that torch allocated."""
    size, machine = model(line), parse_hardware(line["machine"])
    batch, rows, length = (int(line[name]) for name in ("batch", "rows", "length"))
    layout: dict[str, Any] = {"processes": machine.devices, "strategy": line["strategy"]}
    layout["copies"] = machine.nodes if line["strategy"] == "hsdp" else 1
    layout["activation_checkpointing"] = line["checkpointing"]
    if line["unit"] == "GB":
        choices = ExecutionChoices(device="cuda", precision="bf16", **layout)
        found = memory_footprint(published.RECIPE, size, choices, rows * length, length)
        return (found.peak - found.workspace) / 1e9
    compiled = line["flags"] == "compile"
    step = published.seconds(size, line["machine"], batch, rows, length, compile=compiled, **layout)
    return batch * length / step / machine.devices


def frozen_inputs(line: Mapping[str, str]) -> float:
    """GB of what bitsandbytes 0.41 (`MatMul4Bit`) kept beside the planner's activations: of a layer the
    outputs of both norms and the gated product, in 16 bits. Attention keeps its own output, adapters what
    they read.
    """
    size, tokens = model(line), int(line["rows"]) * int(line["length"])
    kept = 2.0 * (2 * size.hidden + intermediate_width(size))
    return FRAGMENTATION["cuda"] * tokens * (size.layers + 1) * kept / 1e9


def model(line: Mapping[str, str]) -> ModelSize:
    """Its size. Where it was not compiled, it made whole logits."""
    name, flag = line["model"], line["flags"]
    if "/" in name:
        size = published.shape(name)
    else:
        hidden, layers, heads = map(int, name.split("x"))
        parameters = 12 * layers * hidden**2 + MPT_VOCABULARY * hidden
        size = whole_size(parameters, layers=layers, hidden=hidden, heads=heads, vocabulary=MPT_VOCABULARY)
    if "lora" in flag:
        size = published.adapted(size, 4 if flag == "qlora" else 16, targets="qv")
    return size if flag == "compile" else dataclasses.replace(size, head_bytes=0)


def fitted(name: str) -> Row:
    """The share of the peak at which the median of its cards in FITTED is as published, and the planner's."""
    before = getattr(calibration, name)
    rows = [line for line in FITTED if ("h100" in line["machine"]) == (name == "HOPPER")]
    low, high = 0.3, 1.0
    try:
        for _ in range(10):
            middle = (low + high) / 2
            setattr(calibration, name, dataclasses.replace(before, matmul_share=middle))
            fast = median(ours(line) / float(line["published"]) for line in rows) > 1
            low, high = (low, middle) if fast else (middle, high)
    finally:
        setattr(calibration, name, before)
    return {"constant": name, "fitted": round(low, 3), "ours": before.matmul_share}
