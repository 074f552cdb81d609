"""Tests of the workload classifier: sizes, loss, metrics and export, on tiny models."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from isobatch.core.errors import UserError
from isobatch.engine.registry import workload
from isobatch.models import hub
from isobatch.models.base import Sum
from isobatch.models.classification.task import Classifier, ClassifierOptions
from isobatch.models.encoder import encoders
from isobatch.models.encoder.class_metrics import wilson_interval
from isobatch.tests.unit.encoders import classifier

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 300


def make(model: str = "tiny", best_metric: Any = "accuracy", **changes: Any) -> Classifier:
    values = {"model": model, "options": {}, "revision": None, "tokenizer": None, "max_length": 12, "seed": 0}
    values |= {"dropout": None, "label_smoothing": 0.0, "patience": 0, **changes}
    return Classifier(SimpleNamespace(**values), ClassifierOptions(best_metric=best_metric))


def facts(labels: tuple[str, ...] = ("neg", "pos"), folder: Path | str = "") -> Any:
    extra = {"vocabulary": VOCABULARY, "labels": list(labels), "pad": 0, "tokenizer": "tokenizer.json"}
    return SimpleNamespace(folder=str(folder), extra=extra)


def batch(lengths: list[int], width: int, fill: int = 0) -> dict[str, torch.Tensor]:
    rows = torch.randint(VOCABULARY, (len(lengths), 64), generator=torch.Generator().manual_seed(1))
    length = torch.tensor(lengths)
    inside = torch.arange(width) < length[:, None]
    label = torch.arange(len(lengths)) % 2
    return {"tokens": rows[:, :width].masked_fill(~inside, fill), "length": length, "label": label}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return make().build_model(facts()).eval()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, [0.5, 2.5]])
def test_weights_and_smoothing_are_those_of_pytorch(weights: list[float] | None, smoothing: float) -> None:
    """However the batch is cut: parts are added up, and divided once by the whole batch's weight."""
    task, known = make(label_smoothing=smoothing), facts()
    known.extra |= {"class_weights": weights} if weights else {}
    torch.manual_seed(0)
    model = task.build_model(known).eval()
    rows = batch([5, 9, 3, 7, 4], 9)
    if weights:
        rows["class.weight"] = torch.tensor(weights)[rows["label"]]
    weight = torch.tensor(weights) if weights else None
    expected = torch.nn.CrossEntropyLoss(weight, label_smoothing=smoothing)(
        task.logits(model, rows), rows["label"]
    ).item()
    divisor = {"sample": 5.0, "class": 0.5 * 3 + 2.5 * 2}  # labels 0 1 0 1 0
    for cut in ([5], [2, 3], [1, 1, 1, 1, 1]):
        parts = [
            dict(zip(rows, p, strict=True)) for p in zip(*(rows[k].split(cut) for k in rows), strict=True)
        ]
        losses = [task.loss(model, part, SimpleNamespace())["loss"] for part in parts]  # type: ignore[arg-type]
        assert {loss.unit for loss in losses} == {"class" if weights else "sample"}
        found = sum(loss.sum.item() for loss in losses) / divisor[losses[0].unit]
        assert found == pytest.approx(expected, abs=1e-6)
    assert "class_weights" not in model.state_dict(), "final/ has the tensors that transformers expects"


def test_logits_do_not_depend_on_the_batch_or_padding(model: Any) -> None:
    together = make().logits(model, batch([5, 9, 3], 12, fill=7))
    for row, length in enumerate([5, 9, 3]):
        alone = {k: v[row : row + 1] for k, v in batch([5, 9, 3], 12).items()}
        alone["tokens"] = alone["tokens"][:, :length]
        assert torch.allclose(make().logits(model, alone)[0], together[row], atol=1e-6)


