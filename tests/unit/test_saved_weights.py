"""Weights of somebody else's model that cannot be read, or may not."""

from __future__ import annotations

import os
from datetime import date
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from isobatch.core.errors import UserError
from isobatch.engine.runs.classify_errors import classify

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("how", ["more than tensors", "cut pickle", "no pickle", "cut safetensors"])
def test_weights_that_are_not_read_are_one_line(how: str, tmp_path: Path) -> None:
    """As transformers opens them, for every flag that names a model."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16, n_positions=8))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if how != "cut safetensors":
        file.unlink()
        file = tmp_path / "pytorch_model.bin"
        torch.save({"x": torch.zeros(1), **({"made": date(2026, 1, 1)} if "more" in how else {})}, file)
    if how != "more than tensors":
        file.write_bytes(b"words" if how == "no pickle" else file.read_bytes()[:-40])
    with pytest.raises(Exception) as raised:  # noqa: PT011
        GPT2LMHeadModel.from_pretrained(tmp_path)
    error = classify(raised.value)
    assert isinstance(error, UserError)
    assert str(tmp_path) in str(error)
    assert "weights_only" not in str(error)


@pytest.mark.parametrize("said", ["No such file or directory: {}", ""])
def test_weights_that_a_user_may_not_read_are_one_line(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors says that they are not there; torch's file has its name."""
    file = tmp_path / "weights"
    file.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    denied = (
        FileNotFoundError(said.format(file)) if said else PermissionError(13, "Permission denied", str(file))
    )
    assert str(classify(denied)) == f"{file}: Permission denied: it must be readable (chmod a+r)"
    assert classify(FileNotFoundError(f"No such file or directory: {file}.none")) is None
