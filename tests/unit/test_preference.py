"""Tests of models/preference/: the losses against TRL's formulas, written out over full logits."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from isobatch.core.errors import UserError
from isobatch.engine.noise.keyed_noise import KeyedNoise, NativeNoise
from isobatch.models.base import StepContext
from isobatch.models.capabilities import HasTeacher
from isobatch.models.causal_lm import chunked_cross_entropy
from isobatch.models.preference.task import DPO, ORPO, PreferenceTask

VOCABULARY = 61
STEP = StepContext(0, "train", NativeNoise())
FACTS: Any = SimpleNamespace(folder="", extra={"vocabulary": VOCABULARY, "eos": 60, "bos": 60})
ANSWERS = ([(3, 5), (4, 2)], [(2, 7), (2, 1)], [(6, 3), (6, 6)])
"""Of three pairs: (tokens of the prompt, tokens of the answer) for chosen and rejected."""


def make(kind: type[PreferenceTask], smoothing: float = 0.0, **options: Any) -> Any:
    recipe = SimpleNamespace(
        model="tiny", tokenizer=None, revision=None, max_length=16, seed=0, dropout=0.0, options={},
        optimizer="adamw", label_smoothing=smoothing,
    )  # fmt: skip
    return kind(recipe, kind.Options(**options))


def batch(pairs: Any = ANSWERS, width: int = 12) -> dict[str, Tensor]:
    """Random tokens; what pads a row is no zero, so that reading it would be seen."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (len(pairs), 2, width), generator=draw)
    learn = torch.zeros(len(pairs), 2, width, dtype=torch.uint8)
    for number, pair in enumerate(pairs):
        for answer, (prompt, length) in enumerate(pair):
            learn[number, answer, prompt : prompt + length] = 1
    row_length = torch.tensor([[prompt + length for prompt, length in pair] for pair in pairs])
    return {"tokens": tokens, "learn": learn, "row_length": row_length, "index": torch.arange(len(pairs))}


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(0)
    return make(DPO).build_model(FACTS).eval()


@pytest.fixture
def policy(reference: Any) -> Any:
    """The reference with other weights."""
    model = copy.deepcopy(reference)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=draw)
    return model


def answer_by_hand(model: Any, values: dict[str, Tensor], pair: int, answer: int) -> list[Tensor]:
    """log p of each token of one answer, from all logits of its row alone, without padding."""
    prompt, length = ANSWERS[pair][answer]
    row = values["tokens"][pair, answer, : prompt + length]
    log_p = model(input_ids=row[None]).logits[0].log_softmax(-1)
    return [log_p[at - 1, row[at]] for at in range(prompt, prompt + length)]


def scores_by_hand(model: Any, values: dict[str, Tensor], averages: bool) -> Tensor:
    """(B, 2) of each answer: the sum over its tokens, or the mean."""
    found = []
    for pair in range(len(ANSWERS)):
        tokens = [torch.stack(answer_by_hand(model, values, pair, answer)) for answer in (0, 1)]
        found.append(torch.stack([one.mean() if averages else one.sum() for one in tokens]))
    return torch.stack(found)


def trl_dpo(policy: Tensor, reference: Tensor, beta: float, smoothing: float) -> Tensor:
    """The losses as trl/trainer/dpo_trainer.py has them."""
    chosen_logratios = policy[:, 0] - reference[:, 0]
    rejected_logratios = policy[:, 1] - reference[:, 1]
    logits = chosen_logratios - rejected_logratios
    return -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing


def trl_orpo(policy_mean: Tensor, beta: float) -> Tensor:
    """The odds ratio's part as trl/trainer/orpo_trainer.py has it."""
    chosen, rejected = policy_mean[:, 0], policy_mean[:, 1]
    log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -beta * torch.log(torch.sigmoid(log_odds))


