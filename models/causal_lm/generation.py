"""Text generation by a causal language model: token by token with a KV cache, reproducible by its seed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.models import hub, lora
from isobatch.models.activations import fuse_gelu
from isobatch.models.causal_lm import adapters, model_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isobatch.core.facts import Facts

GREEDY_BELOW = 1e-5
"""A lower temperature takes the likeliest token: divided by it, logits would overflow."""
CHARACTERS_PER_TOKEN = 64
"""Of a prompt so many are read for each token that the model reads, from its end: a token has about 4."""
TOKENS_BEFORE = 64
"""So many tokens are decoded again before those that make the next characters."""
REPLACEMENT_CHARACTER = "\ufffd"
"""What a decoder writes for bytes that do not yet make a character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn; temperature 0 takes the likeliest."""

    max_new_tokens: int = 60
    """Most tokens to write."""
    temperature: float = 0.8
    top_k: int = 0
    """Draw among so many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that have this probability together (nucleus, Holtzman et al. 2020)."""
    seed: int = 0
    stop_token_id: int | None = None
    """A token that ends the text, beside the model's own end tokens."""


def open_for_generation(folder: Path, bits: int = 16, remote_code: bool = False) -> tuple[nn.Module, Any]:
    """The model (or the adapter on its base) and the tokenizer of a folder such as a run's final/.

    On a GPU where there is one. `bits` of the matrices, of an adapter those of its base: 16 is what is
    stored, on a GPU bf16; 8 and 4 round them. Raises UserError if the folder holds neither.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with hub.reading(folder):
        if (folder / lora.CONFIG_FILE).is_file():
            model = adapters.open_adapted_model(folder, bits, remote_code, device=device)
        elif (folder / "config.json").is_file():
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                use_safetensors=True,
                **adapters.quantized_loading(bits, device),
                **hub.remote_code_kwargs(remote_code),
            )
        else:
            raise UserError(f"{folder} holds no trained model (config.json): has the run finished?")
        if not (folder / "tokenizer.json").is_file():
            raise UserError(f"{folder} holds no tokenizer.json")
        if bits == 16 and device.type == "cuda":
            model = model.to(device, torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16)
        fuse_gelu()
        return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


Prompt = str | Sequence[tuple[str, bool]]
"""A text, or (text, whether it is an answer) in order: an answer ends with the sampling's stop token."""


class TextStream:
    """What the model writes after a prompt, as it is written: for each token a piece, of whole characters.

    A prompt longer than half the model's context is truncated from the left, with a warning.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, prompt: Prompt, sampling: Sampling) -> None:
        context = context_of(model)
        max_prompt = max(1, context // 2)
        ids = encode_prompt(tokenizer, prompt, sampling.stop_token_id, max_prompt * CHARACTERS_PER_TOKEN)
        ids = ids or [*end_ids(model.config), 0][:1]
        if len(ids) > max_prompt:
            logging.getLogger(__name__).warning(
                "the prompt has %s tokens; the first %s are left out: the model reads %s, half for its"
                " answer",
                *(f"{n:,}" for n in (len(ids), len(ids) - max_prompt, context)),
            )
        ids = ids[-max_prompt:]
        self.prompt_tokens = len(ids)
        """Tokens that the model reads of the prompt."""
        self.tokens = 0
        """Tokens written so far."""
        self._most = min(sampling.max_new_tokens, context - len(ids))
        self._pieces = self._decode(tokenizer, ids, generate_ids(model, ids, self._most, sampling))

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def is_full(self) -> bool:
        """Whether it ended for its length, and not at an end token."""
        return self.tokens >= self._most

    def _decode(self, tokenizer: Any, ids: list[int], tokens: Iterator[int]) -> Iterator[str]:
        before, open_ids = ids[-TOKENS_BEFORE:], []
        for token in tokens:
            self.tokens += 1
            open_ids.append(token)
            decoded, text = tokenizer.decode(before), tokenizer.decode(before + open_ids)
            piece = "" if text.endswith(REPLACEMENT_CHARACTER) else text[len(decoded) :]
            if piece:
                before, open_ids = (before + open_ids)[-TOKENS_BEFORE:], []
            yield piece


def context_of(model: Any) -> int:
    """The most tokens that the model reads and writes; very many where its config sets no limit."""
    return model_sizes.context_length(model.config.to_dict()) or 1 << 30


def end_ids(config: Any) -> list[int]:
    """The tokens that end a text of a model with this config."""
    found = config.eos_token_id
    return [found] if isinstance(found, int) else list(found or ())


def encode_prompt(tokenizer: Any, prompt: Prompt, stop_id: int | None, most: int) -> list[int]:
    """Token ids of the last `most` characters; each part is tokenized by itself, as in training."""
    parts = [(prompt, False)] if isinstance(prompt, str) else [part[:2] for part in prompt]
    ids: list[int] = []
    for text, is_answer in reversed(parts):
        # Unlike `encode` it lets other threads run.
        (encoding,) = tokenizer.encode_batch([text[-most:] if most > 0 else ""], add_special_tokens=False)
        end = [stop_id] if is_answer and stop_id is not None else []
        ids, most = encoding.ids + end + ids, most - len(text)
    return ids


def save_config(model: Any, facts: Facts, folder: Path) -> None:
    """Write generation_config.json; there and in config.json the token that was learnt to end an answer is
    the first of those that stop: any program that generates then stops where `chat` does.
    """
    template = facts.extra.get("template") or {}
    for config in (model.config, model.generation_config):
        ids = [i for i in dict.fromkeys([template.get("end_id"), *end_ids(config)]) if i is not None]
        config.eos_token_id = ids[0] if len(ids) == 1 else ids or None
        config.save_pretrained(folder)


def generate_ids(model: nn.Module, ids: list[int], max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
    """New token ids until a stop token, by a model in evaluation mode."""
    import torch

    # Its own generator on the CPU: training's random state stays as it is, and every device draws alike.
    generator = torch.Generator().manual_seed(sampling.seed)
    stop_ids = {sampling.stop_token_id, *end_ids(model.config)}
    input_ids = torch.tensor([ids], device=next(model.parameters()).device)
    cache = None
    for _ in range(max_new_tokens):
        with torch.no_grad():
            output = model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        token = _sample_id(output.logits[0, -1].float().cpu(), sampling, generator)
        if token in stop_ids:
            return
        yield token
        input_ids = input_ids.new_tensor([[token]])


def _sample_id(logits_V: Tensor, sampling: Sampling, generator: Any) -> int:
    """One token id from (V,) logits."""
    import torch

    if sampling.temperature < GREEDY_BELOW:
        return int(logits_V.argmax())
    probabilities, tokens = (logits_V / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    if sampling.top_k:
        probabilities = probabilities[: sampling.top_k]
    before = probabilities.cumsum(0) - probabilities  # of all likelier tokens
    probabilities = probabilities[before < sampling.top_p]  # keeps at least the likeliest
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
