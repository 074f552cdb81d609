"""Speed of training a recommender on texts, and on ids alone against a DataLoader of rows.

python -m benchmarks recommender --data NCF_FOLDER

The encoder: a GPT-2 of 12 blocks with random weights (124 million parameters), texts of the data. `naive`
encodes the texts of every row, as a plain loop does; all ways must give the same loss and gradient.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from isobatch.benchmarks.peers import StepClock, bare_loop
from isobatch.benchmarks.sessions import make_builder, prepare_workload, train
from isobatch.models.recommendation.catalogue import Catalogue
from isobatch.models.recommendation.network import RecommenderNet
from isobatch.models.recommendation.text_encoder import TextEncoder, add_lora, load_text_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.benchmarks.report import Row

BLOCKS, TOP = 12, 4
DIM, NEGATIVES = 64, 4


def measure(quick: bool, data: str) -> list[Row]:
    batches = (64,) if quick else (2048, 4096)
    known, rows = prepared(data)
    found = [row for batch in batches for row in encoder_steps(known, rows, batch, 64 if quick else 768)]
    return [*found, *ids_alone(quick, data)]


def prepared(data: str) -> tuple[Catalogue, Any]:
    _, _, facts, source = prepare_workload("recommender", {"data": data})
    return Catalogue.read(facts.folder), source.open(Path(facts.folder), "train")


class Naive(RecommenderNet):
    """Users, items and the texts of every row by themselves, as a plain loop computes them."""

    def vectors(self, user: Any, item: Tensor, inputs: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return self._fused_vectors(user, item)

    def _lookup_text_vectors(self, texts: Tensor) -> Tensor:
        assert self.encoder is not None
        vectors: Tensor = self.encoder(texts.clamp_min(0))
        return vectors


def net(known: Catalogue, width: int) -> RecommenderNet:
    """A recommender with LoRA, whose second half is no longer zero, in the top blocks of a random GPT-2."""
    from transformers import GPT2Config

    torch.manual_seed(0)
    size = int(known.tokens.max()) + 1
    config = GPT2Config(
        n_embd=width, n_layer=BLOCKS, n_head=width // 64, vocab_size=size, bos_token_id=0, eos_token_id=0
    )
    encoder = TextEncoder(load_text_model(config, None, None), known)
    add_lora(encoder, TOP, 8, 16)
    for name, p in encoder.net.named_parameters():
        p.requires_grad_("lora_" in name)
        if "lora_B" in name:
            nn.init.normal_(p, std=0.02)
    return RecommenderNet(known, DIM, (), "dot", encoder).train()


def encoder_steps(known: Catalogue, rows: Any, batch: int, width: int) -> Iterator[Row]:
    """Seconds of a forward and backward of pairs against one negative each."""
    taken = np.random.default_rng(0).integers(len(rows), size=batch)
    user, item = (torch.from_numpy(rows.fetch(taken)[k]).long() for k in ("user", "item"))
    other = torch.from_numpy(np.random.default_rng(1).integers(len(known.item_text), size=batch))
    model = net(known, width)
    encoder = model.encoder
    assert encoder is not None
    seconds: dict[str, float] = {}
    learnt: dict[str, tuple[float, Tensor]] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in ("naive", "once a batch", "once a batch, known below the top 4"):
            model.__class__ = Naive if name == "naive" else RecommenderNet
            encoder.cache_prefix(BLOCKS - TOP if "below" in name else 0, Path(place))
            seconds[name], learnt[name] = _step(model, user, torch.stack([item, other], 1))
    loss, gradient = learnt["naive"]
    for name, took in seconds.items():
        yield {
            "step": name,
            "batch": batch,
            "seconds": round(took, 2),
            "over naive": round(seconds["naive"] / took, 2),
            "loss differs": f"{abs(learnt[name][0] / loss - 1):.1e}",
            "LoRA gradient differs": f"{float((learnt[name][1] - gradient).norm() / gradient.norm()):.1e}",
        }


def _step(model: RecommenderNet, user: Tensor, items: Tensor) -> tuple[float, tuple[float, Tensor]]:
    assert model.encoder is not None
    model.zero_grad()
    began = time.perf_counter()
    (scores,) = model(user, [items])
    loss = nn.functional.cross_entropy(scores, torch.zeros(len(user), dtype=torch.long))
    loss.backward()
    took = time.perf_counter() - began
    gradient = torch.cat([p.grad.flatten() for p in model.encoder.net.parameters() if p.grad is not None])
    return took, (float(loss.detach()), gradient)


def ids_alone(quick: bool, data: str) -> Iterator[Row]:
    """Positives a second, each with 4 negatives: this engine, and bare loops over a DataLoader of rows.

    All have the same model (NeuMF) and loss.
    """
    batch = 2048
    speeds = {
        f"isobatch, batch {batch}": _engine(data, batch, 6 if quick else 60),
        "DataLoader over rows, same batch": _rows_loop(data, batch, 4 if quick else 15),
        "DataLoader over rows, batch 51 as in NCF's code": _rows_loop(data, 51, 4 if quick else 400),
    }
    ours = next(iter(speeds.values()))
    for name, speed in speeds.items():
        yield {"training on ids": name, "pairs/s": round(speed), "isobatch is faster": round(ours / speed, 1)}


def _engine(data: str, batch: int, steps: int) -> float:
    values = {"data": data, "text": "off", "loss": "bce", "negatives": NEGATIVES, "dim": DIM, "head": "neumf"}
    with make_builder("recommender", {**values, "batch_size": batch, "steps": steps}) as builder:
        return batch / median(train(builder)[2:])


def _rows_loop(data: str, batch: int, steps: int) -> float:
    """Pairs a second of a bare loop over rows whose negatives were drawn before."""
    known, source = prepared(data)
    count = batch * (steps + 3)
    part = source.fetch(np.random.default_rng(0).permutation(len(source))[:count])
    negatives = np.random.default_rng(0).integers(len(known.item_text), size=(count, NEGATIVES))
    torch.manual_seed(0)
    model = Naive(known, DIM, (128, 64), "neumf", None)
    label = np.tile(np.array([1.0] + [0.0] * NEGATIVES, np.float32), count)
    items = np.column_stack([part["item"], negatives]).reshape(-1)
    columns = (np.repeat(part["user"], 1 + NEGATIVES), items, label)
    rows = TensorDataset(*map(torch.from_numpy, columns))

    def loss_of(columns: list[Tensor]) -> Tensor:
        users, others, labels = columns
        (scores,) = model(users.long(), [others.long()[:, None]])
        return nn.functional.binary_cross_entropy_with_logits(scores[:, 0], labels)

    optimizer, clock = torch.optim.Adam(model.parameters(), lr=1e-3), StepClock()
    loader = DataLoader(rows, batch * (1 + NEGATIVES), shuffle=True)
    bare_loop(model, optimizer, ([rows] for rows in loader), loss_of, clock)
    return batch / median(clock.seconds()[1:])