def with_reference(task: Any, reference: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        found = task.teacher().answers(reference, values)
    return {**values, **{f"teacher.{name}": answers for name, answers in found.items()}}


def gradient(total: Tensor, model: Any) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))])


@pytest.mark.parametrize("small_chunks", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_trls_formula_over_full_logits(
    smoothing: float, small_chunks: bool, reference: Any, policy: Any, monkeypatch: Any
) -> None:
    if small_chunks:  # two tokens at a time
        monkeypatch.setattr(chunked_cross_entropy, "chunk_bytes", lambda _: 2 * 4 * VOCABULARY)
    task = make(DPO, smoothing, beta=0.3)
    values = with_reference(task, reference, batch())
    (loss,) = task.loss(policy, values, STEP).values()
    scores = [scores_by_hand(model, values, averages=False) for model in (policy, reference)]
    wanted = trl_dpo(*scores, 0.3, smoothing).sum()
    assert loss.unit == "sample"
    assert float(loss.sum.detach()) == pytest.approx(float(wanted.detach()), abs=1e-5)
    assert abs(float(wanted.detach()) - 3 * math.log(2)) > 1e-2
    torch.testing.assert_close(gradient(loss.sum, policy), gradient(wanted, policy), atol=1e-5, rtol=1e-4)


def test_orpo_is_trls_formula_over_full_logits(policy: Any) -> None:
    task, values = make(ORPO, beta=0.4), batch()
    losses = task.loss(policy, values, STEP)
    wanted = trl_orpo(scores_by_hand(policy, values, averages=True), 0.4).sum()
    nll = -torch.stack([t for p in range(3) for t in answer_by_hand(policy, values, p, 0)]).sum()
    assert (losses["nll"].unit, losses["odds_ratio"].unit) == ("token", "sample")
    assert float(losses["odds_ratio"].sum.detach()) == pytest.approx(float(wanted.detach()), abs=1e-5)
    assert float(losses["nll"].sum.detach()) == pytest.approx(float(nll.detach()), abs=1e-4)  # 60 nats
    found = losses["odds_ratio"].sum + losses["nll"].sum
    torch.testing.assert_close(gradient(found, policy), gradient(wanted + nll, policy), atol=2e-5, rtol=1e-4)


def test_a_head_of_its_own_is_used_as_it_is(policy: Any, monkeypatch: Any) -> None:
    """Such as one whose weights are in shards: its logits are made at once."""
    values = batch()
    tokens, targets = values["tokens"].flatten(0, 1), values["tokens"].flatten(0, 1).roll(-1, -1)
    targets[:, 8:] = chunked_cross_entropy.IGNORE_INDEX
    chunked = chunked_cross_entropy.token_log_probs(policy, tokens, targets)
    monkeypatch.setattr(chunked_cross_entropy, "bypassable_head", lambda _: None)
    torch.testing.assert_close(chunked_cross_entropy.token_log_probs(policy, tokens, targets), chunked)
    assert chunked[:, :8].lt(0).all()
    assert chunked[:, 8:].eq(0).all()


def evaluated(task: Any, model: Any, values: dict[str, Tensor]) -> dict[str, float]:
    weights = {"token.weight": values["learn"][:, 0].sum(-1)}
    with torch.no_grad():
        parts = task.evaluate(model, {**values, **weights}, STEP)
    found: dict[str, float] = task.metrics(parts, "valid", FACTS)
    return found


def test_the_reference_itself_is_right_half_of_the_time(reference: Any, policy: Any) -> None:
    task = make(DPO)
    values = with_reference(task, reference, batch())
    found = evaluated(task, reference, values)
    assert (found["reward_accuracy"], found["reward_margin"]) == (0.5, pytest.approx(0, abs=1e-6))
    assert found["loss"] == pytest.approx(math.log(2), abs=1e-6)
    moved = evaluated(task, policy, values)
    of_policy, of_reference = (scores_by_hand(model, values, False) for model in (policy, reference))
    margins = 0.1 * ((of_policy - of_reference)[:, 0] - (of_policy - of_reference)[:, 1])
    assert moved["reward_margin"] == pytest.approx(float(margins.detach().mean()), abs=1e-5)
    assert moved["reward_accuracy"] == pytest.approx(float((margins > 0).float().mean()))
    assert moved["chosen_log_prob"] == pytest.approx(float(of_policy[:, 0].detach().mean()), abs=1e-4)


def test_the_reference_has_the_weights_that_training_begins_with() -> None:
    task = make(DPO)
    torch.manual_seed(99)
    built = task.teacher().build(FACTS)
    torch.manual_seed(0)  # the recipe's seed, as the engine sets it
    wanted = task.build_model(FACTS).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in built.state_dict().items())


