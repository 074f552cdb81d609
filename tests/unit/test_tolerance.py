"""Tests of engine/verification/tolerance.py, and of what a run measures for it."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from isobatch.core.plan import INVARIANCES
from isobatch.engine.verification.proof import Proof, stretches, wrong_metrics
from isobatch.engine.verification.tolerance import (
    FAR,
    FEW,
    SAME_DEVICE,
    TOLERANCE,
    claimed_rounding,
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


@pytest.mark.parametrize(
    ("differs", "part", "measured", "verdict"),
    [
        (1e-3, 0.0, 8e-3, "holds"),
        (2.5e-3, 0.0, 8e-3, "not proven"),
        (1e-3, 4e-3, 8e-3, "not proven"),
        (2.5e-3, 4e-3, 5e-4, "differs"),
        (4e-2, 0.0, 8e-3, "differs"),
        (math.nan, 0.0, math.inf, "differs"),
        (2.5e-3, 0.0, math.nan, "differs"),
        (2.5e-3, 0.0, None, "differs"),
    ],
)
def test_what_another_cut_moves_a_rounding_run_by_is_no_forgery(
    differs: float, part: float, measured: float | None, verdict: str
) -> None:
    """Beyond what is ever allowed it proves nothing, if the run measured as much."""
    run = run_of(invariance="rounding", rounding=measured and (measured, 0.0))
    losses = {"loss": 1.0, "logged_loss": 1.0 + differs, "loss_difference": differs, "parts": {"nll": part}}
    step = {"phase": "qat", "step": 3, "after": 3, "norm_difference": 0.0, **losses}
    proof = Proof("steps")
    redone: Any = SimpleNamespace(steps=[step], covered=[], weights={})
    proof.add(redone, lambda _: CEILING, claimed=claimed_rounding(run))
    found = "differs" if proof.problems else "not proven" if proof.unproven else "holds"
    assert found == verdict


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
