"""Parts 2 and 5: the planner's constants here; memory over 24 recipes and where it ends."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from isobatch.benchmarks.gpu import suite
from isobatch.benchmarks.gpu.runner import COMMAND_LINE, GPU, Part, Trial
from isobatch.engine.planning.calibration import PUBLISHED
from isobatch.engine.planning.cost_model import moved_bytes
from isobatch.engine.planning.memory_model import ExecutionChoices
from isobatch.models.flops import flops_per_token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from isobatch.benchmarks.report import Row

QUANTISED = (*COMMAND_LINE, "peft", "bitsandbytes")
WIDTHS: tuple[str, ...] = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
WIDTHS += ("intermediate_size", "vocab_size")


def _config(kind: str, *widths: int, **more: Any) -> dict[str, Any]:
    sizes = dict(zip(WIDTHS, widths, strict=False))
    return {"model_type": kind, **sizes, "max_position_embeddings": 2048, **more}


GPT2, LLAMA, QWEN = "gpt2-124m", "llama-1b", "qwen2-500m"
SHAPES = {
    LLAMA: _config("llama", 2048, 16, 32, 8, 5632, 32000),
    QWEN: _config("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True),
}
VOCABULARY = {GPT2: 50257, LLAMA: 32000, QWEN: 151936, "tiny": 512}
EAGER, COMPILED = f"{GPT2}, 32 rows", f"{GPT2}, 32 rows, --compile on"
LAUNCH = "launches, compile "
LAYERS, PIECES = 12, 16
"""Layers of GPT-2 124M, and micro-batches of a step in the trials of launches."""
ROWS, LENGTH = 32, 1024
CEILINGS = "rates of a large product and copy"
SAVING = "--activation-checkpointing on"
RECIPES: tuple[tuple[str, int, str], ...] = (
    *((GPT2, rows, more) for more in ("", "--compile on", SAVING) for rows in (8, 32)),
    *((GPT2, rows, "--precision fp32") for rows in (8, 16)),
    *((GPT2, 8, f"--optimizer {name}") for name in ("sgd", "adafactor", "adamw8bit", "paged-adamw8bit")),
    *((LLAMA, rows, "") for rows in (4, 8)),
    (LLAMA, 8, SAVING),
    (LLAMA, 4, "--optimizer adamw8bit"),
    (LLAMA, 8, "--adapter lora"),
    (LLAMA, 8, f"--adapter lora {SAVING}"),
    (LLAMA, 8, "--adapter qlora"),
    (LLAMA, 8, "--adapter lora --load-bits 8"),
    (QWEN, 4, ""),
    (QWEN, 8, "--adapter lora"),
    ("classifier", 64, ""),
    ("sequence-vae", 64, ""),
)
"""(model or task of its own, rows of a micro-batch, further flags); pairs differ in the rows alone."""


def constants(quick: bool) -> Sequence[Trial]:
    if quick:
        return [Trial(label("tiny", 4, ""), "gpu.calibration:measure", ("tiny", "4", ""), 60)]
    return [
        Trial(CEILINGS, "gpu.calibration:ceilings", (), 60, (GPU,)),
        *(
            Trial(LAUNCH + mode, "gpu.calibration:launches", (mode,), 120, (*COMMAND_LINE, GPU))
            for mode in ("off", "on")
        ),
        *(recipe for recipe in _recipes() if recipe.name in (EAGER, COMPILED)),
    ]


def memory(quick: bool) -> Sequence[Trial]:
    if quick:
        return seven_billion(quick)
    oom = Trial("out of memory", "gpu.suite:run", (suite.MEMORY,), 120, suite.NEEDS)
    others = [recipe for recipe in _recipes() if recipe.name not in (EAGER, COMPILED)]
    return [*seven_billion(quick), oom, *others]


def seven_billion(quick: bool) -> Sequence[Trial]:
    if quick:
        return [Trial("QLoRA, tiny", "gpu.calibration:tune", ("quick", "qlora", "16", ""), 60, QUANTISED)]
    place = "gpu.calibration:tune"
    return [
        Trial("QLoRA in 12 GB", place, ("whole", "qlora", "16", "12GB"), 240, (*QUANTISED, GPU)),
        Trial("QLoRA in 12 GB, 1 row", place, ("whole", "qlora", "1", "12GB"), 150, (*QUANTISED, GPU)),
        Trial("LoRA in 24 GB", place, ("whole", "lora", "16", "24GB"), 150, (*COMMAND_LINE, "peft", GPU)),
    ]


def tune(size: str, adapter: str, batch: str, limit: str) -> Row:
    """Train an adapter on blocks of 512 tokens. Raises RuntimeError where more than `limit` was reserved."""
    from isobatch.benchmarks.gpu import runs

    small = size == "quick"
    base = runs.model_folder("llama", _config("llama", *((64, 2, 2, 2, 128, 512) if small else ())))
    words = ["--model", str(base), "--adapter", adapter, "--batch-size", batch, "--lr", "1e-4"]
    words += ["--steps", "14", "--max-length", "64" if small else "512"]
    words += ["--memory-limit", limit] if limit else []
    vocabulary = 512 if small else 32000
    run = runs.train_on_tokens(f"{adapter}-{batch}", *words, vocabulary=vocabulary, rows=256)
    found = {**runs.speed(run), **runs.memory(run), "start s": (run.summary() or {})["startup_seconds"]}
    most = float(limit.removesuffix("GB")) * 2**30 / 1e9 if limit else float("inf")
    if found["reserved GB"] > most:
        raise RuntimeError(f"{found['reserved GB']} GB were reserved under a limit of {most:.1f} GB: {found}")
    return found


def _recipes() -> Sequence[Trial]:
    return [
        Trial(label(*r), "gpu.calibration:measure", (r[0], str(r[1]), r[2]), 90, needs(r[2])) for r in RECIPES
    ]


def label(model: str, rows: int, more: str) -> str:
    return f"{model}, {rows} rows" + (f", {more}" if more else "")


def needs(more: str) -> tuple[str, ...]:
    """What a recipe with these flags needs."""
    quantised = any(word in more for word in ("8bit", "qlora", "load-bits"))
    libraries = [*(["bitsandbytes"] if quantised else []), *(["peft"] if "adapter" in more else [])]
    return (*COMMAND_LINE, *libraries, GPU)


def headline(rows: Sequence[Row]) -> str:
    ratios = sorted(row["predicted/reserved"] for row in rows if "predicted/reserved" in row)
    return f"predicted/reserved {ratios[0]} to {ratios[-1]}, median {median(ratios):.2f}" if ratios else ""


CONSTANTS = Part("the planner's constants", constants, headline, 120)
MEMORY = Part("memory: 7B in 12 GB, out of it, over 24 recipes", memory, headline, 390)


def measure(model: str, rows: str, more: str) -> Row:
    """Memory and speed of a few steps of one micro-batch each."""
    from isobatch.benchmarks.gpu import runs

    name = label(model, int(rows), more).replace(" ", "-").replace(",", "")
    words = ["--batch-size", rows, "--micro-batch", rows, "--steps", "14", *more.split()]
    if model in ("classifier", "sequence-vae"):
        return _figures(runs.train(name, "--task", model, *words))
    words += ["--model", model if model in (GPT2, "tiny") else str(runs.model_folder(model, SHAPES[model]))]
    words += ["--max-length", "64" if model == "tiny" else "1024", "--lr", "1e-4"]
    words += ["--precision", "bf16"] if model != "tiny" and "--precision" not in more else []
    words += ["--compile", "off"] if "--compile" not in more else []
    return _figures(runs.train_on_tokens(name, *words, vocabulary=VOCABULARY[model], rows=int(rows) * 14))


def _figures(run: Any) -> Row:
    from isobatch.benchmarks.gpu import runs

    return {**runs.memory(run), **runs.speed(run)}


def launches(compiled: str) -> Row:
    """Seconds of a micro-batch of one row of 64 tokens: launching kernels takes nearly all of them."""
    from isobatch.benchmarks.gpu import runs

    words = ["--model", GPT2, "--max-length", "64", "--batch-size", str(PIECES), "--micro-batch", "1"]
    words += ["--steps", "30", "--precision", "bf16", "--compile", compiled]
    run = runs.train_on_tokens(f"launches-{compiled}", *words, vocabulary=50257, rows=PIECES * 30)
    seconds = median(row["step_seconds"] for row in runs.step_rows(run)[runs.WARM :]) / PIECES
    predicted = run.plan.predicted_step_seconds / PIECES
    return {"micro-batch ms": round(seconds * 1e3, 3), "predicted ms": round(predicted * 1e3, 3)}


def calibration(rows: Sequence[Row], peak: float, bandwidth: float) -> dict[str, float]:
    """Fields of the planner's `GpuConstants` on this card, from rows of parts 2 and 5; others are absent.

    `peak`: dense bf16 FLOP/s, `bandwidth`: bytes/s, both of the GPU table. What a step of GPT-2 124M takes
    beyond its matrix products, at the rate that large products reach, and its launches is memory traffic.
    `activations`, which is no constant: measured over predicted bytes that a micro-batch adds, from recipes
    that differ in its rows alone.
    """
    done = {row["trial"]: row for row in rows if row["outcome"] == "done"}
    found: dict[str, float] = {}
    if row := done.get(CEILINGS):
        found["matmul_share"] = round(row["matmul TFLOP/s"] * 1e12 / peak, 3)
    launched = [done.get(LAUNCH + mode, {}).get("micro-batch ms") for mode in ("off", "on")]
    if launched[0]:
        factor = launched[0] / 1e3 / (PUBLISHED.launch_seconds + LAYERS * PUBLISHED.layer_launch_seconds)
        found["launch_seconds"] = round(PUBLISHED.launch_seconds * factor, 7)
        found["layer_launch_seconds"] = round(PUBLISHED.layer_launch_seconds * factor, 7)
        if launched[1]:
            found["compiled_launch"] = round(launched[1] / launched[0], 3)
    for name, trial in (("traffic", EAGER), ("compiled_traffic", COMPILED)):
        if (row := done.get(trial)) and "matmul_share" in found and "launch_seconds" in found:
            found[name] = _traffic(row["tokens/s"], found, peak, bandwidth, name == "compiled_traffic")
    if factors := _activation_factors(done):
        found["activations"] = round(median(factors), 3)
    return found


def _traffic(
    tokens_per_second: float, known: Mapping[str, float], peak: float, bandwidth: float, compiled: bool
) -> float:
    """How often each byte that the backward pass needs is moved, in steps of one micro-batch of 32 rows."""
    from isobatch.models.causal_lm import model_sizes

    size = model_sizes.size_from_config(model_sizes.PRESETS[GPT2].config(VOCABULARY[GPT2], LENGTH))
    assert size is not None
    launches = known["launch_seconds"] + LAYERS * known["layer_launch_seconds"]
    launches *= known.get("compiled_launch", 1.0) if compiled else 1.0
    per_step = launches + (12.0 + 28.0) * size.trainable / bandwidth  # gradients are added, weights updated
    token = 1 / tokens_per_second - per_step / (ROWS * LENGTH)
    products = flops_per_token(size, LENGTH) / (peak * known["matmul_share"])
    choices = ExecutionChoices(device="cuda", precision="bf16")
    none, once = (moved_bytes(size, choices, LENGTH, moves) for moves in (0.0, 1.0))
    return round(max(0.0, (token - products) * bandwidth - none) / (once - none), 2)


def ceilings() -> Row:
    """Rates of a large bf16 product of random numbers and of a large copy: the means of 20."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(1 << 30, device="cuda")
    product, copy = _mean_seconds(lambda: a @ b), _mean_seconds(x.clone)
    return {
        "matmul TFLOP/s": round(2 * 8192**3 / product / 1e12, 1),
        "copy GB/s": round(2 * x.nbytes / copy / 1e9),
    }


def _mean_seconds(work: Callable[[], object]) -> float:
    from torch.utils.benchmark import Timer

    return float(Timer("work()", globals={"work": work}).timeit(20).mean)  # it waits for the GPU


def _activation_factors(done: dict[str, Row]) -> list[float]:
    pairs: dict[tuple[str, str], list[Row]] = {}
    for model, rows, more in RECIPES:
        if row := done.get(label(model, rows, more)):
            pairs.setdefault((model, more), []).append(row)
    return [
        (large["reserved GB"] - small["reserved GB"]) / (large["predicted GB"] - small["predicted GB"])
        for small, large in (pair for pair in pairs.values() if len(pair) == 2)
        if large["predicted GB"] > small["predicted GB"]
    ]