def test_what_decides_the_reference_is_in_its_name() -> None:
    same = {make(DPO, **more).teacher().identity for more in ({}, {"beta": 0.5})}
    assert len(same) == 1  # a sweep over these computes it once
    other = make(DPO)
    other.recipe.seed = 1
    assert other.teacher().identity not in same
    assert not isinstance(make(ORPO), HasTeacher)


def test_noise_has_a_row_for_each_answer() -> None:
    noise, single = KeyedNoise(0, DPO.rows_per_sample), KeyedNoise(0)
    noise.bind(3, torch.tensor([5, 2]).numpy(), torch.device("cpu"))
    drawn = noise.uniform("x", (4,))
    assert drawn.shape == (4, 4)
    assert len({tuple(row.tolist()) for row in drawn}) == 4
    noise.bind(3, torch.tensor([2]).numpy(), torch.device("cpu"))
    assert torch.equal(noise.uniform("x", (4,)), drawn[2:])
    single.bind(3, torch.tensor([10, 11]).numpy(), torch.device("cpu"))
    assert torch.equal(single.uniform("x", (4,)), drawn[:2])


def test_half_of_the_pairs_cannot_be_reversed() -> None:
    with pytest.raises(UserError, match="--label-smoothing"):
        make(DPO, 0.5).check()


def exact_sums(model: Any, values: dict[str, Tensor]) -> Tensor:
    """(B, 2) log-probabilities of the answers, all of it in float64."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        log_p = torch.stack([exact(input_ids=rows).logits.log_softmax(-1) for rows in values["tokens"]])
    found = log_p[:, :, :-1].gather(-1, values["tokens"][..., 1:, None])[..., 0]
    return (found * (values["learn"][..., 1:] != 0)).sum(-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_long_answers_lose_no_digits_and_held_out_loss_has_no_smoothing(smoothing: float) -> None:
    """In fp32 a sum over 500 tokens is off by 6e-6 of the loss."""
    task = make(DPO, smoothing)
    task.recipe.max_length = 512
    torch.manual_seed(0)
    reference = task.build_model(FACTS).eval()
    policy = copy.deepcopy(reference)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    values = with_reference(task, reference, batch([[(8, 504), (8, 504 - cut)] for cut in (0, 7)], 512))
    scores = [exact_sums(model, values) for model in (policy, reference)]
    with torch.no_grad():
        held_out = task.evaluate(policy, values, STEP)["loss"].value
        trained = task.loss(policy, values, STEP)["loss"].sum
    for found, share in ((held_out, 0.0), (trained, smoothing)):
        wanted = trl_dpo(*scores, task.options.beta, share).sum()
        assert float(found) == pytest.approx(float(wanted), rel=1e-6)


def test_an_adapter_trains_faster_and_without_dropout() -> None:
    assert DPO.complete({"adapter": "lora"}) == {"frozen_dtype": "bf16", "lr": 1e-5, "lora_dropout": 0.0}
    assert DPO.complete({"adapter": "lora", "lr": 2e-4, "lora_dropout": 0.1}) == {"frozen_dtype": "bf16"}
    assert DPO.complete({}) == {}
