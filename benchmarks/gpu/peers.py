"""The others of part 4: a bare PyTorch loop in the manner of nanoGPT, transformers' Trainer, and TRL's.

GPT-2's shape, flash attention by scaled_dot_product_attention, bf16 autocast, fused AdamW, and a vocabulary
padded to a multiple of 64 in the bare loop (Karpathy, nanoGPT, train.py and model.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isobatch.benchmarks.gpu import runs
from isobatch.benchmarks.gpu.scratch import RATE, SIZES, Size
from isobatch.benchmarks.peers import ON_GPU, StepClock, bare_loop, trainer_loop
from isobatch.core.package import ROOT
from isobatch.engine.loading.sampler import Sampler
from isobatch.models.causal_lm import model_sizes
from isobatch.models.flops import flops_per_token

if TYPE_CHECKING:
    from isobatch.benchmarks.report import Row

DEVICE = torch.device("cuda" if ON_GPU else "cpu")


class Block(nn.Module):
    """A layer of GPT-2 without dropout. Letters: B rows, T tokens, H heads, D width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before_attention(x_BTD)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.projection(mixed)
        return x_BTD + self.down(F.gelu(self.up(self.before_mlp(x_BTD)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2 with a tied head; returns the mean loss of the next tokens."""

    def __init__(self, preset: model_sizes.Preset, vocabulary: int, length: int) -> None:
        super().__init__()
        width = preset["n_embd"]
        self.tokens = nn.Embedding(-(-vocabulary // 64) * 64, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, preset["n_head"]) for _ in range(preset["n_layer"])))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        states_BTD = self.norm(self.blocks(self.tokens(tokens_BT) + self.positions(places)))
        logits = F.linear(states_BTD[:, :-1], self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())


def blocks_in_order(size: Size) -> Tensor:
    """(steps, batch, length): the tokens that a run of this size trains on, in its order."""
    os.environ["BENCHMARK_VOCABULARY"] = str(size.vocabulary)
    from isobatch.benchmarks.speed.random_tokens import columns_of

    rows = size.batch * size.steps
    tokens: Any = columns_of(np.full(rows, size.length, np.int64))["tokens"]
    table = torch.from_numpy(np.asarray(tokens.values).astype(np.int64)).view(rows, size.length)
    order = Sampler(rows, size.batch, 0)
    return torch.stack([table[torch.from_numpy(order.batch(step))] for step in range(size.steps)])


def bare(name: str, micro: str, compiled: str) -> Row:
    """The loop of nanoGPT: micro-batches of `micro` rows, one clip, one fused AdamW."""
    size = SIZES[name]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model: Any = Gpt(model_sizes.PRESETS[size.model], size.vocabulary, size.length).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=True)
    run = torch.compile(model) if compiled == "on" else model
    clock, pieces = StepClock(runs.WARM, size.steps), size.batch // int(micro)
    blocks = blocks_in_order(size)
    host = blocks.pin_memory() if ON_GPU else blocks

    def loss_of(tokens: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU):
            return run(tokens) / pieces

    steps = (tokens.to(DEVICE, non_blocking=True).chunk(pieces) for tokens in host)
    losses = bare_loop(model, optimizer, steps, loss_of, clock)
    return figures(clock, size, int(micro), losses)


def trainer(name: str, micro: str, compiled: str, packing: str = "") -> Row:
    """Trainer on transformers' GPT-2, with fused AdamW and bf16; with `packing` TRL's SFTTrainer, which packs
    the same tokens, cut at the lengths of instructions, into rows again.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    size = SIZES[name]
    config = model_sizes.PRESETS[size.model].config(size.vocabulary, size.length)
    torch.manual_seed(0)
    asked: Any = AutoConfig.for_model(**config, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = AutoModelForCausalLM.from_config(asked)
    rows = blocks_in_order(size).flatten(0, 1)
    settings = {
        "output_dir": str(runs.shared_folder() / "trainer"),
        "per_device_train_batch_size": int(micro),
        "gradient_accumulation_steps": size.batch // int(micro),
        "max_steps": size.steps,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "optim": "adamw_torch_fused",
        "bf16": ON_GPU,
        "torch_compile": compiled == "on",
    }
    clock = StepClock(runs.WARM, size.steps)
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    more: dict[str, Any] = {"order": range(len(rows))}
    if packing:
        import trl
        from datasets import Dataset

        from isobatch.benchmarks.speed.random_tokens import lengths_of

        ends = torch.from_numpy(lengths_of(rows.numel() // 110, 110, size.length)).cumsum(0)
        parts = rows.flatten().tensor_split(ends[ends < rows.numel()])
        data = Dataset.from_dict({"input_ids": [part.tolist() for part in parts]})
        settings |= {"packing": True, "max_length": size.length}
        words = AutoTokenizer.from_pretrained(ROOT / "tests/fixtures/hub/models--tests--decoder/snapshots/0")
        more = {"kinds": (trl.SFTTrainer, trl.SFTConfig), "processing_class": words}
    losses = trainer_loop(model, data, clock, settings, **more)
    return figures(clock, size, int(micro), losses)


def figures(clock: StepClock, size: Size, micro: int, losses: list[float]) -> Row:
    """tokens/s and MFU of the steps after the first, as of our own runs."""
    seconds = clock.ends[size.steps] - clock.ends[runs.WARM]
    speed = (size.steps - runs.WARM) * size.batch * size.length / seconds
    shape = model_sizes.size_from_config(model_sizes.PRESETS[size.model].config(size.vocabulary, size.length))
    assert shape is not None
    peak = runs.dense_peak("bf16")
    return {
        "rows": micro,
        "tokens/s": round(speed),
        "MFU": round(speed * flops_per_token(shape, size.length) / peak, 3) if peak else "-",
        "reserved GB": round(torch.cuda.max_memory_reserved() / 1e9, 2) if ON_GPU else "-",
        "loss": round(losses[-1], 3),
        **runs.energy(speed, clock.watts[runs.WARM :]),
    }
