"""Of part 5, seven billion: QLoRA and LoRA of Llama 7B's shape, with random weights, under a memory limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.benchmarks.gpu.runner import COMMAND_LINE, GPU, Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.benchmarks.report import Row

QUANTISED = (*COMMAND_LINE, "peft", "bitsandbytes")
LLAMA: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 2048}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 128, "vocab_size": 512}


def trials(quick: bool) -> Sequence[Trial]:
    if quick:
        return [Trial("QLoRA, tiny", "gpu.seven_billion:tune", ("quick", "qlora", "16", ""), 60, QUANTISED)]
    place = "gpu.seven_billion:tune"
    return [
        Trial("QLoRA in 12 GB", place, ("whole", "qlora", "16", "12GB"), 240, (*QUANTISED, GPU)),
        Trial("QLoRA in 12 GB, 1 row", place, ("whole", "qlora", "1", "12GB"), 150, (*QUANTISED, GPU)),
        Trial("LoRA in 24 GB", place, ("whole", "lora", "16", "24GB"), 150, (*COMMAND_LINE, "peft", GPU)),
    ]


def tune(size: str, adapter: str, batch: str, limit: str) -> Row:
    """Train an adapter on blocks of 512 tokens. Raises RuntimeError where more than `limit` was reserved."""
    from isobatch.benchmarks.gpu import runs

    small = size == "quick"
    base = runs.model_folder("llama", {**LLAMA, **(SMALL if small else {})})
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
