"""Text from a causal language model: one token at a time, with a cache, the same on every call."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.models import hub
from isobatch.models.causal_lm import adapters, model_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are not yet a character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn; temperature 0 takes the likeliest."""

    tokens: int = 60
    """Most to write."""
    temperature: float = 0.8
    top_k: int = 0
    """Only among so many of the likeliest; 0 for all."""
    top_p: float = 1.0
    """Only among the likeliest that have this probability together (Holtzman et al. 2020, nucleus)."""
    seed: int = 0
    end: int | None = None
    """A token that ends the text, beside the model's own."""


def opened(folder: Path, bits: int = 16, remote_code: bool = False) -> tuple[nn.Module, Any]:
    """The model, or the adapter on its base, and the tokenizer of a folder such as a run's final/.

    Errors: UserError where the folder holds neither.
    """
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if (folder / adapters.CONFIG_FILE).is_file():
        model = adapters.opened(folder, bits, remote_code)
    elif (folder / "config.json").is_file():
        model = AutoModelForCausalLM.from_pretrained(folder, **hub.remote_code_kwargs(remote_code))
    else:
        raise UserError(f"{folder} holds no trained model (config.json): has the run finished?")
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def continuation(model: nn.Module, tokenizer: Any, prompt: str, how: Sampling) -> str:
    """The prompt with new tokens behind it; fewer than asked for at an end token or the model's context."""
    return prompt + "".join(pieces(model, tokenizer, prompt, how))


Prompt = str | Sequence[tuple[str, bool]]
"""A text, or (text, whether it is an answer) in order: an answer is closed by the sampling's end token."""


def pieces(model: nn.Module, tokenizer: Any, prompt: Prompt, how: Sampling) -> Iterator[str]:
    """What comes after the prompt, as it is written: whole characters only."""
    config: Any = model.config
    longest = model_sizes.context(config.to_dict()) or 1 << 30
    ids = _encoded(tokenizer, prompt, how.end) or [_first(config.eos_token_id)]
    kept = max(1, longest // 2)
    if len(ids) > kept:
        logging.getLogger(__name__).warning(
            "the prompt has %s tokens; the first %s are left out: the model reads %s, half for its answer",
            *(f"{n:,}" for n in (len(ids), len(ids) - kept, longest)),
        )
    ids = ids[-kept:]
    before, written = tokenizer.decode(ids), []
    for token in _tokens(model, ids, min(how.tokens, longest - len(ids)), how):
        written.append(token)
        text = tokenizer.decode(ids + written)
        if len(text) > len(before) and not text.endswith(UNFINISHED):
            yield text[len(before) :]
            before = text


def _encoded(tokenizer: Any, prompt: Prompt, end: int | None) -> list[int]:
    """Each part by itself, as conversations are tokenized for training."""
    ids: list[int] = []
    for text, answer in [(prompt, False)] if isinstance(prompt, str) else prompt:
        ids += tokenizer.encode(text, add_special_tokens=False).ids
        ids += [end] if answer and end is not None else []
    return ids


def _first(ids: int | Sequence[int] | None) -> int:
    return (ids if isinstance(ids, int) else next(iter(ids or ()), 0)) or 0


def _tokens(model: nn.Module, ids: list[int], most: int, how: Sampling) -> Iterator[int]:
    """New tokens until an end token. The model is as it was whenever the caller gets one."""
    import torch

    # A generator of its own on the CPU: training's random state stays as it is, and any device draws alike.
    generator = torch.Generator().manual_seed(how.seed)
    ends = model.config.eos_token_id  # type: ignore[union-attr]
    stops = {how.end, *(ends if isinstance(ends, list) else [ends])}
    row = torch.tensor([ids], device=next(model.parameters()).device)
    cache = None
    for _ in range(most):
        logits, cache = _next(model, row, cache)
        token = _draw(logits, how, generator)
        if token in stops:
            return
        yield token
        row = row.new_tensor([[token]])


def _next(model: nn.Module, row: Tensor, cache: Any) -> tuple[Tensor, Any]:
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output = model(input_ids=row, past_key_values=cache, use_cache=True)
    finally:
        model.train(was_training)
    return output.logits[0, -1].float().cpu(), output.past_key_values


def _draw(logits_V: Tensor, how: Sampling, generator: Any) -> int:
    import torch

    if how.temperature == 0:
        return int(logits_V.argmax())
    chances, tokens = (logits_V / how.temperature).softmax(-1).sort(descending=True, stable=True)
    if how.top_k:
        chances = chances[: how.top_k]
    before = chances.cumsum(0) - chances
    chances = chances[before < how.top_p]  # the likeliest is always among them
    return int(tokens[torch.multinomial(chances, 1, generator=generator)])
