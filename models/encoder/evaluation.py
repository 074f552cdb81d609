"""Evaluation of a finished classifier by any runtime: its predictions.

Letters: B samples of a batch, T tokens, C classes, n samples of a split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import explain_errors
from isobatch.core.extras import need
from isobatch.models.encoder.class_metrics import Predictions

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.models.base import Batch

SCALED_BY_CALL = (b"DynamicQuantizeLinear", b"DynamicQuantizeMatMul")
"""ONNX operations that round activations, the second where onnxruntime has fused it."""
Runner = Callable[[dict[str, np.ndarray]], np.ndarray]
"""input_ids, attention_mask and for pairs token_type_ids, all (B, T) int64 -> logits (B, C)."""


def open_runner(path: Path | str, threads: int = 0) -> Runner:
    """Load a model: an ONNX file by onnxruntime, a folder by torch. 0 `threads` lets them choose."""
    if Path(path).suffix == ".onnx" and Path(path).is_file():
        return onnx_runner(Path(path), threads)
    import torch

    from isobatch.models.encoder import encoders

    torch.set_num_threads(threads or torch.get_num_threads())
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
    that are given, by default those that the file has. Each text alone and without padding where the file
    `scales_by_call`. Raises UserError as `onnx_session` does.
    """
    alone, session = scales_by_call(file), onnx_session(file, threads)
    given = names or [i.name for i in session.get_inputs()]

    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        return session.run(None, named_inputs(given, inputs))[0]

    def run_each(inputs: dict[str, np.ndarray]) -> np.ndarray:
        lengths, width = inputs["attention_mask"].sum(1), inputs["attention_mask"].shape[1]
        rows = [{k: v[[n], :length] for k, v in inputs.items()} for n, length in enumerate(lengths)]
        found = [run(row)[0] for row in rows]
        return np.stack([x if x.ndim == 1 else np.pad(x, ((0, width - len(x)), (0, 0))) for x in found])

    return run_each if alone else run


def scales_by_call(file: Path) -> bool:
    """Whether an ONNX file rounds activations by a scale of all that is given in a call, padding too.

    Then a text's answer would depend on what else is there. Read from the file's bytes: 34 is the mark of a
    node's operation in a protobuf, and its length follows.
    """
    graph = file.read_bytes()
    return any(bytes([34, len(name)]) + name in graph for name in SCALED_BY_CALL)


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
    info = Path("/proc/cpuinfo")  # where there is none, or it has VNNI, to read weights as unsigned is slower
    if info.is_file() and "vnni" not in info.read_text():  # else sums of two products saturate
        options.add_session_config_entry("session.x64quantprecision", "1")
    # The library's exceptions have no base of their own.
    with explain_errors(f"{file} cannot be opened by onnxruntime", Exception):
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def has_text_pairs(facts: Facts) -> bool:
    """Whether the samples of prepared data are pairs of texts."""
    return (Path(facts.folder) / "train" / "types-values.npy").is_file()


def example_texts(facts: Facts) -> str:
    """What a line of code gives the model of this data, as Python."""
    return '"a first text", "a second text"' if has_text_pairs(facts) else '"some text"'
