"""Shapes of well-known models, so that `plan --assume-length` needs their name alone: no files, no network.

Each is an excerpt of the config.json on the model's page of the Hugging Face Hub.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from isobatch.core import hub_cache
from isobatch.core.errors import UserError
from isobatch.models import hub

Config = dict[str, Any]


def _gpt2(hidden: int, layers: int, heads: int) -> Config:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, **sizes}


def _decoder(kind: str, sizes: tuple[int, ...], **more: Any) -> Config:
    """`sizes`: hidden, intermediate, layers, heads."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {"model_type": kind, **dict(zip(names, sizes, strict=True)), **more}


def _llama(vocabulary: int, context: int, *sizes: int, kv: int | None = None, **more: Any) -> Config:
    """`sizes`: hidden, intermediate, layers, heads; `kv`: heads of keys and values, where they are fewer."""
    common = {"vocab_size": vocabulary, "max_position_embeddings": context}
    return _decoder("llama", sizes, num_key_value_heads=kv or sizes[-1], **common, **more)


def _mistral(vocabulary: int, window: int | None) -> Config:
    common = {"max_position_embeddings": 32768, "sliding_window": window}
    return _decoder("mistral", (4096, 14336, 32, 32), num_key_value_heads=8, vocab_size=vocabulary, **common)


def _qwen2(vocabulary: int, *sizes: int, kv: int, tied: bool = False) -> Config:
    common = {"max_position_embeddings": 32768, "tie_word_embeddings": tied, "use_sliding_window": False}
    return _decoder("qwen2", sizes, num_key_value_heads=kv, vocab_size=vocabulary, **common)


def _qwen3(*sizes: int, tied: bool = False) -> Config:
    common = {"max_position_embeddings": 40960, "tie_word_embeddings": tied, "head_dim": 128}
    return _decoder("qwen3", sizes, num_key_value_heads=8, vocab_size=151936, **common)


def _gemma2(*sizes: int, kv: int, head_dim: int) -> Config:
    common = {"vocab_size": 256000, "max_position_embeddings": 8192, "head_dim": head_dim}
    return _decoder("gemma2", sizes, num_key_value_heads=kv, **common)