def test_accuracy_counts_correct_predictions() -> None:
    answers = [[0.0, 0.0, 0.9], [1.0, 0.0, 0.6], [1.0, 1.0, 0.8], [1.0, 1.0, 0.7]]
    parts = {"nll": Sum(6.0, 4), "evidence": torch.tensor(answers).numpy()}
    found = make().metrics(parts, "valid", facts())
    assert (found["loss"], found["accuracy"]) == (1.5, 0.75)
    low, high = found["accuracy_ci95"]
    assert 0 < low < 0.75 < high < 1
    assert (found["classes"], found["confusion"]) == (["neg", "pos"], [[1, 0], [1, 2]])
    assert found["f1"] == pytest.approx(2 * 2 / (2 * 2 + 0 + 1))


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(793, 872, 0.8885, 0.9267), (10, 10, 0.7225, 1.0), (0, 10, 0.0, 0.2775)],
)
def test_the_interval_is_wilsons(right: int, count: int, low: float, high: float) -> None:
    """Against the roots of (p - share)^2 = z^2 p (1 - p) / n, which define it."""
    assert wilson_interval(right, count) == pytest.approx([low, high], abs=1e-4)
    for p in wilson_interval(right, count):
        assert (p - right / count) ** 2 == pytest.approx(1.959964**2 * p * (1 - p) / count, abs=1e-8)


def test_model_size_counts_all_parameters(model: Any) -> None:
    shape = make(noise="keyed").model_size(facts())
    assert shape.keyed_dropout
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.layers, shape.hidden, shape.heads, shape.intermediate) == (2, 128, 4, 512)


def test_transformers_opens_the_export(model: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    vocabulary = {"[PAD]": 0, "[UNK]": 1, "film": 2}
    Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    final = tmp_path / "final"
    final.mkdir()
    make().export(model, final, facts(folder=tmp_path))
    opened = AutoModelForSequenceClassification.from_pretrained(final).eval()
    assert opened.config.id2label == {0: "neg", 1: "pos"}
    rows = batch([5, 9, 3], 9)
    torch.testing.assert_close(make().logits(opened, rows), make().logits(model, rows), rtol=1e-5, atol=1e-6)
    assert AutoTokenizer.from_pretrained(final)("film")["input_ids"] == [2]
    again = make(str(final)).build_model(facts()).eval()
    assert torch.equal(make().logits(again, rows), make().logits(model, rows))
    other = make(str(final)).build_model(facts(("a", "b", "c")))
    assert other.config.num_labels == 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_length": 2}, "--max-length 2: a text needs at least 3 tokens"),
        ({"best_metric": "mcc"}, "--best-metric mcc: it chooses .* with --load-best-model-at-end"),
        ({"model": "tinny"}, r"--model tinny: is no preset \(did you mean tiny\?\)"),
    ],
)
def test_bad_input_is_answered_in_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make(**{"model": "tiny", **changes}).check()


@pytest.mark.parametrize(
    ("typed", "limit"),
    [({}, 100), ({"mode": "fast"}, None), ({"max_length": 128}, None), ({"model": "bert-6l"}, None)],
)
@pytest.mark.parametrize("task", ["classifier", "pruning", "qat"])
def test_a_model_that_reads_little_limits_what_was_not_asked_for(
    task: str, typed: dict[str, Any], limit: int | None, tmp_path: Path
) -> None:
    """128 tokens are usual, 64 in fast mode."""
    (tmp_path / "config.json").write_text('{"model_type": "bert", "max_position_embeddings": 100}')
    kind = workload(task).task
    assert kind.complete({"data": "rows.csv", "model": str(tmp_path), **typed}).get("max_length") == limit
    teacher = {"data": "rows.csv", kind.initial_model_option: str(tmp_path)} if task != "classifier" else {}
    assert not teacher or kind.complete(teacher)["max_length"] == 100


def test_a_config_without_a_model_type_is_answered_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(UserError, match="transformers has no classifier of type None"):
        make(model=str(tmp_path)).check()


