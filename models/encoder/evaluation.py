"""Evaluation of a finished classifier: predictions, latency, and statistics to compare two classifiers.

Letters: B samples of a batch, T tokens, C classes, n samples of a split.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isobatch.models.encoder.class_metrics import mcnemar

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.models.base import Batch

Runner = Callable[[dict[str, np.ndarray]], np.ndarray]
"""input_ids, attention_mask and for pairs token_type_ids, all (B, T) int64 -> logits (B, C)."""
LATENCY_TOKENS = 32
"""Tokens of the text whose latency is measured."""
TIMING_SECONDS, MIN_TIMED_RUNS, WARM_UP_RUNS = 1.0, 20, 5


@dataclass(frozen=True, slots=True)
class Predictions:
    """A classifier's logits for all samples of a split, in order, beside their labels."""

    logits: np.ndarray
    """(n, C)"""
    labels: np.ndarray
    """(n,) class numbers"""

    @property
    def predicted_labels(self) -> np.ndarray:
        """(n,) class with the largest logit."""
        predicted: np.ndarray = self.logits.argmax(1)
        return predicted

    @property
    def is_correct(self) -> np.ndarray:
        """(n,) bool."""
        correct: np.ndarray = self.predicted_labels == self.labels
        return correct

    @property
    def probabilities(self) -> np.ndarray:
        """(n, C)"""
        powers = np.exp(self.logits - self.logits.max(1, keepdims=True), dtype=np.float64)
        shares: np.ndarray = powers / powers.sum(1, keepdims=True)
        return shares


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """One way to run a finished model: torch, or onnxruntime on one of its ONNX files."""

    name: str
    runtime: Literal["torch", "onnx"]
    model_path: Path
    """What is opened: a folder, or an ONNX file."""
    file: Path
    """The file that a program which runs it must ship."""
    final: Path
    """The run's final/, whose number of parameters it has."""

    def open(self) -> Runner:
        """Load it."""
        if self.runtime == "onnx":
            return onnx_runner(self.model_path)
        from isobatch.models.encoder import encoders

        return torch_runner(encoders.open_classifier(str(self.model_path)))

    def size_metrics(self) -> dict[str, int]:
        """parameters, file_bytes, and macs: multiply-adds of a text of LATENCY_TOKENS tokens."""
        from isobatch.models.encoder import encoders

        model = encoders.open_classifier(str(self.final))
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "macs": encoders.count_macs(model, LATENCY_TOKENS),
            "file_bytes": self.file.stat().st_size,
        }


def model_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """A runner's inputs, from a batch of the prepared data."""
    tokens = np.asarray(batch["tokens"], np.int64)
    inside = np.arange(tokens.shape[1]) < np.asarray(batch["length"])[:, None]
    inputs = {"input_ids": tokens, "attention_mask": inside.astype(np.int64)}
    return inputs | ({"token_type_ids": np.asarray(batch["types"], np.int64)} if "types" in batch else {})


def predict(run: Runner, batches: Iterable[Batch]) -> Predictions:
    """Run a classifier over all batches."""
    found = [(run(model_inputs(batch)), np.asarray(batch["label"])) for batch in batches]
    logits, labels = zip(*found, strict=True)
    return Predictions(np.concatenate(logits), np.concatenate(labels))


def worst_errors(
    found: Predictions, batches: Iterable[Batch], tokenizer: Any, names: Sequence[str], count: int = 10
) -> list[dict[str, Any]]:
    """The wrong answers to whose labels the classifier gave the smallest probability, the worst first.

    Each with its `text`, as far as the tokens tell (`tokenizer` is of the tokenizers library), its `label`,
    the `answer`, both by name, and `probability`, the label's.
    """
    given = found.probabilities[np.arange(len(found.labels)), found.labels]
    wrong = np.flatnonzero(~found.is_correct)
    chosen = wrong[np.argsort(given[wrong], kind="stable")][:count]
    tokens = _tokens_of(chosen, batches)
    return [
        {
            "text": tokenizer.decode(tokens[sample]),
            "label": names[found.labels[sample]],
            "answer": names[found.predicted_labels[sample]],
            "probability": round(float(given[sample]), 4),
        }
        for sample in chosen.tolist()
    ]