def _pythia(hidden: int, layers: int, heads: int, vocabulary: int = 50304) -> Config:
    common = {"vocab_size": vocabulary, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    return _decoder("gpt_neox", (hidden, 4 * hidden, layers, heads), **common)


def _opt(hidden: int, layers: int, heads: int) -> Config:
    common = {"vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": hidden}
    return _decoder("opt", (hidden, 4 * hidden, layers, heads), ffn_dim=4 * hidden, **common)


def _bloom(hidden: int, layers: int, heads: int) -> Config:
    sizes = {"hidden_size": hidden, "n_layer": layers, "n_head": heads}
    return {"model_type": "bloom", "vocab_size": 250880, **sizes}


def _phi(hidden: int, layers: int) -> Config:
    common = {"vocab_size": 51200, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    return _decoder("phi", (hidden, 4 * hidden, layers, 32), **common)


LLAMA_2, LLAMA_3, LLAMA_31 = (32000, 4096), (128256, 8192), (128256, 131072)
"""(vocabulary, context)."""
KNOWN_MODELS: dict[str, Config] = {
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "distilbert/distilgpt2": _gpt2(768, 6, 12),
    "meta-llama/Llama-2-7b-hf": _llama(*LLAMA_2, 4096, 11008, 32, 32),
    "meta-llama/Llama-2-13b-hf": _llama(*LLAMA_2, 5120, 13824, 40, 40),
    "meta-llama/Llama-2-70b-hf": _llama(*LLAMA_2, 8192, 28672, 80, 64, kv=8),
    "meta-llama/Meta-Llama-3-8B": _llama(*LLAMA_3, 4096, 14336, 32, 32, kv=8),
    "meta-llama/Meta-Llama-3-70B": _llama(*LLAMA_3, 8192, 28672, 80, 64, kv=8),
    "meta-llama/Llama-3.1-8B": _llama(*LLAMA_31, 4096, 14336, 32, 32, kv=8),
    "meta-llama/Llama-3.1-70B": _llama(*LLAMA_31, 8192, 28672, 80, 64, kv=8),
    "meta-llama/Llama-3.1-405B": _llama(*LLAMA_31, 16384, 53248, 126, 128, kv=8),
    "meta-llama/Llama-3.2-1B": _llama(*LLAMA_31, 2048, 8192, 16, 32, kv=8, tie_word_embeddings=True),
    "meta-llama/Llama-3.2-3B": _llama(*LLAMA_31, 3072, 8192, 28, 24, kv=8, tie_word_embeddings=True),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama(32000, 2048, 2048, 5632, 22, 32, kv=4),
    "HuggingFaceTB/SmolLM2-135M": _llama(49152, 8192, 576, 1536, 30, 9, kv=3, tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM2-360M": _llama(49152, 8192, 960, 2560, 32, 15, kv=5, tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM2-1.7B": _llama(49152, 8192, 2048, 8192, 24, 32, tie_word_embeddings=True),
    "mistralai/Mistral-7B-v0.1": _mistral(32000, 4096),
    "mistralai/Mistral-7B-v0.3": _mistral(32768, None),
    "Qwen/Qwen2-0.5B": _qwen2(151936, 896, 4864, 24, 14, kv=2, tied=True),
    "Qwen/Qwen2-1.5B": _qwen2(151936, 1536, 8960, 28, 12, kv=2, tied=True),
    "Qwen/Qwen2-7B": _qwen2(152064, 3584, 18944, 28, 28, kv=4),
    "Qwen/Qwen2-72B": _qwen2(152064, 8192, 29568, 80, 64, kv=8),
    "Qwen/Qwen2.5-0.5B": _qwen2(151936, 896, 4864, 24, 14, kv=2, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen2(151936, 1536, 8960, 28, 12, kv=2, tied=True),
    "Qwen/Qwen2.5-3B": _qwen2(151936, 2048, 11008, 36, 16, kv=2, tied=True),
    "Qwen/Qwen2.5-7B": _qwen2(152064, 3584, 18944, 28, 28, kv=4),
    "Qwen/Qwen2.5-14B": _qwen2(152064, 5120, 13824, 48, 40, kv=8),
    "Qwen/Qwen2.5-32B": _qwen2(152064, 5120, 27648, 64, 40, kv=8),
    "Qwen/Qwen2.5-72B": _qwen2(152064, 8192, 29568, 80, 64, kv=8),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "google/gemma-2-2b": _gemma2(2304, 9216, 26, 8, kv=4, head_dim=256),
    "google/gemma-2-9b": _gemma2(3584, 14336, 42, 16, kv=8, head_dim=256),
    "google/gemma-2-27b": _gemma2(4608, 36864, 46, 32, kv=16, head_dim=128),
    "microsoft/phi-1_5": _phi(2048, 24),
    "microsoft/phi-2": _phi(2560, 32),
    "EleutherAI/pythia-70m": _pythia(512, 6, 8),
    "EleutherAI/pythia-160m": _pythia(768, 12, 12),
    "EleutherAI/pythia-410m": _pythia(1024, 24, 16),
    "EleutherAI/pythia-1b": _pythia(2048, 16, 8),
    "EleutherAI/pythia-1.4b": _pythia(2048, 24, 16),
    "EleutherAI/pythia-2.8b": _pythia(2560, 32, 32),
    "EleutherAI/pythia-6.9b": _pythia(4096, 32, 32, 50432),
    "EleutherAI/pythia-12b": _pythia(5120, 36, 40, 50688),
    "facebook/opt-125m": _opt(768, 12, 12),
    "facebook/opt-1.3b": _opt(2048, 24, 32),
    "facebook/opt-2.7b": _opt(2560, 32, 32),
    "facebook/opt-6.7b": _opt(4096, 32, 32),
    "bigscience/bloom-560m": _bloom(1024, 24, 16),
    "bigscience/bloom-1b7": _bloom(2048, 24, 16),
    "bigscience/bloom-3b": _bloom(2560, 30, 32),
    "bigscience/bloom-7b1": _bloom(4096, 30, 32),
    "tiiuae/falcon-7b": {
        **{"model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32},
        **{"num_attention_heads": 71, "multi_query": True, "parallel_attn": True, "bias": False},
    },
}
"""Hub id -> the numbers of its config.json."""


def find(name: str) -> str | None:
    """The hub id in the table that a name means: itself, or its part after the slash, in any case."""
    return next((known for known in KNOWN_MODELS if name.lower() in _spellings(known)), None)


def _spellings(hub_id: str) -> tuple[str, ...]:
    whole = hub_id.lower()
    short = whole.partition("/")[2]
    return whole, short, short.removesuffix("-hf"), short.removeprefix("meta-")


def load_config(name: str, revision: str | None) -> Config:
    """A model's config from its folder or the cache, of which config.json is enough; or from this table; or
    from the hub. Raises UserError.
    """
    folder = Path(hub.local_path_or_id(name, revision))
    if folder.is_dir():
        hub.check_folder(folder, tokenizer="not needed")
        return hub.load_config(name, revision)
    if known := find(name):
        return dict(KNOWN_MODELS[known])
    if hub.is_id(name) and hub_cache.is_reachable():
        return hub.load_config(name, revision)
    spellings = {spelling: known for known in KNOWN_MODELS for spelling in _spellings(known)}
    close = difflib.get_close_matches(name.lower(), spellings, n=3, cutoff=0.5)
    near = list(dict.fromkeys(spellings[spelling] for spelling in close))
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise UserError(
        f"--model {name}: is no preset, no folder and none of the {len(KNOWN_MODELS)} models whose shape is"
        f" known{hint}; a folder with its config.json is enough"
    )


def transformers_config(name: str, revision: str | None, remote_code: bool) -> Any:
    """transformers' config object of the same."""
    from transformers import AutoConfig

    path = Path(hub.local_path_or_id(name, revision))
    if path.is_dir():
        return AutoConfig.from_pretrained(str(path), **hub.remote_code_kwargs(remote_code))
    return AutoConfig.for_model(**load_config(name, revision))
