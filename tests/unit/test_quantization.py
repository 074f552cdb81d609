"""Tests of quantization and ONNX export: rounding in training, in evaluation and in onnxruntime's kernels."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobatch.core.errors import ExportError
from isobatch.core.recipe import Recipe
from isobatch.engine.optimization.parameter_groups import make_optimizer
from isobatch.engine.registry import workload_of
from isobatch.models import saving
from isobatch.models.encoder import (
    class_metrics,
    encoders,
    evaluation,
    export,
    onnx_graph,
    quantization,
    weight_surgery,
)
from isobatch.models.encoder.last_layer import compute_first_alone
from isobatch.models.encoder.problems import Classes
from isobatch.tests.unit.encoders import FAMILIES, classifier, given, logits, some_masks


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch's compiler logs much."""
    caplog.set_level("WARNING", "torch")


def quantized(
    family: str = "bert",
    bits: int = 4,
    embedding_bits: int = 8,
    cut: bool = False,
    head: str = encoders.SEQUENCE,
    **more: Any,
) -> Any:
    """32 bits leave the model as it is; with `cut` one layer has no heads, one half of them, one all."""
    model = classifier(family, head, **more)
    compute_first_alone(model)  # as a saved one is opened
    if cut:
        weight_surgery.set_masks(encoders.layers(model), some_masks())
        weight_surgery.remove_masked(encoders.layers(model))
    if bits == 32:
        return model
    quantization.quantize_model(model, bits, embedding_bits)
    with torch.no_grad():
        quantization.calibrate(model, (logits(model) for _ in range(1)))
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_evaluation_round_alike(family: str) -> None:
    model = quantized(family)
    whole = logits(model)
    assert (logits(model.train()) - whole).abs().max() < 1e-3 * whole.abs().max()


def test_learned_step_sizes_get_the_gradient_of_torchs_own_kernel() -> None:
    torch.manual_seed(0)
    weight, direction = torch.randn(8, 32), torch.randn(8, 32)
    scale = torch.full((8,), 0.2)
    found = []
    for compute in (
        lambda w, s: quantization.FakeQuantizeWeight.apply(w, s, 7),
        lambda w, s: torch._fake_quantize_learnable_per_channel_affine(  # noqa: SLF001  torch has no public name
            w, s, torch.zeros(8), 0, -7, 7, 1 / (32 * 7) ** 0.5
        ),
    ):
        w, s = weight.clone().requires_grad_(), scale.clone().requires_grad_()
        out = compute(w, s)
        (out * direction).sum().backward()
        found.append((out.detach(), w.grad, s.grad))
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_step_of_adam_moves_a_range_as_far_as_a_weight(bits: int) -> None:
    recipe = Recipe(task="qat", lr=1e-3)
    task, _ = workload_of(recipe).make(recipe)
    model = quantized(bits=bits)
    task.begin_phase(model, "qat", lambda _: ())
    scales = {n: p for n, p in model.named_parameters() if n.endswith("scale")}
    before = {name: scale.clone() for name, scale in scales.items()}
    optimizer = make_optimizer(task, model, "cpu")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, scale in scales.items():
        levels = 255 if name.endswith(".scale") else 127 if "pooler" in name else 2 ** (bits - 1) - 1
        torch.testing.assert_close((before[name] - scale) * levels, torch.full_like(scale, 1e-3))


