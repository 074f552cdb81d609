"""The sequence VAE: network, objective, generation."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.engine.registry import complete, workload
from isobatch.models.sequence_vae import generation
from isobatch.models.sequence_vae.network import NetworkConfig, Objective, VAENetwork, initialize
from isobatch.models.sequence_vae.task import SequenceVAEOptions

if TYPE_CHECKING:
    from pathlib import Path

WORDS = 11
SIZES: dict[str, Any] = {"hidden": 16, "layers": 2, "latent": 3, "max_length": 12, "dropout": 0.0}
BACKBONES = ["gru", "transformer"]


def network(backbone: Any = "gru", **sizes: Any) -> VAENetwork:
    torch.manual_seed(0)
    special = {"vocabulary": WORDS + 3, "bos": WORDS, "eos": WORDS + 1, "unk": WORDS + 2}
    return VAENetwork(NetworkConfig(backbone=backbone, **special, **{**SIZES, **sizes})).eval()


def rows(*lengths: int, width: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, length) of random sequences that end with the end token."""
    generator = np.random.default_rng(0)
    tokens = np.zeros((len(lengths), max(*lengths, width)), np.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = [*generator.integers(0, WORDS, length - 1), WORDS + 1]
    return torch.from_numpy(tokens), torch.tensor(lengths)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_padding_and_neighbours_change_nothing(backbone: str) -> None:
    model, noise = network(backbone), torch.randn(3, 3)
    tokens, length = rows(3, 7, 5, width=12)
    whole, all_of = model(tokens, length, noise)
    parts = [model(tokens[i : i + 1, :n], length[i : i + 1], noise[i : i + 1]) for i, n in enumerate(length)]
    assert whole.item() == pytest.approx(sum(nll.item() for nll, _ in parts), rel=1e-5)
    assert torch.allclose(all_of.mean, torch.cat([posterior.mean for _, posterior in parts]), atol=1e-5)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_loss_is_that_of_the_logits(backbone: str) -> None:
    model, noise = network(backbone), torch.randn(2, 3)
    tokens, length = rows(4, 9)
    nll, posterior = model(tokens, length, noise)
    inputs, _ = model.inputs_and_targets(tokens, length)
    z = posterior.sample(noise)
    log_probs = model.decoder.head(model.decoder.states(inputs, z)).log_softmax(-1)
    expected = -sum(log_probs[r, t, tokens[r, t]] for r in range(2) for t in range(int(length[r])))
    assert nll.item() == pytest.approx(expected.item(), rel=1e-5)
    assert inputs[:, 0].tolist() == [WORDS, WORDS]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_no_token_sees_itself(backbone: str) -> None:
    """The states before a token that is changed stay the same."""
    model, z = network(backbone), torch.randn(1, 3)
    tokens, length = rows(8)
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % WORDS
    first, second = (
        model.decoder.states(model.inputs_and_targets(t, length)[0], z) for t in (tokens, changed)
    )
    assert torch.allclose(first[:, :5], second[:, :5], atol=1e-6)
    assert not torch.allclose(first[:, 5:], second[:, 5:], atol=1e-3)


def test_dropped_words_are_read_as_unknown() -> None:
    model, noise = network(), torch.zeros(1, 3)
    tokens, length = rows(6)
    unknown = torch.full((1, 6), True)
    hidden, _ = model(tokens, length, noise, unknown)
    inputs = torch.full((1, 6), WORDS + 2)
    z = model.encoder(tokens, length).mean
    assert hidden.item() == pytest.approx(model.decoder(inputs, z, tokens).item(), rel=1e-5)


def test_a_new_decoder_is_the_same_everywhere() -> None:
    one, other = network(), network()
    torch.manual_seed(123)
    initialize(one.decoder, 7)
    before = torch.get_rng_state()
    initialize(other.decoder, 7)
    assert torch.equal(before, torch.get_rng_state())
    for ours, theirs, old in zip(
        one.decoder.parameters(), other.decoder.parameters(), network().decoder.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, old)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("constant", [2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [0.0, 1.0, 2.0, 2.0, 2.0]),
        ("cyclical", [0.0, 2.0, 0.0, 2.0, 0.0]),
    ],
)
def test_the_weight_of_the_kl_over_the_steps(kind: Any, weights: list[float]) -> None:
    options = SequenceVAEOptions(kl_schedule=kind, beta=2.0, kl_warmup=0.5, kl_cycles=2)
    assert [Objective(options).weight(step, 100) for step in (0, 25, 50, 75, 100)] == pytest.approx(weights)


