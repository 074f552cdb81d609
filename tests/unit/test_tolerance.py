"""Tests of engine/verification/tolerance.py, and of what a run measures for it."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
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


def test_further_from_a_common_state_flipped_levels_have_spread() -> None:
    run, other = run_of(invariance="rounding", rounding=(1e-6, 1e-6)), plan(invariance="rounding")
    assert [tolerances(run, other, n) for n in (3, 5, 6)] == [TOLERANCE["exact"], CEILING, FAR]
    assert [claimed_rounding(run, n) for n in (3, 5, 6)] == [CEILING, CEILING, FAR]
    assert tolerances(run_of(), plan(), 100) == TOLERANCE["exact"]


@pytest.mark.parametrize(
    ("measured", "own", "other"),
    [  # verdicts on what differs by 0, 1e-5, 1e-3, 2.5e-3, 0.4, infinity
        (8e-3, "hhuudd", "hhhudd"),
        (1e-6, "hhuddd", "hhuddd"),
        (1.0, "hhuuud", "hhhuud"),
        (math.inf, "hhuuuu", "hhhuuu"),
        (math.nan, "hhuddd", "hhuddd"),
        (None, "hhuddd", "hhhddd"),
    ],
)
@pytest.mark.parametrize("figure", ["loss_difference", "part", "norm_difference"])
def test_what_a_run_that_rounds_measured_is_no_proof(
    figure: str, measured: float | None, own: str, other: str
) -> None:
    """holds, unproven, differs: under its own cut it holds to what exact runs do."""
    run = run_of(invariance="rounding", rounding=measured and (measured, 100 * measured))
    scale = 100 if figure == "norm_difference" else 1  # as of the bounds
    for redone_by, verdicts in (
        (run.plan, own),
        (dataclasses.replace(run.plan, micro_batch_samples=3), other),
    ):
        found = ""
        for differs in (0.0, 1e-5, 1e-3, 2.5e-3, 0.4, math.inf, math.nan):
            step = {"phase": "qat", "step": 3, "after": 3, "loss": 1.0, "logged_loss": 1.0, "norm": 1.0}
            step |= {
                "logged_norm": 1.0,
                "loss_difference": 0.0,
                "norm_difference": 0.0,
                figure: scale * differs,
            }
            step["parts"] = {"nll": step.pop("part", 0.0)}
            redone: Any = SimpleNamespace(steps=[step], covered=[], weights={})
            proof = Proof("steps")
            proof.add(redone, partial(tolerances, run, redone_by), partial(claimed_rounding, run))
            found += "d" if proof.problems else "u" if proof.unproven else "h"
        assert found == verdicts + "d"


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
