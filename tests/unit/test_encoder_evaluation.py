"""Tests of models/encoder/evaluation.py and of models/encoder/report.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isobatch.models.encoder import class_metrics
from isobatch.models.encoder.report import compare, verdicts


def test_mcnemar_is_the_exact_binomial_of_the_samples_they_disagree_on() -> None:
    one = np.array([True] * 8 + [False] * 1 + [True] * 100)
    other = np.array([False] * 8 + [True] * 1 + [True] * 100)
    # 9 disagreements, 1 of them one way: 2 * (C(9,0) + C(9,1)) / 2^9
    assert class_metrics.mcnemar(one, other) == pytest.approx(2 * (1 + 9) / 512)
    assert class_metrics.mcnemar(one, one) == 1.0


def row(right: int, of: int, *ms: float, run: str = "a", runtime: str = "torch") -> dict:
    """`ms`: of the rounds; one for all, or nine."""
    rounds = list(ms) * (9 if len(ms) == 1 else 1)
    return {
        "run": run,
        "setting": run,
        "runtime": runtime,
        "problem": "classes",
        "class_names": ["bad", "good"],
        "accuracy": right / of,
        "evidence": [[0, 0, 1]] * right + [[0, 1, 1]] * (of - right),
        "labels": [0] * of,
        "batch_1": {"p50": float(np.median(rounds)), "rounds": rounds},
        "batch_1_all_threads": {"p50": 0.5 * float(np.median(rounds)), "rounds": rounds},
    }


def compared(rows: list[dict]) -> list[dict]:
    """With the speeds that stand in the rows."""
    return compare([one | {"opened": {}} for one in rows], lambda _, models: [{} for _ in models])


def test_a_difference_inside_the_noise_is_called_that() -> None:
    near = row(88, 100, *(10, 9, 11, 10, 8, 12, 10, 9, 11))
    first, near, worse = compared([row(90, 100, 10), near, row(70, 100, 4, 4, 5, 4, 5, 4, 4, 4, 5)])
    assert (first["accuracy_verdict"], first["speed_verdict"]) == ("baseline", "baseline")
    assert (near["accuracy_verdict"], near["speed_verdict"]) == ("within the noise", "within the noise")
    assert (worse["accuracy_verdict"], worse["speed_verdict"]) == ("worse", "faster")
    assert (worse["speedup"], worse["speedup_ci95"]) == (2.5, [2, 2.5])


def test_the_interval_of_a_difference_is_that_of_its_paper() -> None:
    """Agresti and Min 2005: with 8 and 2 disagreements of 100, 8.5 and 2.5 of 102."""
    one = np.array([True] * 8 + [False] * 2 + [True] * 90)
    other = np.array([False] * 8 + [True] * 2 + [True] * 90)
    middle, half = 6 / 102, 1.959964 * np.sqrt(11 - 36 / 102) / 102
    assert class_metrics.paired_difference(one, other) == pytest.approx((0.06, middle - half, middle + half))


def test_speed_is_compared_within_a_runtime() -> None:
    both = [(run, runtime) for run in ("big", "small") for runtime in ("torch", "onnx")]
    times = {("big", "torch"): 8.0, ("big", "onnx"): 4.0, ("small", "torch"): 4.0, ("small", "onnx"): 1.0}
    rows = compared([row(9, 10, times[one], run=one[0], runtime=one[1]) for one in both])
    assert [one["speedup"] for one in rows] == [1, 1, 2, 4]
    assert [one["speed_verdict"] for one in rows] == ["baseline", "baseline", "faster", "faster"]


def test_models_of_other_samples_are_not_compared() -> None:
    _, other = compared([row(90, 100, 10), row(45, 50, 10)])
    assert other["mcnemar_p"] is None
    assert "not comparable" in other["accuracy_verdict"]


def test_seeds_of_one_setting_are_not_tested_against_each_other() -> None:
    rows = [worth("s0", 70, 10), worth("s1", 95, 10), worth("other", 95, 10)]
    rows = compared([rows[0], rows[1] | {"setting": "s0"}, rows[2]])
    found = [(one["accuracy_verdict"], one["mcnemar_p"] is None) for one in rows[1:]]
    assert found == [("another seed", True), ("better", False)]
    assert [line.partition(",")[0] for line in verdicts(rows)[1:]] == ["other"]


def beside(name: str, score: float, verdict: str, value: float, p: float) -> dict[str, Any]:
    limits = {"low": value - 0.05, "high": value + 0.05}
    return {"name": name, "score": score, "verdict": verdict, "value": value, **limits, "p": p}


LARGEST = beside("the largest class", 0.6, "better", 0.3, 1e-9)
TF_IDF = beside("TF-IDF", 0.85, "better", 0.06, 0.01)


def worth(run: str, right: int, ms: float, runtime: str = "torch", file_bytes: int = 90_000_000) -> dict:
    shown = {
        "form": f"{runtime} fp32",
        "file_bytes": file_bytes,
        "samples": 100,
        "split": "test",
        "accuracy_ci95": [0.82, 0.94],
    }
    shown |= {"confusion": [[36, 4], [6, 54]], "baselines": [LARGEST, TF_IDF], "chosen": False}
    return row(right, 100, ms, run=run, runtime=runtime) | shown


@pytest.mark.parametrize(
    ("rival", "said"),
    [
        (TF_IDF, "a, torch fp32 is ahead of TF-IDF on 100"),
        (TF_IDF | {"verdict": "within the noise"}, "a, torch fp32 is within the noise of TF-IDF on 100"),
        (TF_IDF | {"verdict": "worse", "score": 0.97}, "TF-IDF is ahead of a, torch fp32 on 100"),
    ],
)
def test_the_first_line_says_who_wins(rival: dict[str, Any], said: str) -> None:
    models = [worth("a", 90, 5) | {"baselines": [LARGEST, rival]}]
    first = verdicts(compared(models))[0]
    assert first.startswith(said)
    assert "TF-IDF 85.0 % (+6.0 points, +1.0 to +11.0, p 0.010)" in first or rival["score"] == 0.97
    alone = verdicts(compared([worth("a", 90, 5) | {"baselines": [LARGEST]}]))[0]
    assert "without scikit-learn nothing else was compared" in alone


def test_a_sentence_says_what_the_small_model_costs_and_gains() -> None:
    small = worth("small", 89, 1, "onnx", 10_000_000)
    ahead, *alone = verdicts(compared([worth("big", 90, 8), small]))
    assert ahead.startswith("big, torch fp32 is ahead of TF-IDF on 100 test samples: accuracy 90.0 %")
    assert alone == [
        "small, onnx fp32, against big: test accuracy 89.0 % against 90.0 % (within the noise: at most 3.7"
        " points worse, with 97.5 % confidence); a file of 10 MB, 9.0 times smaller; 1.00 ms a text in"
        " onnxruntime, 8.00 in torch."
    ]
    _, alike = verdicts(compared([worth("big", 90, 8), worth("big", 90, 4, "onnx"), small]))
    assert alike.endswith("9.0 times smaller; 4.0 times the speed in onnxruntime (4.0 to 4.0).")


def test_the_form_that_was_chosen_is_compared() -> None:
    """Else the last one."""
    forms = [worth("small", 89, ms, "onnx") | {"form": form} for form, ms in (("dynamic", 1), ("static", 2))]
    for chosen, said in (((False, False), "static"), ((True, False), "dynamic")):
        marked = [one | {"chosen": is_it} for one, is_it in zip(forms, chosen, strict=True)]
        _, alone = verdicts(compared([worth("big", 90, 8), *marked]))
        assert alone.startswith(f"small, {said}, against big: ")
