"""Tests of models/encoder/int8.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from isobatch.core.errors import ExportError, UserError
from isobatch.launch.commands.export import _said
from isobatch.models.encoder import evaluation, export, int8, onnx_graph, problems
from isobatch.models.encoder.class_metrics import Predictions
from isobatch.tests.unit import encoders

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
LIKE_BERT = ("roberta", "distilbert", "electra", "xlm-roberta")
"""Families whose graph has the products, sums and embeddings of BERT's."""
FAMILIES: list[Any] = [
    *(pytest.param(family, {}, marks=pytest.mark.slow) for family in LIKE_BERT),
    ("bert", {}),
    ("modernbert", {"local_attention": 8, "bos_token_id": 1, "eos_token_id": 2}),
    ("deberta-v2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    ("gpt2", {"n_embd": 64, "n_head": 4}),
]
PAIR = problems.Classes(["bad", "good"])


def batches(_split: str = "valid") -> list[dict[str, np.ndarray]]:
    """12 texts of 3 to 19 tokens, twice."""
    given = encoders.given(rows=12, width=19)
    lengths = given["attention_mask"].sum(1).clip(3)
    inside = np.arange(19) < lengths[:, None]
    tokens = np.where(inside, np.maximum(given["input_ids"], 5), 0)
    return [{"tokens": tokens, "length": lengths, "label": np.zeros(12, np.int64)}] * 2


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A classifier of two layers, and its file, which takes seconds to trace."""
    model = encoders.classifier("bert", num_hidden_layers=2)
    onnx_graph.classifier_program(model).save(file := tmp_path_factory.mktemp("bert") / "a.onnx")
    return model, file


@pytest.mark.parametrize(("family", "more"), FAMILIES)
def test_eight_bits_answer_nearly_as_the_model(family: str, more: Any, bert: Any, tmp_path: Path) -> None:
    """Of two layers: ModernBERT's see different parts of a text."""
    (model, fp32), file = bert, tmp_path / "b.onnx"
    if family != "bert":
        layers = {"distilbert": "n_layers", "gpt2": "n_layer"}.get(family, "num_hidden_layers")
        model, fp32 = encoders.classifier(family, **{layers: 2}, **more), tmp_path / "a.onnx"
        onnx_graph.classifier_program(model).save(fp32)
    expected = evaluation.predict(evaluation.torch_runner(model), batches()).logits
    spread = np.ptp(expected[:, 0] - expected[:, 1])
    for kind in (int8.DYNAMIC, int8.STATIC):
        if (family, kind) == ("gpt2", int8.STATIC):
            with pytest.raises(ExportError, match="onnx-dynamic"):
                int8.quantize(kind, fp32, file, batches)
            continue
        int8.quantize(kind, fp32, file, batches)
        weights = onnx.load(file).graph.initializer
        embedding = {t.data_type for t in weights if list(t.dims)[:1] == [encoders.VOCABULARY]}
        assert set() < embedding <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
        assert file.stat().st_size < 0.5 * fp32.stat().st_size
        found = evaluation.predict(evaluation.onnx_runner(file, 1), batches()).logits
        assert 1e-6 < np.abs(found - expected).max() < 0.35 * spread, kind  # it is rounded, and little


def test_a_texts_answer_is_the_same_whatever_else_is_asked(bert: tuple[Any, Path], tmp_path: Path) -> None:
    """Of each form of file, alone and among others, which are longer and of other words; of words too."""
    given = evaluation.model_inputs(batches()[0])
    given["token_type_ids"] = np.zeros_like(given["input_ids"])
    words = encoders.classifier("bert", encoders.encoders.TOKENS, num_hidden_layers=2)
    onnx_graph.classifier_program(words).save(tmp_path / "words.onnx")
    for head, fp32 in (("text", bert[1]), ("words", tmp_path / "words.onnx")):
        forms = {"fp32": fp32}
        for kind in (int8.DYNAMIC, int8.STATIC):
            int8.quantize(kind, fp32, file := tmp_path / f"{head}{kind}.onnx", batches)
            forms[kind] = file.rename(tmp_path / f"{len(forms)}{head}.onnx")  # no name says what it is
        for kind, file in forms.items():
            run, raw = evaluation.onnx_runner(file, 1), evaluation.onnx_session(file, 1)
            together = run(given)
            assert evaluation.scales_by_call(file) == (kind == int8.DYNAMIC)
            for row, length in enumerate(given["attention_mask"].sum(1)):
                one = {name: values[[row], :length] for name, values in given.items()}
                (alone,), (answer,) = run(one), raw.run(None, one)[0]
                found = together[row] if together.ndim == 2 else together[row, :length]
                assert np.abs(found - alone).max() <= (0 if kind == int8.DYNAMIC else 2e-5)
                assert np.array_equal(alone, answer)
        at_once = evaluation.onnx_session(forms[int8.DYNAMIC], 1).run(None, given)[0]
        together = evaluation.onnx_runner(forms[int8.DYNAMIC], 1)(given)
        assert np.abs(together - at_once)[..., :3, :].max() > 1e-4  # of a call with others it is another


def predictions(right: int, of: int = 1000) -> Predictions:
    logits = np.zeros((of, 2), np.float32)
    logits[:right, 0], logits[right:, 1] = 1, 1
    return Predictions(logits, np.zeros(of, np.int64))


def test_a_form_that_clearly_loses_more_than_a_point_is_no_export() -> None:
    found = int8.check_rounded(int8.DYNAMIC, PAIR, predictions(900), predictions(895))
    assert found["agreement"] == pytest.approx(0.995)
    assert (found["trained_accuracy"], found["exported_accuracy"]) == (0.9, 0.895)
    assert found["max_logit_difference"] == 1
    (said,) = _said(int8.DYNAMIC, {**found, "folder": "f"}, "small")
    lost = "accuracy 0.8950, the trained model's 0.9000; 5 of 1000 answered otherwise"
    assert said == f"f: largest logit difference 1.0e+00 over 1000 samples; {lost}"
    assert found["mcnemar_p"] == pytest.approx(2 / 2**5)  # 5 of 5 disagreements one way
    with pytest.raises(ExportError, match=r"from 90.0 to 88.0 %"):
        int8.check_rounded(int8.DYNAMIC, PAIR, predictions(900), predictions(880))
    # 2 of 100 are 2 points, and chance
    assert int8.check_rounded(int8.STATIC, PAIR, predictions(90, 100), predictions(88, 100))["samples"] == 100
    broken = predictions(900)
    broken.logits[3] = np.nan
    with pytest.raises(ExportError):
        int8.check_rounded(int8.STATIC, PAIR, predictions(900), broken)


def test_a_calibration_set_that_is_too_small_is_refused() -> None:
    few: Any = SimpleNamespace(samples={"train": 31})
    with pytest.raises(UserError, match="31 training texts are too few"):
        int8.check_calibration(int8.STATIC, few)
    int8.check_calibration(int8.DYNAMIC, few)
    few.samples["train"] = 32
    int8.check_calibration(int8.STATIC, few)


def test_calibration_reads_training_texts_evenly_and_without_padding() -> None:
    asked: list[str] = []

    def counted(split: str) -> list[dict[str, np.ndarray]]:
        asked.append(split)
        return batches() * 100

    found = list(int8.training_texts(["input_ids", "attention_mask"], counted))
    assert set(asked) == {"train"}
    assert len(found) == int8.CALIBRATION_TEXTS
    assert all(text["attention_mask"].all() and len(text["input_ids"]) == 1 for text in found)
    assert len({text["input_ids"].shape[1] for text in found}) > 3


def test_an_export_has_its_file_and_what_it_needs_alone(bert: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (model, fp32), folder = bert, tmp_path / "out"
    folder.mkdir()
    monkeypatch.setattr(export, "export_onnx", lambda *_: Path(shutil.copy(fp32, folder / "model.onnx")))
    monkeypatch.setattr(export, "tokenizer_runner", lambda file: evaluation.onnx_runner(file, 1))
    with torch.no_grad():
        found = int8.export_int8(int8.STATIC, model, tmp_path, folder, batches)
    assert [file.name for file in folder.iterdir()] == ["model-static.onnx"]
    assert found["samples"] == 24
    assert 0 <= found["agreement"] <= 1
