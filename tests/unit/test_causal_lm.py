"""Tests of the workload causal-lm: sizes, loss, metrics, generation, checks and export, on tiny models."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isobatch.core.errors import UserError
from isobatch.data.text.plain_text import windows
from isobatch.engine.noise.keyed_noise import NativeNoise
from isobatch.models.base import StepContext
from isobatch.models.causal_lm import generation
from isobatch.models.causal_lm.generation import Sampling, TextStream, open_for_generation
from isobatch.models.causal_lm.model_sizes import PRESETS
from isobatch.models.causal_lm.task import CausalLM, DistilledOptions

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 257
STEP = StepContext(0, "evaluate", NativeNoise())


def make(model: str = "tiny", **changes: Any) -> CausalLM:
    values = {"model": model, "starts_from": None, "tokenizer": None, "revision": None, "max_length": 12}
    values |= {"seed": 0, "dropout": None, "label_smoothing": 0.0, "options": {}, "optimizer": "adamw"}
    return CausalLM(SimpleNamespace(**values | changes), DistilledOptions())


def facts(folder: Path | str = "", **extra: Any) -> Any:
    found = {"vocabulary": VOCABULARY, "tokenizer": "tokenizer.json", "eos": 256, "bos": 256, **extra}
    return SimpleNamespace(folder=str(folder), extra=found)


def batch(lengths: list[int], width: int, fill: int = 0) -> dict[str, torch.Tensor]:
    """Random rows of these lengths, padded to `width` with `fill`; the rows do not depend on either."""
    rows = torch.randint(VOCABULARY, (len(lengths), 64), generator=torch.Generator().manual_seed(1))
    length = torch.tensor(lengths)
    inside = torch.arange(width) < length[:, None]
    return {"tokens": rows[:, :width].masked_fill(~inside, fill), "length": length}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return make().build_model(facts()).eval()


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model's folder, as export writes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    prepared = tmp_path_factory.mktemp("prepared data's")
    tokenizer.save(str(prepared / "tokenizer.json"))
    folder = tmp_path_factory.mktemp("final")
    make().export(model, folder, facts(prepared))
    return folder


def tokenizer_of(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", PRESETS)
def test_the_parameter_formula_counts_what_is_built(name: str) -> None:
    task = make(name, max_length=100)
    with torch.device("meta"):
        built = sum(p.numel() for p in task.build_model(facts()).parameters())
    shape = task.model_size(facts())
    assert shape.parameters == shape.trainable == built
    assert shape.intermediate == 4 * shape.hidden


def test_loss_of_short_rows_by_hand(model: Any) -> None:
    padded = batch([12, 5, 2], 12)
    expected = 0.0
    for tokens, length in zip(padded["tokens"], padded["length"].tolist(), strict=True):
        logits = model(input_ids=tokens[None, :length]).logits[0]
        expected += F.cross_entropy(logits[:-1], tokens[1:length], reduction="sum").item()
    part = make().evaluate(model, padded, STEP)["nll"]
    assert part.value.item() == pytest.approx(expected, rel=1e-6)
    assert int(part.weight) == 11 + 4 + 1


def test_padding_changes_neither_loss_nor_gradient(model: Any) -> None:
    results = []
    for width, fill in ((7, 0), (12, 0), (12, 99)):
        model.zero_grad()
        loss = make().loss(model, batch([7, 4], width, fill), STEP)["loss"].sum
        loss.backward()
        results.append((loss.item(), model.transformer.h[0].attn.c_attn.weight.grad.clone()))
    for loss_value, gradient in results[1:]:
        assert loss_value == pytest.approx(results[0][0], rel=1e-6)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-6)


def test_perplexity_by_word_and_bits_per_byte() -> None:
    text = {"tokens": 30, "predicted": 28, "words": 10, "bytes": 60, "lines": 0}
    parts = {"nll": SimpleNamespace(value=14 * math.log(2), weight=14)}  # half of the tokens were evaluated
    found = make().metrics(parts, "valid", facts(splits={"valid": text}))
    assert found["loss"] == pytest.approx(math.log(2))
    assert found["perplexity"] == pytest.approx(2)
    assert found["word_perplexity"] == pytest.approx(2**2.8)  # 28 tokens of one bit over 10 words
    assert found["bits_per_byte"] == pytest.approx(28 / 60)
    lines = make().metrics(parts, "valid", facts(splits={"valid": {**text, "lines": 5}}))
    assert lines["word_perplexity"] == pytest.approx(2 ** (28 / 15))  # the end of a line is a word
    diverged = make().metrics({"nll": SimpleNamespace(value=1e9, weight=1)}, "valid", facts())
    assert math.isfinite(diverged["perplexity"])


@pytest.mark.parametrize(
    ("chosen", "length", "residual", "attention"),
    [(None, 12, 0.0, 0.0), (0.2, 12, 0.2, 0.2), (0.2, 513, 0.2, 0.0)],
)
def test_dropout_of_presets(chosen: float | None, length: int, residual: float, attention: float) -> None:
    config = make(dropout=chosen, max_length=length).build_model(facts()).config
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (residual, residual, attention)


def test_a_loaded_model_keeps_its_dropout_and_its_weights(saved: Path, model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "resid_pdrop": 0.3}))
    loaded: Any = make(str(folder)).build_model(facts())
    assert loaded.config.resid_pdrop == 0.3
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    torch.testing.assert_close(loaded.lm_head.weight, model.lm_head.weight)
    again: Any = make(str(folder), dropout=0.1).build_model(facts())
    assert again.config.resid_pdrop == again.config.attn_pdrop == 0.1


def test_export_reopens_with_equal_logits_and_tokens(saved: Path, model: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reopened = AutoModelForCausalLM.from_pretrained(saved)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    ids = tokenizer("def f", return_tensors="pt").input_ids
    assert torch.equal(reopened(input_ids=ids).logits, model(input_ids=ids).logits)
    assert tokenizer.decode(ids[0]) == "def f"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 256)
    assert (saved / "model.safetensors").is_file()


def test_a_sample_is_repeatable_and_leaves_the_random_state_alone(saved: Path, model: Any) -> None:
    task = make()
    found = facts(saved, prompt="def ")
    before = torch.get_rng_state()
    model.train()
    samples = [task.sample(model, found, saved) for _ in range(2)]
    assert model.training
    model.eval()
    assert samples[0] == samples[1]
    assert str(samples[0]).startswith("def ")
    assert str(samples[0]).endswith("…"), "of a text that goes on"
    assert torch.equal(before, torch.get_rng_state())


def test_a_sample_says_where_an_answer_is_empty(
    saved: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "generate_ids", lambda *_: iter(()))
    sample = make().sample(model, facts(saved, prompts=[["def ", "f()"]]), saved)
    assert sample == "def (empty answer)\n[reference: f()]"


def test_strided_windows_give_the_perplexity_of_transformers_loop(model: Any) -> None:
    """The loop in transformers' documentation: overlapping windows, only new tokens count."""
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=101)
    nll, count, done = 0.0, 0, 0
    for start in range(0, 101, 5):
        stop = min(start + 12, 101)
        ids = torch.from_numpy(tokens[start:stop])[None]
        targets = ids.clone()
        targets[:, : -(stop - done)] = -100
        kept = int((targets[:, 1:] != -100).sum())
        with torch.no_grad():
            nll += float(model(ids, labels=targets).loss) * kept
        count, done = count + kept, stop
        if stop == 101:
            break
    columns = windows(tokens, 12, 5)
    rows = np.arange(len(columns["token.weight"]))
    fetched = {name: torch.from_numpy(columns[name].rows(rows)) for name in ("tokens", "learn")}
    length = torch.from_numpy(columns["tokens"].lengths)
    with torch.no_grad():
        found: Any = make().evaluate(model, {**fetched, "length": length}, STEP)["nll"]
    assert int(found.weight) == count == columns["token.weight"].sum() == 100
    assert float(found.value) == pytest.approx(nll, rel=1e-5)


