"""Tests of models/encoder/weight_surgery.py: pruned models keep their logits, go on training, and reopen."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from isobatch.engine.checkpointing.portable_state import cut_moments
from isobatch.models import saving
from isobatch.models.encoder import encoders, export, weight_surgery
from isobatch.tests.unit.encoders import FAMILIES, NEURONS, classifier, given, logits, some_masks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("family", FAMILIES)
def test_removing_masked_units_keeps_the_logits(family: str) -> None:
    model = classifier(family)
    whole = logits(model)
    weight_surgery.set_masks(encoders.layers(model), some_masks())
    masked = logits(model)
    weight_surgery.remove_masked(encoders.layers(model))
    assert (masked - whole).abs().max() > 1e-2
    assert (logits(model) - masked).abs().max() < 1e-5
    assert encoders.heads_and_neurons(model) == [(2, 64), (0, 96), (4, 128)]


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        logits(model).square().sum().backward()
        optimizer.step()


def test_optimizer_moments_shrink_with_the_weights() -> None:
    """Two masked steps, then removal: the third step is that of a model that stayed masked."""
    model = classifier("bert")
    weight_surgery.set_masks(encoders.layers(model), some_masks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    steps(model, optimizer, 2)
    stays = copy.deepcopy(model)
    again = torch.optim.AdamW(stays.parameters(), lr=1e-3, weight_decay=0.0)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    moments = {name: dict(optimizer.state.get(p, {})) for name, p in model.named_parameters()}
    cuts = weight_surgery.remove_masked(encoders.layers(model))
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for name, p in model.named_parameters():
        fresh.state[p] = dict(cut_moments(moments, cuts)[name])
    steps(model, fresh, 1)
    steps(stays, again, 1)
    assert (logits(model) - logits(stays)).abs().max() < 1e-5
    lost = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    steps(model, lost, 1)  # the control: without moments the next step is another
    steps(stays, again, 1)
    assert (logits(model) - logits(stays)).abs().max() > 1e-4


def test_a_new_model_takes_the_saved_shapes_and_buffers() -> None:
    model = classifier("bert")
    weight_surgery.set_masks(encoders.layers(model), some_masks())
    first = encoders.layers(model)[2]
    weight_surgery.mask_inputs(first.down, torch.arange(NEURONS) >= 32)
    weight_surgery.remove_masked(encoders.layers(model)[:2])
    first.down.register_buffer(weight_surgery.IMPORTANCE, torch.rand(NEURONS))
    state = model.state_dict()
    fresh = classifier("bert")
    assert weight_surgery.match_shapes(encoders.layers(fresh), {k: tuple(v.shape) for k, v in state.items()})
    fresh.load_state_dict(state)
    assert torch.equal(logits(fresh), logits(model))


def saved(family: str, facts: Any, folder: Path, head: str = encoders.SEQUENCE) -> Any:
    model = classifier(family, head)
    weight_surgery.set_masks(encoders.layers(model), some_masks())
    weight_surgery.remove_masked(encoders.layers(model))
    folder.mkdir()
    saving.save(model, facts, folder)
    encoders.write_layer_sizes(model, folder)
    return model


HEADS = (encoders.SEQUENCE, encoders.TOKENS)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pruned_model_reopens_pruned_and_dense(
    family: str, head: str, tmp_path: Path, tiny_facts: Any
) -> None:
    folder, padded = tmp_path / "final", tmp_path / "dense"
    padded.mkdir()
    wanted = logits(saved(family, tiny_facts, folder, head))
    assert wanted.dim() == (3 if head == encoders.TOKENS else 2)
    model = encoders.open_classifier(str(folder))
    torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-6)
    export.export_dense(model, folder, padded)
    config = json.loads((padded / "config.json").read_text())
    assert "per_layer_config" not in config
    assert config["architectures"] == [type(classifier(family, head)).__name__]
    dense = encoders.open_classifier(str(padded))
    assert encoders.heads_and_neurons(dense) == [(4, NEURONS)] * 3
    assert (logits(dense) - wanted).abs().max() < 1e-5


OPEN = """
import sys, numpy as np, torch
import transformers
assert not any(m in sys.modules for m in ("models", "engine"))
final, dense, file, head = sys.argv[1:]
given = {k: torch.from_numpy(v) for k, v in np.load(file).items()}
def logits(folder, remote):
    kind = getattr(transformers, "AutoModelFor" + head)
    model = kind.from_pretrained(folder, trust_remote_code=remote)
    return model.eval()(**given).logits.detach().numpy()
try:
    logits(final, False)
except Exception:
    found = {"dense": logits(dense, False), "with its code": logits(final, True)}
    np.savez(file + ".logits.npz", **found)
"""


@pytest.mark.parametrize(("family", "head"), [("bert", encoders.SEQUENCE), ("modernbert", encoders.TOKENS)])
def test_a_pruned_model_needs_its_code_and_a_dense_one_none(
    family: str, head: str, tmp_path: Path, tiny_facts: Any
) -> None:
    """By transformers alone, in a process that does not know this project."""
    import numpy as np

    folder, padded = tmp_path / "final", tmp_path / "dense"
    padded.mkdir()
    wanted = logits(saved(family, tiny_facts, folder, head)).detach().numpy()
    np.savez(given_file := tmp_path / "given.npz", **given())  # type: ignore[arg-type]
    export.export_dense(encoders.open_classifier(str(folder)), folder, padded)
    words = [sys.executable, "-c", OPEN, str(folder), str(padded), str(given_file), head]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "given.npz.logits.npz")  # not there if it opened without its code
    assert np.abs(found["with its code"] - wanted).max() < 1e-6
    assert np.abs(found["dense"] - wanted).max() < 1e-5
