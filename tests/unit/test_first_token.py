"""Tests of models/encoder/first_token.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobatch.models.encoder import evaluation, export
from isobatch.models.encoder.first_token import keep_first_token
from isobatch.tests.unit import encoders

onnx = pytest.importorskip("onnx")
onnx_ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")
SMALL = {"local_attention": 8, "classifier_pooling": "cls", "bos_token_id": 1, "eos_token_id": 2}
POOLS_ALL = {**SMALL, "classifier_pooling": "mean"}


@pytest.mark.parametrize(
    ("family", "more", "least"),
    [
        *[(family, {}, 24) for family in ("bert", "roberta", "distilbert", "electra", "xlm-roberta")],
        ("modernbert", SMALL, 10),
        ("modernbert", POOLS_ALL, 0),  # its head reads all tokens
        ("deberta-v2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, 8),
        ("gpt2", {"n_layer": 2, "n_embd": 64, "n_head": 4}, 0),  # its head reads the last one
    ],
)
def test_the_last_layer_for_the_first_token_answers_the_same(
    family: str, more: dict[str, Any], least: int, tmp_path: Path
) -> None:
    whole, first = tmp_path / "whole.onnx", tmp_path / "first.onnx"
    export.trace_onnx(encoders.classifier(family, **more), whole)
    moved = keep_first_token((model := onnx_ir.load(whole)).graph)
    onnx_ir.save(model, first)
    onnx.checker.check_model(first)
    assert moved >= least
    assert (moved > 0) == (least > 0)
    for rows, width in ((6, 19), (1, 7), (2, 33)):
        inputs = encoders.given(rows, width)
        expected, found = (evaluation.onnx_runner(file, 1)(inputs) for file in (whole, first))
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=0)
        assert np.ptp(expected) > 1e-3
