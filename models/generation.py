"""Text from a causal language model: one token at a time, with a cache, the same on every call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import decoders
from models.base import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn


def generate(folder: Path, prompt: str, *, tokens: int = 60, temperature: float = 0.8, seed: int = 0) -> str:
    """The prompt and what the model in `folder` (such as a run's final/) writes after it.

    temperature 0 always takes the likeliest token. Errors: ModelError where the folder holds no model.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no trained model (config.json): has the run finished?")
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return continuation(model, tokenizer, prompt, tokens, temperature, seed)


def continuation(
    model: nn.Module, tokenizer: Any, prompt: str, tokens: int, temperature: float, seed: int
) -> str:
    """The prompt with up to `tokens` new tokens; fewer at an end token or at the model's context."""
    import torch

    config: Any = model.config
    longest = decoders.context(config.to_dict()) or 1 << 30
    device = next(model.parameters()).device
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [config.eos_token_id or 0]
    ids = ids[-max(1, longest // 2) :]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            row = torch.tensor([ids], device=device)
            written = _write(model, row, min(tokens, longest - len(ids)), temperature, seed)
    finally:
        model.train(was_training)
    return prompt + tokenizer.decode(ids + written)[len(tokenizer.decode(ids)) :]


def _write(model: nn.Module, row: Tensor, tokens: int, temperature: float, seed: int) -> list[int]:
    import torch

    # A generator of its own on the CPU: training's random state stays as it is, and any device draws alike.
    generator = torch.Generator().manual_seed(seed)
    ends = model.config.eos_token_id  # type: ignore[union-attr]
    stops = set(ends if isinstance(ends, list) else [ends])
    written: list[int] = []
    cache = None
    for _ in range(tokens):
        output = model(input_ids=row, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        token = _draw(output.logits[0, -1].float().cpu(), temperature, generator)
        if token in stops:
            break
        written.append(token)
        row = row.new_tensor([[token]])
    return written


def _draw(logits_V: Tensor, temperature: float, generator: Any) -> int:
    import torch

    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))
