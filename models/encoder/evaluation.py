"""A finished classifier from outside: its answers, how fast they come, and how two of them compare."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isobatch.models.base import Batch

if TYPE_CHECKING:
    from torch import nn

Runner = Callable[[dict[str, np.ndarray]], np.ndarray]
"""input_ids, attention_mask, and for pairs token_type_ids, all (B, T) int64 -> logits (B, C)."""
Z_95 = 1.959963984540054
TOKENS = 32
SECONDS, LEAST_RUNS, WARM_RUNS = 1.0, 20, 5


@dataclass(frozen=True, slots=True)
class Answers:
    """To every sample of a split, in order."""

    logits: np.ndarray
    """(n, C)"""
    labels: np.ndarray
    """(n,)"""

    @property
    def predicted(self) -> np.ndarray:
        found: np.ndarray = self.logits.argmax(1)
        return found

    @property
    def right(self) -> np.ndarray:
        found: np.ndarray = self.predicted == self.labels
        return found


@dataclass(frozen=True, slots=True)
class Form:
    """A way in which a finished model runs."""

    name: str
    kind: Literal["torch", "onnx"]
    place: Path
    """What is opened: a folder, or an ONNX file."""
    file: Path
    """What a user of it must ship."""
    final: Path
    """The run's final/, whose sizes it has."""

    def open(self) -> Runner:
        if self.kind == "onnx":
            return onnx_runner(self.place)
        from isobatch.models.encoder import encoders

        return torch_runner(encoders.open_classifier(str(self.place)))

    def figures(self) -> dict[str, int]:
        """parameters, macs of a text of TOKENS tokens, file_bytes."""
        from isobatch.models.encoder import encoders

        model = encoders.open_classifier(str(self.final))
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "macs": encoders.macs(model, TOKENS),
            "file_bytes": self.file.stat().st_size,
        }


def inputs(batch: Batch) -> dict[str, np.ndarray]:
    """What a runner reads, of a batch from the prepared data."""
    tokens = np.asarray(batch["tokens"], np.int64)
    inside = np.arange(tokens.shape[1]) < np.asarray(batch["length"])[:, None]
    given = {"input_ids": tokens, "attention_mask": inside.astype(np.int64)}
    return given | ({"token_type_ids": np.asarray(batch["types"], np.int64)} if "types" in batch else {})


def answers(run: Runner, batches: Iterable[Batch]) -> Answers:
    found = [(run(inputs(batch)), np.asarray(batch["label"])) for batch in batches]
    logits, labels = zip(*found, strict=True)
    return Answers(np.concatenate(logits), np.concatenate(labels))


def torch_runner(model: nn.Module) -> Runner:
    """A transformers classifier on the CPU."""
    import torch

    quiet = model.eval()
    knows_types = getattr(quiet.config, "type_vocab_size", 0) > 1

    def run(given: dict[str, np.ndarray]) -> np.ndarray:
        tensors = {k: torch.from_numpy(v) for k, v in given.items() if k != "token_type_ids" or knows_types}
        with torch.inference_mode():
            logits: np.ndarray = quiet(**tensors).logits.float().numpy()
        return logits

    return run


def onnx_runner(file: Path, threads: int = 0) -> Runner:
    """onnxruntime on the CPU."""
    session = onnx_session(file, threads)
    wanted = {i.name for i in session.get_inputs()}

    def run(given: dict[str, np.ndarray]) -> np.ndarray:
        (logits,) = session.run(None, {k: v for k, v in given.items() if k in wanted})
        found: np.ndarray = logits
        return found

    return run


def onnx_session(file: Path, threads: int = 0, optimized: Path | None = None) -> Any:
    """A session on the CPU; `optimized`: where to leave the graph that really runs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch computes with one thread inside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def example(rows: int, vocabulary: int, pairs: bool, tokens: int = TOKENS) -> dict[str, np.ndarray]:
    """Inputs of one length; how long a forward takes does not depend on which tokens they are."""
    ids = np.arange(rows * tokens, dtype=np.int64).reshape(rows, tokens) * 7919 % vocabulary
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return given | ({"token_type_ids": np.zeros_like(ids)} if pairs else {})


def milliseconds(run: Runner, given: dict[str, np.ndarray], seconds: float = SECONDS) -> np.ndarray:
    """Wall time of each of many runs, after some to warm up."""
    for _ in range(WARM_RUNS):
        run(given)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < LEAST_RUNS or time.perf_counter() < end:
        began = time.perf_counter()
        run(given)
        times.append((time.perf_counter() - began) * 1e3)
    return np.array(times)


def latency(run: Runner, facts: Any) -> dict[str, float]:
    """latency_ms_p50 and _p95 of one text of 32 tokens on one thread."""
    with one_thread():
        times = milliseconds(run, example(1, facts.extra["vocabulary"], is_of_pairs(facts)))
    return {f"latency_ms_p{p}": round(float(np.percentile(times, p)), 4) for p in (50, 95)}


def is_of_pairs(facts: Any) -> bool:
    return (Path(facts.folder) / "train" / "types-values.npy").is_file()


def furthest(one: Answers, other: Answers) -> float:
    """The largest difference of two logits."""
    return float(np.abs(one.logits - other.logits).max())


def compared(mine: Answers, baseline: Answers) -> dict[str, float]:
    """baseline_accuracy, and mcnemar_p of the difference."""
    return {
        "baseline_accuracy": float(baseline.right.mean()),
        "mcnemar_p": mcnemar(mine.right, baseline.right),
    }


def mcnemar(one: np.ndarray, other: np.ndarray) -> float:
    """Exact two-sided p of McNemar's test (1947): whether two classifiers err on different samples by chance.

    one, other: (n,) bool, right or not on the same samples.
    """
    only_one, only_other = int((one & ~other).sum()), int((~one & other).sum())
    count, fewer = only_one + only_other, min(only_one, only_other)
    tail = sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count
    return min(1.0, 2 * tail)


def interval(right: float, count: int) -> list[float]:
    """[low, high], Wilson's 95 % interval of a share."""
    share, square = right / count, Z_95**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = Z_95 / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    return [middle - half, middle + half]