def test_the_best_metric_may_be_another() -> None:
    assert make().monitor == ("accuracy", "max")
    assert make(best_metric="f1_macro", patience=2).monitor == ("f1_macro", "max")
    assert make(best_metric="loss", patience=2).monitor == ("loss", "min")
    with pytest.raises(UserError, match="--best-metric f1: the data has 3 classes"):
        make(best_metric="f1", patience=2).model_size(facts(("a", "b", "c")))


def test_a_model_that_answers_one_class_alone_is_told_so() -> None:
    known = {"classes": ["neg", "pos"], "accuracy": 0.5}
    assert "every answer is pos, so" in make().final_remark({**known, "confusion": [[0, 3], [0, 3]]})
    assert make().final_remark({**known, "confusion": [[1, 2], [0, 3]]}) == ""
    assert make().final_remark({**known, "confusion": [[0, 0], [0, 3]], "accuracy": 1.0}) == ""
    assert make().final_remark({"accuracy": 0.5}) == ""


@pytest.mark.parametrize(
    ("kind", "why"),
    [("electra", ""), ("modernbert", ""), ("qwen2", ""), ("canine", "no ONNX"), ("whisper", "no classifier")],
)
def test_a_family_that_cannot_be_exported_is_refused_before_it_trains(kind: str, why: str) -> None:
    with pytest.raises(UserError, match=f"{why}.* of type {kind}") if why else contextlib.nullcontext():
        encoders.check_type("m", {"model_type": kind})


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_a_new_head_learns_faster_than_what_is_trained(family: str, tmp_path: Path) -> None:
    """New is what the checkpoint lacks: the head of a model without one, of one for other classes the last
    layer, and of one that predicts masked words the pooler too.
    """
    from transformers import AutoModelForMaskedLM

    whole = classifier(family)
    whole.save_pretrained(tmp_path / "whole")
    whole.base_model.save_pretrained(tmp_path / "base")
    AutoModelForMaskedLM.from_config(whole.config).save_pretrained(tmp_path / "masked")
    classes = tuple(whole.config.id2label.values())
    head = {n for n, _ in whole.named_parameters() if not n.startswith(f"{family}.")}
    last = {n for n in head if n.startswith("classifier.out_proj." if family == "roberta" else "classifier.")}
    pooler = {n for n, _ in whole.named_parameters() if ".pooler." in n}
    assert bool(pooler) == (family == "bert")
    for folder, labels, new in (
        ("base", classes, head),
        ("masked", classes, head | pooler),
        ("whole", classes, set()),
        ("whole", (*classes, "more"), last),
    ):
        task = make(str(tmp_path / folder))
        names = [name for name, _ in task.build_model(facts(labels)).named_parameters()]
        rates = {name: task.rate_share(name) for name in names}
        fast = {name for name, rate in rates.items() if rate != 1.0}
        assert fast == new
        assert {rates[name] for name in fast} <= {10.0}
    scratch = make()
    assert {scratch.rate_share(n) for n, _ in scratch.build_model(facts()).named_parameters()} == {1.0}


@pytest.mark.parametrize(
    ("files", "whole"),
    [
        ({}, False),
        ({"model.safetensors": ""}, True),
        ({"pytorch_model.bin": ""}, True),
        ({"tf_model.h5": ""}, False),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors"}}'}, False),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors"}}', "1.safetensors": ""},
            True,
        ),
    ],
)
def test_a_folder_without_weights_is_no_model_to_train(
    files: dict[str, str], whole: bool, tmp_path: Path
) -> None:
    for name, text in {"config.json": "{}", "tokenizer.json": "{}", **files}.items():
        (tmp_path / name).write_text(text)
    if whole:
        assert hub.fetch_weights(str(tmp_path), None) == str(tmp_path)
        return
    with pytest.raises(UserError, match=r"^--model .* holds no model.safetensors and no pytorch_model.bin"):
        hub.fetch_weights(str(tmp_path), None)
