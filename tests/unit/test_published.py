"""Tests of benchmarks/quality/published.py: predictions are near published figures, or a row says why not."""

from __future__ import annotations

from typing import Any

import pytest

from isobatch.benchmarks.quality import published

ROWS = published.measure(quick=True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['source']}-{row['what']}")
def test_a_prediction_is_near_or_says_why_not(row: dict[str, Any]) -> None:
    assert (abs(row["off %"]) <= row["allowed %"]) != bool(row["reason"])


def test_what_others_measured_needs_no_excuse() -> None:
    measured = [row for row in ROWS if row["source"] in ("nanoGPT", "Qwen")]
    assert len(measured) == 11
    assert [row["what"] for row in measured if row["reason"]] == []