def _tokens_of(samples: np.ndarray, batches: Iterable[Batch]) -> dict[int, list[int]]:
    """Sample -> its token ids without padding; `batches` hold all samples in order."""
    found: dict[int, list[int]] = {}
    start = 0
    for batch in batches:
        stop = start + len(batch["label"])
        for sample in samples[(samples >= start) & (samples < stop)].tolist():
            row = sample - start
            found[sample] = np.asarray(batch["tokens"])[row, : int(batch["length"][row])].tolist()
        start = stop
    return found


def torch_runner(model: nn.Module) -> Runner:
    """Run a transformers classifier where it lies."""
    import torch

    eval_model = model.eval()
    device = next(eval_model.parameters()).device
    has_types = getattr(eval_model.config, "type_vocab_size", 0) > 1

    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        used = {k: v for k, v in inputs.items() if k != "token_type_ids" or has_types}
        tensors = {k: torch.from_numpy(v).to(device) for k, v in used.items()}
        with torch.inference_mode():
            logits: np.ndarray = eval_model(**tensors).logits.float().cpu().numpy()
        return logits

    return run


def onnx_runner(file: Path, threads: int = 0) -> Runner:
    """Run an ONNX file with onnxruntime on the CPU; 0 `threads` lets onnxruntime choose."""
    session = onnx_session(file, threads)
    names = [i.name for i in session.get_inputs()]

    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        found: np.ndarray = session.run(None, named_inputs(names, inputs))[0]
        return found

    return run


def named_inputs(names: Iterable[str], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Exactly these inputs; those that a batch lacks, the types of a single text, are 0."""
    return {name: inputs.get(name, np.zeros_like(inputs["input_ids"])) for name in names}


def onnx_session(file: Path, threads: int = 0, optimized: Path | None = None) -> Any:
    """An onnxruntime session on the CPU; `optimized`: where to save the graph after fusion."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes with one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def example_inputs(rows: int, vocabulary: int, tokens: int = LATENCY_TOKENS) -> dict[str, np.ndarray]:
    """Inputs of `rows` texts of equal length; a forward's time does not depend on the token ids."""
    ids = np.arange(rows * tokens, dtype=np.int64).reshape(rows, tokens) * 7919 % vocabulary
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def time_runs_ms(
    run: Runner,
    inputs: dict[str, np.ndarray],
    seconds: float = TIMING_SECONDS,
    least: int = MIN_TIMED_RUNS,
    warm_up: int = WARM_UP_RUNS,
) -> np.ndarray:
    """Time in ms of each of many runs on one thread, after some runs to warm up.

    It is this thread's own time, which does not pass while another program has the processor. `seconds`:
    least total time; `least`: least runs.
    """
    for _ in range(warm_up):
        run(inputs)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        began = time.thread_time()
        run(inputs)
        times.append((time.thread_time() - began) * 1e3)
    return np.array(times)


def latency_metrics(run: Runner, facts: Facts) -> dict[str, float]:
    """latency_ms_p50 and latency_ms_p95 of one text of LATENCY_TOKENS tokens on one thread."""
    with one_thread():
        times = time_runs_ms(run, example_inputs(1, facts.extra["vocabulary"]))
    return {f"latency_ms_p{p}": round(float(np.percentile(times, p)), 4) for p in (50, 95)}


def has_text_pairs(facts: Facts) -> bool:
    """Whether the samples of prepared data are pairs of texts."""
    return (Path(facts.folder) / "train" / "types-values.npy").is_file()


def max_logit_difference(one: Predictions, other: Predictions) -> float:
    """The largest absolute difference of two classifiers' logits."""
    return float(np.abs(one.logits - other.logits).max())


def compare_with_baseline(mine: Predictions, baseline: Predictions) -> dict[str, float]:
    """baseline_accuracy, and mcnemar_p: the p-value of the difference in accuracy."""
    return {
        "baseline_accuracy": float(baseline.is_correct.mean()),
        "mcnemar_p": mcnemar(mine.is_correct, baseline.is_correct),
    }
