"""Evaluation of a finished classifier by any runtime: predictions, agreement, speed, memory.

Letters: B samples of a batch, T tokens, C classes, n samples of a split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.core.measures import peak_resident_bytes
from isobatch.models.encoder.class_metrics import Predictions

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.models.base import Batch

Runner = Callable[[dict[str, np.ndarray]], np.ndarray]
"""input_ids, attention_mask and for pairs token_type_ids, all (B, T) int64 -> logits (B, C)."""
Runtime = Literal["torch", "onnx"]
LATENCY_TOKENS = 32
"""Tokens of the text whose latency is measured."""
ALONE = 1.0, 20, 5
"""Of a model that is timed by itself: least seconds, least runs, and runs before them to warm up."""
BATCHES = (1, 16)
ROUNDS = 9
"""Odd. Models take turns: a round has each of them, so that what slows the machine down slows all."""
MIN_RUNS = 3
IN_TURN = 0.12, MIN_RUNS, 2
"""Of a round: the same as ALONE."""
Model = dict[str, Any]
"""runtime, model_path, vocabulary."""


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """One way to run a finished model: torch, or onnxruntime on one of its ONNX files."""

    name: str
    runtime: Runtime
    model_path: Path
    """What is opened: a folder, or an ONNX file."""
    file: Path
    """The file that a program which runs it must ship."""
    final: Path
    """The run's final/, whose number of parameters it has."""


def open_runner(runtime: Runtime, path: Path | str, threads: int = 0) -> Runner:
    """Load a model. `threads` of onnxruntime; 0 lets it choose."""
    if runtime == "onnx":
        return onnx_runner(Path(path), threads)
    from isobatch.models.encoder import encoders

    return torch_runner(encoders.open_classifier(str(path)))


def model_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """A runner's inputs, from a batch of the prepared data."""
    tokens = np.asarray(batch["tokens"], np.int64)
    inside = np.arange(tokens.shape[1]) < np.asarray(batch["length"])[:, None]
    inputs = {"input_ids": tokens, "attention_mask": inside.astype(np.int64)}
    return inputs | ({"token_type_ids": np.asarray(batch["types"], np.int64)} if "types" in batch else {})


def predict(run: Runner, batches: Iterable[Batch]) -> Predictions:
    """Run a classifier over all batches."""
    found = [Predictions.of(run(model_inputs(batch)), np.asarray(batch["label"])) for batch in batches]
    words = [one.words for one in found if one.words is not None]
    logits, labels = (np.concatenate([getattr(one, name) for one in found]) for name in ("logits", "labels"))
    return Predictions(logits, labels, np.concatenate(words) if words else None)


def torch_runner(model: nn.Module, states: bool = False) -> Runner:
    """Run a transformers classifier where it lies; with `states` (B, H) in place of the logits: the mean over
    a text's tokens of the states that the last layer reads, made as long as 1.
    """
    import torch

    device = next(model.eval().parameters()).device
    has_types = getattr(model.config, "type_vocab_size", 0) > 1

    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        used = {k: v for k, v in inputs.items() if k != "token_type_ids" or has_types}
        tensors = {k: torch.from_numpy(v).to(device) for k, v in used.items()}
        with torch.inference_mode():
            found = model(**tensors, output_hidden_states=states)
            if not states:
                return found.logits.float().cpu().numpy()
            inside = tensors["attention_mask"][..., None]
            mean = (found.hidden_states[-2].float() * inside).sum(1)  # it may write the first token's alone
            return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()

    return run


def onnx_runner(file: Path, threads: int = 0, names: Sequence[str] = ()) -> Runner:
    """Run an ONNX file with onnxruntime on the CPU; 0 `threads` lets onnxruntime choose. `names`: the inputs
    that are given, by default those that the file has. Raises UserError as `onnx_session` does.
    """
    session = onnx_session(file, threads)
    given = names or [i.name for i in session.get_inputs()]

    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        return session.run(None, named_inputs(given, inputs))[0]

    return run


def named_inputs(names: Iterable[str], inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Exactly these inputs; those that a batch lacks, the types of a single text, are 0."""
    return {name: inputs.get(name, np.zeros_like(inputs["input_ids"])) for name in names}


def onnx_session(file: Path, threads: int = 0) -> Any:
    """An onnxruntime session on the CPU.

    Raises UserError where onnxruntime is missing, or cannot read the file.
    """
    need("onnxruntime", f"{file}:")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the library's exceptions have no base of their own
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{file} cannot be opened by onnxruntime: {reason}") from None


def example_inputs(rows: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Inputs of `rows` texts of LATENCY_TOKENS; a forward's time does not depend on the token ids."""
    ids = np.arange(rows * LATENCY_TOKENS, dtype=np.int64).reshape(rows, -1) * 7919 % vocabulary
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def time_runs_ms(
    run: Runner, inputs: dict[str, np.ndarray], seconds: float, least: int, warm_up: int
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
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = time_runs_ms(run, example_inputs(1, facts.extra["vocabulary"]), *ALONE)
    finally:
        torch.set_num_threads(before)
    return {f"latency_ms_p{p}": round(float(np.percentile(times, p)), 4) for p in (50, 95)}


def measure_speed(models: list[Model]) -> list[dict[str, Any]]:
    """Per model and batch of 1 and 16 texts: quantiles of ms, and the median of each round; texts a second.

    In a process of its own, on one thread. The ms are the thread's own; texts a second those of the larger
    batch.
    """
    runners = [_open_alone(model) for model in models]
    found: list[dict[str, Any]] = [{"threads": 1, "tokens": LATENCY_TOKENS} for _ in models]
    for rows in BATCHES:
        inputs = [example_inputs(rows, model["vocabulary"]) for model in models]
        rounds = [
            [time_runs_ms(run, given, *IN_TURN) for run, given in zip(runners, inputs, strict=True)]
            for _ in range(ROUNDS)
        ]
        for one, times in zip(found, zip(*rounds, strict=True), strict=True):
            p50, p95 = np.percentile(np.concatenate(times), (50, 95)).round(4).tolist()
            medians = [round(float(np.median(part)), 4) for part in times]
            one[f"batch_{rows}"] = {"p50": p50, "p95": p95, "rounds": medians}
            one["samples_per_second"] = round(rows / p50 * 1e3, 2)
    return found


def peak_memory(model: Model) -> int:
    """Bytes that a process takes which opens this model alone and runs it. Call it in a new process."""
    run = _open_alone(model)
    for rows in BATCHES:
        for _ in range(MIN_RUNS):
            run(example_inputs(rows, model["vocabulary"]))
    return peak_resident_bytes()


def _open_alone(model: Model) -> Runner:
    if model["runtime"] == "torch":
        import torch

        torch.set_num_threads(1)
    return open_runner(model["runtime"], model["model_path"], threads=1)


def has_text_pairs(facts: Facts) -> bool:
    """Whether the samples of prepared data are pairs of texts."""
    return (Path(facts.folder) / "train" / "types-values.npy").is_file()


def example_texts(facts: Facts) -> str:
    """What a line of code gives the model of this data, as Python."""
    return '"a first text", "a second text"' if has_text_pairs(facts) else '"some text"'