def generate(folder: Path, prompt: str, **sampling: Any) -> str:
    return prompt + "".join(TextStream(*open_for_generation(folder), prompt, Sampling(**sampling)))


def test_generate_is_greedy_at_temperature_zero_and_stops_at_the_context(saved: Path, model: Any) -> None:
    greedy = {generate(saved, "def f", max_new_tokens=5, temperature=0, seed=seed) for seed in (0, 1)}
    tokenizer = tokenizer_of(saved)
    ids = torch.tensor([tokenizer.encode("def f").ids])
    theirs = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=256, pad_token_id=256)
    assert greedy == {tokenizer.decode(theirs[0].tolist())}
    # 64 positions in all: the last 32 tokens of a long prompt, and at most 32 written behind it.
    text = generate(saved, "x" * 500, max_new_tokens=1000, temperature=1.0, seed=0)
    assert text.startswith("x" * 500)
    assert 500 < len(text) <= 532
    with pytest.raises(UserError, match=r"holds no trained model"):
        generate(saved / "nothing", "x", max_new_tokens=1, temperature=0, seed=0)


@pytest.mark.parametrize("cold", [5e-324, 1e-300, 1e-39, 1e-9])
def test_a_temperature_near_zero_takes_the_likeliest(saved: Path, cold: float) -> None:
    greedy = generate(saved, "def f", max_new_tokens=9, temperature=0)
    assert generate(saved, "def f", max_new_tokens=9, temperature=cold) == greedy


