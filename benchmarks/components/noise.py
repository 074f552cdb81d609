"""Cost of keyed dropout against torch's own, alone and in a training step: `python -m benchmarks noise`.

The arms of a comparison take turns step by step in one process. `share` is the part of a step's time that
drawing masks and keys takes: what the step would save if random bits cost nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from isobatch.benchmarks.sessions import stopwatch
from isobatch.engine.noise import keyed_attention, keyed_noise
from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise, apply_mask, keep_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from isobatch.benchmarks.report import Row

PROBABILITY = 0.1
ARMS = {"no dropout": (0.0, None), "native": (PROBABILITY, False), "keyed": (PROBABILITY, True)}
"""Name -> (residual and embedding dropout, whether it is keyed)."""
DRAWING = ((keyed_noise, "keep_mask"), (keyed_attention, "dropout_mask"), (KeyedNoise, "bind"))
"""The hash, the masks and the keys."""


def measure(quick: bool) -> list[Row]:
    """The operation, then whole steps without and with attention dropout."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [*_operation(device, quick)]
    for inside in (0.0, PROBABILITY):
        rows += _steps(device, quick, inside)
    return rows


def _operation(device: torch.device, quick: bool) -> Iterator[Row]:
    """Forward and backward of one dropout over (32, 128, 256) activations, a million of them."""
    x = torch.randn(32, 128, 256, device=device, requires_grad=True)
    keys = torch.randint(-(2**31), 2**31 - 1, (32, 2), dtype=torch.int32, device=device)
    count = x[0].numel()
    arms: dict[str, Callable[[], Any]] = {
        "native dropout": lambda: functional.dropout(x, PROBABILITY).sum().backward(),
        "keyed dropout": lambda: (
            apply_mask(x, keep_mask(keys, count, PROBABILITY), PROBABILITY).sum().backward()
        ),
        "native mask alone": lambda: torch.empty_like(x).bernoulli_(1 - PROBABILITY),
        "keyed mask alone": lambda: keep_mask(keys, count, PROBABILITY),
    }
    taken = _take_turns(arms, 5 if quick else 60, device)
    for name, seconds in taken.items():
        reference = taken["native mask alone" if "mask" in name else "native dropout"]
        yield {
            "operation": name,
            "device": device.type,
            "ms": round(1e3 * float(np.median(seconds)), 3),
            "to native": round(float(np.median(seconds) / np.median(reference)), 3),
        }


def _steps(device: torch.device, quick: bool, inside: float) -> Iterator[Row]:
    """Steps of a GPT-2 of 4 layers, 256 wide (12 layers, 768 wide on a GPU)."""
    rows = 16 if device.type == "cpu" else 64
    arms = {
        name: _Arm(device, rows, outside, inside if outside else 0.0, keyed)
        for name, (outside, keyed) in ARMS.items()
    }
    taken = _take_turns({name: arm.step for name, arm in arms.items()}, 4 if quick else 40, device)
    native = np.array(taken["native"])
    for name, seconds in taken.items():
        yield {
            "step with": name,
            "inside attention": inside if name != "no dropout" else 0.0,
            "device": device.type,
            "ms": round(1e3 * float(np.median(seconds)), 2),
            # Steps next to each other ran under the same load, so the median of differences varies less.
            "cost over native": round(float(np.median(np.array(seconds) - native) / np.median(native)), 4),
            "share": round(arms[name].share(seconds), 4),
        }


class _Arm:
    """A model with one kind of dropout."""

    def __init__(
        self, device: torch.device, rows: int, outside: float, inside: float, keyed: bool | None
    ) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes: dict[str, Any] = {"n_embd": 256, "n_layer": 4, "n_head": 4} if device.type == "cpu" else {}
        chances: dict[str, Any] = {"resid_pdrop": outside, "embd_pdrop": outside, "attn_pdrop": inside}
        ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(vocab_size=2048, n_positions=128, **sizes, **chances, **ends)
        self.model = GPT2LMHeadModel(config).train().to(device)
        self.noise = KeyedNoise(0) if keyed else None
        if self.noise is not None:
            key_dropout(self.model, self.noise)
        self.samples = np.arange(rows)
        self.tokens = torch.randint(0, 2048, (rows, 128), device=device)
        self.number, self.drawing = 0, 0.0
        self.device = device

    def step(self) -> None:
        with stopwatch(*DRAWING) as spent:
            if self.noise is not None:
                self.noise.bind(self.number, self.samples, self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                logits = self.model(input_ids=self.tokens, use_cache=False).logits
            functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten()).backward()
        self.drawing += spent[0]
        self.model.zero_grad()
        self.number += 1

    def share(self, seconds: list[float]) -> float:
        """Part of a step spent drawing; NaN on a GPU, where the clock would only time kernel launches."""
        if self.device.type == "cuda":
            return float("nan")
        return self.drawing / self.number / float(np.mean(seconds))


def _take_turns(
    arms: dict[str, Callable[[], Any]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of every arm in every round, after two warm-up rounds."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 2):
        for name, run in arms.items():
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number >= 2:
                taken[name].append(time.perf_counter() - began)
    return taken
