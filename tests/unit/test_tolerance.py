"""Tests of engine/verification/tolerance.py, and of what a run measures for it."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from isobatch.core.plan import INVARIANCES
from isobatch.engine.verification.proof import stretches, wrong_metrics
from isobatch.engine.verification.tolerance import (
    FAR,
    FEW,
    SAME_DEVICE,
    TOLERANCE,
    rounding_tolerance,
    tolerances,
)
from isobatch.tests.paths import ROOT
from isobatch.tests.unit.helpers import plan

CEILING = TOLERANCE["rounding"]


def run_of(**fields: Any) -> Any:
    return SimpleNamespace(plan=plan(**fields))


def test_the_weaker_of_both_plans_counts() -> None:
    assert tuple(TOLERANCE) == INVARIANCES
    assert tolerances(run_of(), plan()) == SAME_DEVICE
    assert tolerances(run_of(), plan(device="cuda")) == TOLERANCE["exact"]
    assert tolerances(run_of(), plan(), FEW + 1) == TOLERANCE["exact"]
    assert tolerances(run_of(), plan(invariance="precision")) == TOLERANCE["precision"]
    assert tolerances(run_of(invariance="noise"), plan(invariance="rounding")) == TOLERANCE["noise"]


def test_a_rounding_run_is_allowed_four_times_what_it_measured() -> None:
    run = run_of(invariance="rounding", rounding=(1e-4, 3e-3))
    assert tolerances(run, plan(invariance="rounding")) == pytest.approx((4e-4, 1.2e-2))


@pytest.mark.parametrize("claimed", [1.0, math.inf, 0.0, math.nan])
def test_a_claim_stays_between_exact_plans_and_the_ceiling(claimed: float) -> None:
    pairs = zip(TOLERANCE["exact"], rounding_tolerance((claimed, claimed)), CEILING, strict=True)
    assert all(least <= found <= most for least, found, most in pairs)


def test_further_from_a_common_state_flipped_levels_have_spread() -> None:
    run, other = run_of(invariance="rounding", rounding=(1e-6, 1e-6)), plan(invariance="rounding")
    assert [tolerances(run, other, n) for n in (3, 5, 6)] == [TOLERANCE["exact"], CEILING, FAR]
    assert tolerances(run_of(), plan(), 100) == TOLERANCE["exact"]


def test_the_guarantees_have_the_same_words_and_numbers() -> None:
    """The last column of its table of invariances: `1e-4, 1e-2`."""
    row = r"^\| `(\w+)` \|.*\| ([\de.-]+), ([\de.-]+)(?: at most)? \|$"
    table = re.findall(row, (ROOT / "docs" / "guarantees.md").read_text(), re.M)
    assert {name: (float(loss), float(norm)) for name, loss, norm in table} == TOLERANCE


def test_a_row_that_rounding_counts_elsewhere_may_move_what_follows_from_counts() -> None:
    """One of five rows of the rare class flipped: its recall by 1/5, accuracy by 1/105 and no more."""
    logged = {"accuracy": 103 / 105, "recall_macro": (100 / 100 + 3 / 5) / 2, "confusion": [[100, 0], [2, 3]]}
    metrics = {
        "accuracy": 104 / 105,
        "recall_macro": (100 / 100 + 4 / 5) / 2,
        "confusion": [[100, 0], [1, 4]],
    }

    def wrong(**changes: Any) -> list[str]:
        found = wrong_metrics({"valid": {**logged, **changes}}, {"valid": metrics}, {"valid": 105}, 1e-4)
        return [problem.split()[0] for problem in found]

    assert wrong() == []
    assert wrong(accuracy=0.9) == ["accuracy"]
    assert wrong(recall_macro=0.05) == ["recall_macro"]
    assert wrong(confusion=[[100, 0], [5, 0]]) == ["recall_macro", "confusion"]
    assert wrong(confusion="none", recall_macro=0.9) == ["confusion"]


def test_steps_are_named_by_their_stretches() -> None:
    assert stretches([139, 1, 2, 3, 138, 140, 7]) == "1-3 and 7 and 138-140"
    assert stretches([]) == ""