def test_weights_rounded_once_get_the_gradient_of_all_micro_batches() -> None:
    torch.manual_seed(0)
    layer = encoders.layers(quantized())[0].up.train()
    inputs, direction = torch.randn(3, 5, layer.in_features), torch.randn(3, 5, layer.out_features)

    def gradients() -> list[torch.Tensor]:
        for one, way in zip(inputs, direction, strict=True):
            layer(one).backward(way)
        return [layer.weight, layer.weight_scale]

    each = [p.grad.clone() for p in gradients()]
    layer.zero_grad()
    layer.hold()
    assert [p.grad for p in gradients()] == [None, None]
    layer.release(True)
    for found, wanted in zip([layer.weight.grad, layer.weight_scale.grad], each, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def saved(model: Any, facts: Any, folder: Path) -> Any:
    """The tokenizer of this model, as it lies beside an exported file."""
    from transformers import AutoTokenizer

    saving.save(model, facts, folder)
    return AutoTokenizer.from_pretrained(folder)


def batches() -> list[dict[str, torch.Tensor]]:
    """Several texts; one alone, without and with padding; pairs."""
    whole = batch_of(given())
    row, pairs = {k: v[:1] for k, v in whole.items()}, {k: v[:3] for k, v in whole.items()}
    padded = {**row, "tokens": torch.nn.functional.pad(row["tokens"], (0, 5))}
    types = (torch.arange(pairs["tokens"].shape[1]) > 7).long().expand_as(pairs["tokens"])
    return [whole, row, padded, {**pairs, "types": types}]


# Each is traced for seconds: each number of bits, and each way to write attention and embeddings, once: 32
# bits in test_an_onnx_file_takes_what_its_tokenizer_makes, ModernBERT in that of an answer to each token.
QUICK = {("bert", 4), ("distilbert", 8)}
CASES = [
    pytest.param(family, bits, marks=() if (family, bits) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for bits in (4, 8, 32)
]


@pytest.mark.parametrize(("family", "bits"), CASES)
def test_onnxruntime_computes_what_was_trained(
    family: str, bits: int, tmp_path: Path, tiny_facts: Any
) -> None:
    """Of layers without heads, with half of them, and with all."""
    model = quantized(family, bits, embedding_bits={"bert": 4, "distilbert": 32}.get(family, 8), cut=True)
    saving.save_tokenizer(model.config.to_dict(), tiny_facts, tmp_path)
    file = tmp_path / ("model.onnx" if bits == 32 else f"model-int{bits}.onnx")
    onnx_graph.classifier_program(model).save(file)
    if bits < 32:
        rounded = onnx_graph.write_with_levels(file, tmp_path / "levels.onnx")
        assert {model.get_submodule(name) for name in rounded} == {*quantization.quantizers(model)}
        found = export.check_quantized(model, file, batches)
        assert found["max_logit_difference"] < 1e-5
        assert found["rounding_doubt"] < 1e-3
    else:
        runners = evaluation.torch_runner(model), export.tokenizer_runner(file)
        trained, exported = (evaluation.predict(run, batches()) for run in runners)
        assert np.abs(trained.logits - exported.logits).max() < 1e-5


@pytest.mark.parametrize("family", ["roberta", "modernbert"])
def test_an_answer_to_each_token_is_rounded_and_exported(family: str, tmp_path: Path) -> None:
    """RoBERTa has no layer before the last one there, and ModernBERT has."""
    model = quantized(family, 8, cut=True, head=encoders.TOKENS)
    onnx_graph.classifier_program(model).save(file := tmp_path / "model-int8.onnx")
    assert evaluation.onnx_runner(file)(given()).shape == (*given()["input_ids"].shape, 2)
    batch = batch_of(given()) | {"label": torch.from_numpy(given()["attention_mask"] - 1) * 100}
    trained, excess = export.predict_with_onnx_levels(model, file, [batch])
    exported = evaluation.predict(evaluation.onnx_runner(file), [batch])
    assert np.abs(trained.logits - exported.logits).max() < 1e-5
    assert excess < 1e-3


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_an_onnx_file_takes_what_its_tokenizer_makes(family: str, tmp_path: Path, tiny_facts: Any) -> None:
    """Single texts and pairs, the latter with the types that this family has; nothing else is run."""
    model = quantized(family, 32, cut=True, **({"type_vocab_size": 1} if family == "roberta" else {}))
    (final := tmp_path / "final").mkdir()
    tokenizer = saved(model, tiny_facts, final)
    file = export.export_onnx(model, final, tmp_path)
    session = evaluation.onnx_session(file, threads=1)
    for texts in (["good", "bad good"],), (["good", "bad"], ["bad", "bad good"]):
        made = dict(tokenizer(*texts, padding=True, return_tensors="np"))
        assert ("token_type_ids" in made) == (family == "bert")
        (found,) = session.run(None, made)
        assert np.abs(found - logits(model, made).detach().numpy()).max() < 1e-5
    whole = export.tokenizer_runner(file)(given())
    assert np.abs(whole - logits(model).detach().numpy()).max() < 1e-5
    if family == "roberta":  # beside the tokenizer of another family
        saved(classifier("bert"), tiny_facts, tmp_path)
        with pytest.raises(ExportError, match="does not take what its tokenizer makes"):
            export.tokenizer_runner(file)


@pytest.fixture(scope="module")
def in_four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("four") / "model-int4.onnx"
    onnx_graph.classifier_program(quantized(embedding_bits=4)).save(file)
    return file


def test_the_graph_that_runs_has_integer_kernels(in_four_bits: Path, tmp_path: Path) -> None:
    """onnxruntime folds the Casts from 4 bits and fuses the rest, which no contract promises."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(in_four_bits), options, providers=["CPUExecutionProvider"])
    stored = Counter(t.data_type for t in onnx.load(in_four_bits).graph.initializer)
    running = Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)
    layers = 3
    # Query, key and value are one, but for the last query, which is of the first token alone; then output,
    # up, down and the head's layer, which has 8 bits. Word embeddings have 4 as well.
    assert stored[onnx.TensorProto.INT4] == 4 * layers + 2
    assert running["MatMulIntegerToFloat"] == 4 * layers + 2
    # What stays in fp32: scores and mixing of each layer, and the layer that makes the logits.
    assert running["MatMul"] + running["FusedMatMul"] == 2 * layers
    assert running["Gemm"] + running["FusedGemm"] == 1
    assert not running["SkipLayerNormalization"]  # slower than the two that it stands for
    assert sum(running.values()) <= 34 * layers + 25


def batch_of(inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    lengths = inputs["attention_mask"].sum(1)
    label = torch.zeros(len(lengths), dtype=torch.int64)
    return {
        "tokens": torch.from_numpy(inputs["input_ids"]),
        "length": torch.from_numpy(lengths),
        "label": label,
    }


def test_a_file_that_computes_something_else_is_refused(
    in_four_bits: Path, tmp_path: Path, tiny_facts: Any
) -> None:
    other = quantized(embedding_bits=4)
    saving.save_tokenizer(other.config.to_dict(), tiny_facts, tmp_path)
    file = shutil.copy(in_four_bits, tmp_path)
    with torch.no_grad():
        encoders.layers(other)[1].up.weight_scale.mul_(1.05)
    with pytest.raises(ExportError, match=r"differ|level"):
        export.check_quantized(other, Path(file), lambda: [batch_of(given())])


@pytest.mark.parametrize(
    ("found", "said"),
    [(np.full((2, 2), np.nan), "nan"), (np.array([[1.0, 0.0], [0.5, 0.6]]), "sample 1"), (None, "")],
)
def test_nan_and_a_changed_prediction_are_no_agreement(found: Any, said: str) -> None:
    labels, trained = np.zeros(2, np.int64), np.array([[1.0, 0.0], [0.6, 0.5]])
    mine, other = (
        class_metrics.Predictions(one, labels) for one in (trained, trained if found is None else found)
    )
    with pytest.raises(ExportError, match=said) if said else contextlib.nullcontext():
        export.check_agreement("onnx", Classes(["a", "b"]), mine, other)
