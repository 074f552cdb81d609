"""Tests of launch/report/pareto.py: which points nothing beats, and which one is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.core.errors import UserError
from isobatch.launch.report import pareto
from isobatch.launch.report.pareto import Point, choose, front

SMALL = st.integers(0, 4)
POINTS = st.lists(
    st.builds(
        lambda number, score, size, one, many: Point(
            str(number), score / 10, size, (float(one), float(many)), Path("model.onnx"), 10
        ),
        st.integers(),
        SMALL,
        SMALL,
        SMALL,
        SMALL,
    ),
    min_size=1,
)
CHOICES = st.sampled_from(["smallest", "fastest", "accurate", "within 0%", "within 15%", "within 100%"])


@given(POINTS)
def test_a_point_is_off_the_front_only_where_one_on_it_is_nowhere_worse(points: list[Point]) -> None:
    best = front(points)
    assert best
    for one in points:
        better = [b for b in best if all(x <= y for x, y in zip(b.costs, one.costs, strict=True))]
        assert better, "every point is on the front, or has one there that is as good in everything"
        assert (one in best) == all(b.costs == one.costs for b in better)


@given(POINTS, CHOICES)
def test_the_choice_is_on_the_front_and_keeps_its_word(points: list[Point], choice: str) -> None:
    chosen = choose(points, choice)
    assert chosen in front(points)
    if choice == "smallest":
        assert chosen.file_bytes == min(one.file_bytes for one in points)
    elif choice == "fastest":
        assert chosen.milliseconds[0] == min(one.milliseconds[0] for one in points)
    else:
        slack = float(choice.removeprefix("within ").removesuffix("%").replace("accurate", "0")) / 100
        slack = max(slack, 1 / 10)  # one sample of ten decides nothing
        near = [one for one in points if one.score >= max(p.score for p in points) - slack - 1e-9]
        assert chosen in near
        assert chosen.milliseconds[0] == min(one.milliseconds[0] for one in near)


def test_half_a_point_of_accuracy_is_given_for_speed_and_no_more() -> None:
    dense = Point("dense", 0.970, 90, (8.0,), Path("a"), 1000)
    half = Point("half", 0.966, 15, (2.0,), Path("b"), 1000)
    tiny = Point("tiny", 0.910, 5, (1.0,), Path("c"), 1000)
    assert [choose([dense, half, tiny], c) for c in ("accurate", "within 0.5%", "fastest")] == [
        dense,
        half,
        tiny,
    ]


@pytest.mark.parametrize("choice", ["accurate", "within 0.5%"])
@pytest.mark.parametrize(("behind", "chosen"), [(0, "small"), (1, "small"), (2, "base")])
def test_one_text_of_few_decides_against_no_smaller_file(choice: str, behind: int, chosen: str) -> None:
    """One of 54 is 1.9 points; two count."""
    base = Point("base", 50 / 54, 90, (8.0,), Path("a"), 54)
    small = Point("small", (50 - behind) / 54, 15, (2.0,), Path("b"), 54)
    assert choose([base, small], choice).name == chosen


def test_the_chosen_one_is_marked_beside_those_that_nothing_beats() -> None:
    base = Point("base", 0.9, 90, (8.0,) * len(pareto.TIMED), Path("a"), 54)
    small = Point("small", 0.8, 15, (2.0,) * len(pareto.TIMED), Path("b"), 54)
    worse = Point("worse", 0.7, 16, (3.0,) * len(pareto.TIMED), Path("c"), 54)
    _, *lines, legend = pareto.text_of([base, small, worse], small, "fastest", Path("d")).splitlines()
    assert [line.split()[:2] for line in lines] == [["*", "base"], [">*", "small"], ["worse", "70.00"]]
    assert legend == "* nothing beats it; > --choose fastest: d"


@pytest.mark.parametrize("choice", ["best", "within", "within 0.5", "within 101%", "within -1%", ""])
def test_another_choice_is_one_line(choice: str) -> None:
    with pytest.raises(UserError, match="smallest, fastest, accurate, or"):
        pareto.check_choice(choice)


def test_what_is_copied_is_the_file_with_what_it_needs(tmp_path: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()
    for name in ("model-int4.onnx", "model.safetensors", "config.json", "tokenizer.json", "README.md"):
        (final / name).write_text("{}" if name == "config.json" else name)
    point = Point("small", 1.0, 1, (1.0,), final / "model-int4.onnx", 9)
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen" / "earlier.onnx").touch()
    file = pareto.copy(point, tmp_path / "chosen")
    assert file.read_text() == "model-int4.onnx"
    assert sorted(f.name for f in file.parent.iterdir()) == [
        "config.json",
        "model-int4.onnx",
        "tokenizer.json",
    ]