def test_free_bits_hold_for_each_sample() -> None:
    """A sample below the bound gets no gradient, whatever its neighbours have."""
    objective = Objective(SequenceVAEOptions(free_bits=3.0))
    kl = torch.tensor([1.0, 5.0, 2.9], requires_grad=True)
    term = objective.kl_term(kl, 0, 10)
    term.backward()
    assert term.item() == pytest.approx(3 + 5 + 3)
    assert kl.grad is not None
    assert kl.grad.tolist() == [0.0, 1.0, 0.0]


def test_perplexity_is_by_tokens_and_by_words_with_the_end() -> None:
    """Three texts of 2, 4 and 5 words and 30 tokens with the ends, by a model of 20 nats a text."""
    recipe, _ = complete("sequence-vae", {"hidden": 16, "latent": 1})
    task: Any = workload("sequence-vae").make(recipe)[0]
    sums = {"nll": (45.0, 3.0), "kl": (15.0, 3.0), "tokens": (30.0, 3.0)}
    parts: dict[str, Any] = {name: SimpleNamespace(value=v, weight=w) for name, (v, w) in sums.items()}
    parts["posterior"] = np.zeros((3, 2))

    def metrics(words: int | None) -> dict[str, Any]:
        extra = {"splits": {"valid": {"words": words, "sequences": 3}}}
        facts = Facts(fingerprint="", folder="", samples={"train": 1}, lengths=(3, 3), extra=extra)
        return task.metrics(parts, "valid", facts)

    found = metrics(2 + 4 + 5)
    assert found["perplexity"] == pytest.approx(math.exp(60 / 30))
    assert found["word_perplexity"] == pytest.approx(math.exp(60 / (3 + 5 + 6)))
    assert found["unit"] == "token, the end too"
    assert "word_perplexity" not in metrics(None), "lists of ids have no words"


def test_decoding_takes_the_likeliest_and_ends() -> None:
    model, z = network(), torch.randn(2, 3)
    found = generation.decode(model, z, tokens=6)
    for row, ids in enumerate(found):
        inputs = torch.tensor([[WORDS, *ids]])
        logits = model.decoder.head(model.decoder.states(inputs, z[row : row + 1]))[0]
        logits[:, [WORDS, WORDS + 2]] = -torch.inf
        assert logits.argmax(1).tolist()[: len(ids)] == ids
    with torch.no_grad():
        model.decoder.head.bias[WORDS + 1] = 100.0
    assert generation.decode(model, z, tokens=6) == [[], []]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_an_export_opens_again(backbone: str, tmp_path: Path) -> None:
    recipe, _ = complete("sequence-vae", {"backbone": backbone, "hidden": 16, "latent": 3, "max_length": 12})
    task, _ = workload("sequence-vae").make(recipe)
    extra = {"vocabulary": WORDS + 3, "bos": WORDS, "eos": WORDS + 1, "unk": WORDS + 2}
    facts = Facts(fingerprint="", folder="", samples={"train": 1}, lengths=(3, 3), extra=extra)
    model: Any = task.build_model(facts).eval()
    task.export(model, tmp_path, facts)
    assert set(json.loads((tmp_path / "config.json").read_text())) > {"latent", "backbone", "eos"}
    tokens, length = rows(4, 9)
    reopened, noise = generation.SequenceCodec.open(tmp_path).model, torch.randn(2, 3)
    ours, theirs = (one(tokens, length, noise)[0] for one in (model, reopened))
    assert ours.item() == theirs.item()
    codec = generation.SequenceCodec.open(tmp_path)
    assert len(codec.interpolate("1 2 3", "4,5", count=5, tokens=4)) == 5
    with pytest.raises(UserError, match="'11' is no id: this model reads numbers from 0 to 10"):
        codec.reconstruct("3 11", tokens=4)
    assert task.model_size(facts).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"max_length": 1}, "the end token"), ({"monitor": "off", "on_collapse": "stop"}, "the monitor is off")],
)
def test_what_cannot_be_had_is_said(asked: dict[str, Any], said: str) -> None:
    recipe, _ = complete("sequence-vae", asked)
    with pytest.raises(UserError, match=said):
        workload("sequence-vae").make(recipe)[0].check()


def test_flags_come_before_the_monitors_pace() -> None:
    recipe, _ = complete("sequence-vae", {"monitor": "fast", "monitor_every": 10, "monitor_window": 30})
    pace = workload("sequence-vae").make(recipe)[0].options.pace
    assert (pace.report_every, pace.window, pace.plot_every) == (10, 30, 2000)
