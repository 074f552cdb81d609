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

from isobatch.benchmarks import child_process
from isobatch.benchmarks.sessions import make_session, prepare_workload, train
from isobatch.engine.loading.sampler import Sampler
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
    return [*found, *memory(quick), *ids_alone(quick, data), *delivered(quick, data)]


def prepared(data: str) -> tuple[Catalogue, Any]:
    _, _, facts, source = prepare_workload("recommender", {"data": data})
    return Catalogue.read(facts.folder), source.open(Path(facts.folder), "train")


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
            model.deduplicate = name != "naive"
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
    gradient = torch.cat(
        [p.grad.flatten() for p in model.encoder.trainable_parameters() if p.grad is not None]
    )
    return took, (float(loss.detach()), gradient)


def memory(quick: bool) -> Iterator[Row]:
    """Peak memory that a step over a whole catalogue adds, each in a process of its own."""
    for texts in (400, 1600) if quick else (4_000, 16_000, 64_000):
        adds, vectors = child_process.call("speed.recommender:grown", str(texts), "64" if quick else "256")
        yield {"texts in a step": texts, "adds MB": adds, "their vectors MB": vectors}


def grown(*asked: str) -> list[float]:
    """MB that encoding so many texts, forward and backward, adds to what one chunk took; MB of vectors."""
    texts, width = map(int, asked)
    draw = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(draw.integers(6, 18, size=texts))])
    known = Catalogue(
        tokens=draw.integers(1000, size=offsets[-1]),
        offsets=offsets,
        user_text=np.zeros(1, np.int32),
        item_text=np.arange(texts, dtype=np.int32),
        counts=np.ones(texts, np.int64),
        seen=np.zeros(1, np.int64),
        had=np.zeros(1, np.int64),
    )
    encoder = net(known, width).encoder
    assert encoder is not None
    encoder(torch.arange(300)).square().sum().backward()  # allocates what one chunk takes
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = _memory("VmHWM")
    encoder(torch.arange(texts)).square().sum().backward()
    vectors = texts * width * 4 / 1e6
    return [round(_memory("VmHWM") - before, 1), round(vectors, 1)]


def _memory(what: str) -> float:
    """MB, as the kernel counts them."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(what))
    return int(line.split()[1]) / 1e3


def ids_alone(quick: bool, data: str) -> list[Row]:
    """Positives a second, each with 4 negatives: this engine, and loops over a DataLoader of rows.

    All have the same model (NeuMF) and loss.
    """
    batch, steps = 2048, 6 if quick else 60
    ours = _engine(data, batch, steps)
    rows = [
        {"training on ids": f"isobatch, batch {batch}", "pairs/s": round(ours), "isobatch is faster": 1.0}
    ]
    same, published = batch * (1 + NEGATIVES), 256
    for name, rows_a_step, python, workers in (
        ("DataLoader over rows, same batch, negatives given", same, False, 0),
        ("DataLoader over rows, same batch, negatives given, 2 workers", same, False, 2),
        ("NCF's loop: 256 rows, negatives drawn row by row", published, True, 0),
        ("NCF's loop: 256 rows, negatives drawn row by row, 2 workers", published, True, 2),
    ):
        enough = 4 if quick else 15 if rows_a_step == same else 400
        theirs = _rows_loop(data, rows_a_step, enough, workers, python)
        times = round(ours / theirs, 1)
        rows.append({"training on ids": name, "pairs/s": round(theirs), "isobatch is faster": times})
    return rows


def delivered(quick: bool, data: str) -> Iterator[Row]:
    """RatedPairs a second of sampler and fetch, without a model."""
    _, source = prepared(data)
    for batch in (2048, 16384):
        sampler = Sampler(len(source), batch, seed=0)
        steps = min(sampler.steps_per_epoch - 1, 5 if quick else 200)
        seconds = []
        for step in range(steps):
            began = time.perf_counter()
            source.fetch(sampler.batch(step))
            seconds.append(time.perf_counter() - began)
        yield {"rows delivered, batch": batch, "million rows/s": round(batch / median(seconds) / 1e6, 1)}


def _engine(data: str, batch: int, steps: int) -> float:
    values = {"data": data, "text": "off", "loss": "bce", "negatives": NEGATIVES, "dim": DIM, "head": "neumf"}
    taken: list[float] = []
    with make_session("recommender", {**values, "batch_size": batch, "steps": steps}) as session:
        train(session, lambda _, seconds: taken.append(seconds))
    return batch / median(taken[2:])


class RatedPairs(torch.utils.data.Dataset[tuple[int, int, float]]):
    """(user, item, label) one by one."""

    def __init__(self, user: np.ndarray, item: np.ndarray, negatives: np.ndarray) -> None:
        self.user = np.repeat(user, 1 + NEGATIVES)
        self.item = np.column_stack([item, negatives]).reshape(-1)
        self.label = np.tile([1.0] + [0.0] * NEGATIVES, len(user)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.user)

    def __getitem__(self, row: int) -> tuple[int, int, float]:
        return self.user[row], self.item[row], self.label[row]


def _drawn_one_by_one(user: np.ndarray, items: int, taken: set[tuple[int, int]]) -> np.ndarray:
    """Negatives drawn one at a time, as the published NCF code does once an epoch."""
    draw = np.random.RandomState(0)
    found = np.empty((len(user), NEGATIVES), np.int64)
    for row, who in enumerate(user.tolist()):
        for column in range(NEGATIVES):
            other = draw.randint(items)
            while (who, other) in taken:
                other = draw.randint(items)
            found[row, column] = other
    return found


def _rows_loop(data: str, rows_a_step: int, steps: int, workers: int, python: bool) -> float:
    known, source = prepared(data)
    items = len(known.item_text)
    count = rows_a_step * (steps + 3) // (1 + NEGATIVES)
    part = source.fetch(np.random.default_rng(0).permutation(len(source))[:count])
    user, item = part["user"], part["item"]
    drawing = 0.0
    if python:
        taken = {(int(key) // items, int(key) % items) for key in known.seen}
        began = time.perf_counter()
        negatives = _drawn_one_by_one(user, items, taken)
        drawing = (time.perf_counter() - began) / count
    else:
        negatives = np.random.default_rng(0).integers(items, size=(count, NEGATIVES))
    torch.manual_seed(0)
    model = RecommenderNet(known, DIM, (128, 64), "neumf", None)
    model.deduplicate = False
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(
        RatedPairs(user, item, negatives), rows_a_step, shuffle=True, num_workers=workers
    )
    seconds, began = [], time.perf_counter()
    for users, others, label in loader:
        (scores,) = model(users.long(), [others.long()[:, None]])
        loss = nn.functional.binary_cross_entropy_with_logits(scores[:, 0], label.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
    return 1 / (median(seconds[1:]) * (1 + NEGATIVES) / rows_a_step + drawing)