def test_a_piece_is_written_for_each_token_and_together_they_are_the_text(saved: Path) -> None:
    net, tokenizer = open_for_generation(saved)
    stream = TextStream(net, tokenizer, "déf", Sampling(max_new_tokens=50, temperature=2.0, seed=3))
    pieces = list(stream)
    assert len(pieces) == stream.tokens > 20
    assert "" in pieces, "no character of several tokens was drawn"
    ids = tokenizer.encode("déf").ids
    generated = generation.generate_ids(net, ids, 50, Sampling(max_new_tokens=50, temperature=2.0, seed=3))
    assert tokenizer.decode([*ids, *generated]).rstrip("\ufffd") == ("déf" + "".join(pieces)).rstrip("\ufffd")


def bad_folders(folder: Path) -> Path:
    (folder / "bare").mkdir()
    (folder / "no tokenizer").mkdir()
    numbers = {"model_type": "gpt2", "n_positions": 8, "vocab_size": 100}
    (folder / "no tokenizer" / "config.json").write_text(json.dumps(numbers))
    return folder


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("tinny", {}, "did you mean tiny?"),
        ("./bare", {}, "no config.json"),
        ("./no tokenizer", {}, "holds no tokenizer"),
        ("./no tokenizer", {"tokenizer": "x"}, "--max-length 12: ./no tokenizer reads at most 8 tokens"),
        ("gpt2-124m", {"max_length": 2048}, "--max-length 2048: gpt2-124m reads at most 1024 tokens"),
        ("tiny", {"max_length": 1}, "at least 2 tokens"),
        ("a-team/a-model", {}, "--model a-team/a-model: there is no such file or folder"),
    ],
)
def test_bad_input_is_answered_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(bad_folders(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        make(model, **changes).check()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2
    assert time.monotonic() - start < 2


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(saved: Path) -> None:
    for step in (make(str(saved)).model_size, make(str(saved)).build_model):
        with pytest.raises(UserError, match=r"knows 257 tokens, and the tokenizer has 300"):
            step(facts(vocabulary=300))


@pytest.mark.parametrize(
    ("typed", "limit"),
    [({}, 64), ({"max_length": 100}, None), ({"model": "small"}, None), ({"model": "no/ne"}, None)],
)
def test_a_model_that_reads_little_limits_what_was_not_asked_for(
    saved: Path, typed: dict[str, Any], limit: int | None
) -> None:
    """The model of `saved` has 64 positions; the usual --max-length is longer."""
    assert CausalLM.complete({"model": str(saved), **typed}).get("max_length") == limit
