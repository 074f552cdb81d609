"""Tests of sequences in recommenders: samples, causality, losses, guests, sizes and refusals."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from isobatch.core.errors import UserError
from isobatch.data.interactions.dataset import InteractionOptions, Interactions
from isobatch.engine.planning.estimate import (
    RANKED_SECONDS,
    RANKINGS_OF_KEPT,
    RANKINGS_TO_TUNE,
    evaluation_seconds,
)
from isobatch.engine.registry import workload
from isobatch.models.base import ModelSize
from isobatch.models.encoder.evaluation import onnx_session
from isobatch.models.recommendation import losses, ranking
from isobatch.models.recommendation.catalogue import CATALOGUE_FOLDER, NAMES_FILE
from isobatch.models.recommendation.recommendations import Recommendations
from isobatch.models.recommendation.sequence import SequenceNet
from isobatch.models.recommendation.task import Recommender
from isobatch.tests.unit.test_recommender import DIM, ITEMS, USERS, catalogue
from isobatch.tests.unit.test_text_encoder import encoder

if TYPE_CHECKING:
    from pathlib import Path

LONGEST = 5


def net(text: bool = False) -> SequenceNet:
    made = encoder() if text else None
    torch.manual_seed(0)
    found = SequenceNet(catalogue(), DIM, made, longest=LONGEST, blocks=2, heads=2, dropout=0.0)
    with torch.no_grad():
        for p in found.parameters():  # no norm or bias is as it begins
            p.add_(0.1 * torch.randn(p.shape))
    return found.eval()


def recipe(data: str, **changes: Any) -> Any:
    return workload("recommender").complete({"data": data, "preset": "sequence", **changes})[0]


def write_log(folder: Path, rows: list[str]) -> str:
    (folder / "log.csv").write_text("\n".join(["user,item,timestamp", *rows]))
    return str(folder / "log.csv")


def test_samples_are_the_last_items_of_each_user_in_time(tmp_path: Path) -> None:
    rows = [f"a,{item},{100 - item}" for item in range(9)] + ["b,3,5", "b,1,4", "b,2,9", "b,7,8", "c,1,1"]
    asked = recipe(write_log(tmp_path, rows), max_length=4)
    data = workload("recommender").make(asked)[1]
    train = data.read()["train"]
    # of a: 0 is the test, 1 valid, the last five of the rest; of b 2 is the test, 7 valid
    assert train["items"].rows(np.arange(2)).tolist() == [[6, 5, 4, 3, 2], [1, 3, 0, 0, 0]]
    assert train["target.weight"].tolist() == [4, 1]
    assert train["user"].tolist() == [0, 1]


def test_a_state_knows_nothing_of_what_comes_later_or_of_padding() -> None:
    model, rows = net(), torch.tensor([[3, 8, 1, 4], [2, 9, 0, 0]])
    places = torch.tensor([1, 4, 5])
    states, _ = model.vectors((rows, places), torch.tensor([0]))
    other = torch.tensor([[3, 8, 7, 7, 7], [2, 9, 5, 5, 5]])
    same, _ = model.vectors((other, torch.tensor([1, 5, 6])), torch.tensor([0]))
    torch.testing.assert_close(states, same, rtol=0, atol=1e-6)
    changed, _ = model.vectors((rows.roll(1, 1), places), torch.tensor([0]))
    assert (states - changed).abs().min(1).values.gt(1e-4).all()


@pytest.mark.parametrize("text", [False, True])
def test_what_is_known_of_a_user_decides_the_vector(text: bool) -> None:
    model, user = net(text), torch.arange(USERS)
    known = catalogue()
    inputs = torch.tensor([0, 1, 3, 2, 7, 4]).minimum(torch.from_numpy(known.trained))
    found = ranking.score_all_items(model, user, inputs)
    for one, count in zip(user.tolist(), inputs.tolist(), strict=True):
        own = torch.from_numpy(known.history[known.starts[one] : known.starts[one + 1]][:count][-LONGEST:])
        vector = torch.zeros(1, DIM)
        if count:
            vector, _ = model.vectors((own[None], torch.tensor([len(own) - 1])), own)
        items = model.item_vectors(torch.arange(ITEMS))
        wanted = (vector @ items.T)[0] + model.item_bias.weight[:, 0]
        torch.testing.assert_close(found[one], wanted, rtol=1e-4, atol=1e-4)


STEP: Any = SimpleNamespace(to_device=torch.from_numpy, number=0, phase="x", noise=None)


def test_rows_that_know_the_same_of_a_user_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, computed = net(), []
    user, inputs = torch.tensor([2, 1, 2, 2, 1]), torch.tensor([3, 2, 3, 1, 2])
    each = torch.cat([ranking.score_all_items(model, user[[i]], inputs[[i]]) for i in range(5)])
    vectors = model.vectors
    monkeypatch.setattr(model, "vectors", lambda u, *rest: (computed.append(len(u)), vectors(u, *rest))[1])
    found = ranking.score_all_items(model, user, inputs)
    torch.testing.assert_close(found, each, rtol=0, atol=1e-6)
    assert computed == [3]


def test_evaluations_are_priced_by_what_they_compute_and_rank() -> None:
    plan: Any = SimpleNamespace(device="cpu", processes=1, threads=2, predicted_step_seconds=6.0)
    phases: Any = [SimpleNamespace(steps=31, eval_every=10)]
    facts: Any = SimpleNamespace(samples={"valid": 20, "test": 40})
    asked = dataclasses.replace(recipe("x"), batch_size=2, eval_fraction=1.0)

    def seconds(ranked: int, distinct: int = 0) -> float:
        size = ModelSize(parameters=1, trainable=1, ranked=ranked, distinct=distinct)
        return evaluation_seconds(asked, facts, phases, size, plan)

    assert seconds(0) == pytest.approx(3 * 20 + 60)  # a second for each row
    assert seconds(0, distinct=5) == pytest.approx(3 * 5 + 10)
    rows = 3 * 20 + 60 + RANKINGS_TO_TUNE * 20 + RANKINGS_OF_KEPT * 40
    assert seconds(10**9) - seconds(0) == pytest.approx(1e9 * RANKED_SECONDS * rows / 2)


@pytest.mark.parametrize("loss", ["sampled-softmax", "bce", "gbce"])
def test_losses_are_their_formulas_and_add_up_over_rows(loss: str) -> None:
    """With all items drawn: the softmax; binary cross-entropies of all others, and of the own to beta."""
    model, rows, length = net(), torch.tensor([[3, 8, 1, 4], [2, 9, 0, 0]]), np.array([4, 2])
    options = SimpleNamespace(loss=loss, negatives=ITEMS, calibration=0.75, cohort=0, l2=0.0)

    def total(some: slice) -> Tensor:
        user, item = losses.next_items(rows[some], length[some], STEP)
        return losses.ranking_loss(model, user, item, options, STEP, 0)[0].detach()

    target = torch.tensor([8, 1, 4, 9])
    (scores,) = model((rows[:, :-1], torch.arange(4)), [torch.arange(ITEMS)])
    beta = {"bce": 1.0, "gbce": 1 + 0.75 * (ITEMS / (ITEMS - 1) - 1)}
    if loss == "sampled-softmax":
        wanted = cross_entropy(scores, target, reduction="sum")
    else:
        labels = torch.nn.functional.one_hot(target, ITEMS).float()
        each = binary_cross_entropy_with_logits(scores, labels, reduction="none")
        wanted = (each * (1 - labels + beta[loss] * labels)).sum()
    torch.testing.assert_close(total(slice(None)), wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total(slice(0, 1)) + total(slice(1, 2)), wanted.detach(), rtol=1e-5, atol=1e-5)


def test_a_negative_that_is_the_item_itself_alone_gives_no_nan() -> None:
    model = net()
    user, item = losses.next_items(torch.tensor([[3, 8]]), np.array([2]), STEP)
    losses.sampled_softmax(model, user, item, torch.tensor([8])).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def exported(model: SequenceNet, folder: Path) -> Recommender:
    known = catalogue()
    (folder / CATALOGUE_FOLDER).mkdir()
    for name in known.__slots__:
        np.save(folder / CATALOGUE_FOLDER / f"{name}.npy", getattr(known, name))
    names = {"users": [f"u{n}" for n in range(USERS)], "items": [f"i{n}" for n in range(ITEMS)]}
    (folder / CATALOGUE_FOLDER / NAMES_FILE).write_text(json.dumps({**names, "titles": names["items"]}))
    task = workload("recommender").make(recipe("demo", dim=DIM, max_length=LONGEST))[0]
    assert isinstance(task, Recommender)
    task.export(model, folder, SimpleNamespace(folder=str(folder)))  # type: ignore[arg-type]
    return task


@pytest.mark.parametrize("text", [False, True])
def test_a_guest_is_answered_as_torch_would(text: bool, tmp_path: Path) -> None:
    model, known = net(text), catalogue()
    exported(model, tmp_path)
    lists = Recommendations(tmp_path)
    for taken in ([4], [9, 2, 17], [1, 2, 3, 4, 6, 7, 8]):
        row = torch.tensor([taken[-LONGEST:]])
        state, _ = model.vectors((row, torch.tensor([row.shape[1] - 1])), row[0])
        np.testing.assert_allclose(lists.new_user(np.array(taken)), state[0].detach(), rtol=0, atol=1e-5)
    first, again = lists.for_items(["i2", "i9"], 3), lists.for_items(["i9", "i2", "i9"], 3)
    assert first == again
    assert first != lists.for_items(["i9", "i2"], 3)
    users, _ = model.all_vectors()
    own = known.history[known.starts[1] : known.starts[2]]
    np.testing.assert_allclose(lists.new_user(own), users[1], rtol=0, atol=1e-5)


def test_an_onnx_file_scores_as_torch_does(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    task, facts = exported(net(), tmp_path), SimpleNamespace(folder=str(tmp_path), extra={"texts": 0})
    batch = {"user": torch.arange(USERS), "inputs": torch.from_numpy(catalogue().trained)}
    batch["inputs"][0] = 0
    (folder := tmp_path / "onnx").mkdir()
    found = task.export_as("onnx", tmp_path, folder, facts, lambda: [batch])  # type: ignore[arg-type]
    assert found["samples"] == USERS
    assert found["max_logit_difference"] < 1e-5
    session = onnx_session(folder / "model.onnx")
    asked = {"items": np.array([[9, 2, 17]]), "length": np.array([3])}
    lists = Recommendations(tmp_path)
    wanted = lists.arrays["items"] @ lists.new_user(asked["items"][0]) + lists.arrays["bias"]
    np.testing.assert_allclose(session.run(None, asked)[0][0], wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"head": "mlp"}, "--head: is for --samples pairs"),
        ({"cohort": 8}, "--cohort: is for --samples pairs"),
        ({"l2": 0.1}, "--l2: is for --samples pairs"),
        ({"heads": 3}, "--heads 3: must divide --dim 64"),
        ({"preset": None, "split": "users"}, "--split users: no user of the test has a vector"),
    ],
)
def test_what_cannot_be_had_is_refused(flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        workload("recommender").make(recipe("demo", **flags))[0].check()


def test_data_without_sequences_is_refused(tmp_path: Path) -> None:
    data = write_log(tmp_path, ["a,1,1", "b,2,1", "c,1,2"])
    options = dataclasses.replace(InteractionOptions(), samples="sequences", split="none")
    with pytest.raises(UserError, match="has two items to train on"):
        Interactions(recipe(data), options).read()


def test_the_counted_size_is_that_of_the_network() -> None:
    task = workload("recommender").make(recipe("demo", dim=DIM, max_length=LONGEST))[0]
    extra = {"users": USERS, "items": ITEMS, "texts": 0}
    facts: Any = SimpleNamespace(extra=extra, samples={"train": USERS}, mean_length=3.0)
    size = task.model_size(facts)
    assert size.parameters == sum(p.numel() for p in net().parameters())
