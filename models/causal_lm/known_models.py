"""Shapes of well-known models, so that `plan --assume-length` needs their name alone: no files, no network.

Each is an excerpt of the config.json on the model's page of the Hugging Face Hub.
"""

from __future__ import annotations

import difflib
from functools import partial
from pathlib import Path
from typing import Any

from isobatch.core import hub_cache
from isobatch.core.errors import UserError
from isobatch.models import hub

Config = dict[str, Any]


def _gpt2(hidden: int, layers: int, heads: int) -> Config:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, **sizes}


def _decoder(kind: str, vocabulary: int, context: int, *sizes: int, **more: Any) -> Config:
    """`sizes`: hidden, intermediate, layers, heads and, where it has one, heads of keys and values."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    numbers = dict(zip((*names, "num_key_value_heads"), sizes, strict=False))
    common = {"vocab_size": vocabulary, "max_position_embeddings": context}
    return {"model_type": kind, **common, **numbers, **more}


_llama, _mistral = (partial(_decoder, kind) for kind in ("llama", "mistral"))
_qwen2 = partial(_decoder, "qwen2", use_sliding_window=False, tie_word_embeddings=False)
_qwen3 = partial(_decoder, "qwen3", 151936, 40960, head_dim=128, tie_word_embeddings=False)
_gemma2 = partial(_decoder, "gemma2", 256000, 8192)
_pythia = partial(_decoder, "gpt_neox", tie_word_embeddings=False)


LLAMA_2, LLAMA_3, LLAMA_31 = (32000, 4096), (128256, 8192), (128256, 131072)
"""(vocabulary, context)."""
KNOWN_MODELS: dict[str, Config] = {
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "distilbert/distilgpt2": _gpt2(768, 6, 12),
    "meta-llama/Llama-2-7b-hf": _llama(*LLAMA_2, 4096, 11008, 32, 32, 32),
    "meta-llama/Llama-2-13b-hf": _llama(*LLAMA_2, 5120, 13824, 40, 40, 40),
    "meta-llama/Llama-2-70b-hf": _llama(*LLAMA_2, 8192, 28672, 80, 64, 8),
    "meta-llama/Meta-Llama-3-8B": _llama(*LLAMA_3, 4096, 14336, 32, 32, 8),
    "meta-llama/Meta-Llama-3-70B": _llama(*LLAMA_3, 8192, 28672, 80, 64, 8),
    "meta-llama/Llama-3.1-8B": _llama(*LLAMA_31, 4096, 14336, 32, 32, 8),
    "meta-llama/Llama-3.1-70B": _llama(*LLAMA_31, 8192, 28672, 80, 64, 8),
    "meta-llama/Llama-3.1-405B": _llama(*LLAMA_31, 16384, 53248, 126, 128, 8),
    "meta-llama/Llama-3.2-1B": _llama(*LLAMA_31, 2048, 8192, 16, 32, 8, tie_word_embeddings=True),
    "meta-llama/Llama-3.2-3B": _llama(*LLAMA_31, 3072, 8192, 28, 24, 8, tie_word_embeddings=True),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama(32000, 2048, 2048, 5632, 22, 32, 4),
    "HuggingFaceTB/SmolLM2-135M": _llama(49152, 8192, 576, 1536, 30, 9, 3, tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM2-360M": _llama(49152, 8192, 960, 2560, 32, 15, 5, tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM2-1.7B": _llama(49152, 8192, 2048, 8192, 24, 32, 32, tie_word_embeddings=True),
    "mistralai/Mistral-7B-v0.1": _mistral(32000, 32768, 4096, 14336, 32, 32, 8, sliding_window=4096),
    "mistralai/Mistral-7B-v0.3": _mistral(32768, 32768, 4096, 14336, 32, 32, 8, sliding_window=None),
    "Qwen/Qwen2-0.5B": _qwen2(151936, 32768, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "Qwen/Qwen2-1.5B": _qwen2(151936, 32768, 1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    "Qwen/Qwen2-7B": _qwen2(152064, 32768, 3584, 18944, 28, 28, 4),
    "Qwen/Qwen2-72B": _qwen2(152064, 32768, 8192, 29568, 80, 64, 8),
    "Qwen/Qwen2.5-0.5B": _qwen2(151936, 32768, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "Qwen/Qwen2.5-1.5B": _qwen2(151936, 32768, 1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    "Qwen/Qwen2.5-3B": _qwen2(151936, 32768, 2048, 11008, 36, 16, 2, tie_word_embeddings=True),
    "Qwen/Qwen2.5-7B": _qwen2(152064, 32768, 3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-14B": _qwen2(152064, 32768, 5120, 13824, 48, 40, 8),
    "Qwen/Qwen2.5-32B": _qwen2(152064, 32768, 5120, 27648, 64, 40, 8),
    "Qwen/Qwen2.5-72B": _qwen2(152064, 32768, 8192, 29568, 80, 64, 8),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, 8),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8),
    "google/gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4, head_dim=256),
    "google/gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8, head_dim=256),
    "google/gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, head_dim=128),
    "EleutherAI/pythia-70m": _pythia(50304, 2048, 512, 2048, 6, 8),
    "EleutherAI/pythia-160m": _pythia(50304, 2048, 768, 3072, 12, 12),
    "EleutherAI/pythia-410m": _pythia(50304, 2048, 1024, 4096, 24, 16),
    "EleutherAI/pythia-1b": _pythia(50304, 2048, 2048, 8192, 16, 8),
    "EleutherAI/pythia-1.4b": _pythia(50304, 2048, 2048, 8192, 24, 16),
    "EleutherAI/pythia-2.8b": _pythia(50304, 2048, 2560, 10240, 32, 32),
    "EleutherAI/pythia-6.9b": _pythia(50432, 2048, 4096, 16384, 32, 32),
    "EleutherAI/pythia-12b": _pythia(50688, 2048, 5120, 20480, 36, 40),
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
