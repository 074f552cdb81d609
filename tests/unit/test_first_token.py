"""Tests of models/encoder/first_token.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobatch.models.encoder import evaluation, first_token, onnx_graph
from isobatch.models.encoder.first_token import keep_first_token
from isobatch.tests.unit import encoders

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")


@pytest.mark.parametrize(
    ("family", "more", "least"),
    [
        *[(family, {}, 15) for family in ("bert", "roberta", "distilbert", "electra", "xlm-roberta")],
        ("modernbert", {"classifier_pooling": "cls"}, 10),
        ("modernbert", {"classifier_pooling": "mean"}, 0),  # its head reads all tokens
        ("deberta-v2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, 8),
        ("gpt2", {"n_layer": 2, "n_embd": 64, "n_head": 4}, 0),  # its head reads the last one
    ],
)
def test_the_last_layer_for_the_first_token_answers_the_same(
    family: str, more: dict[str, Any], least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def counted(graph: Any) -> int:
        counts.append(keep_first_token(graph))
        return counts[-1]

    monkeypatch.setattr(first_token, "keep_first_token", counted)
    model = encoders.classifier(family, **more)
    onnx_graph.write_onnx(model, first := tmp_path / "first.onnx")
    (moved,) = counts
    onnx.checker.check_model(first)
    assert moved >= least
    assert (moved > 0) == (least > 0)
    run_file = evaluation.onnx_runner(first, 1)
    for rows, width in ((6, 19), (1, 7), (2, 33)):
        inputs = encoders.given(rows, width)
        expected, found = (run(inputs) for run in (evaluation.torch_runner(model), run_file))
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
        assert np.ptp(expected) > 1e-3
