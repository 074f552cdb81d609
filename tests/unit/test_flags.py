"""Tests of core/flags.py: flags from dataclasses: every type, its text forms, its refusals and its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.core.errors import UserError
from isobatch.core.flags import Interval, convert, describe_type, flags_of, to_json_value
from isobatch.core.number_ranges import Count, Fraction, Positive, Probability, Rate, Seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The older half of the sample's fields."""

    whole: int = 1
    """A whole
    number."""
    hidden: int = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(Base):
    """A field of every type that there is."""

    positive: Positive = 1
    count: Count = 0
    seed: Seed = 0
    rate: Rate = 0.0
    fraction: Fraction = 1.0
    probability: Probability | None = None
    number: float = 0.0
    switch: bool = False
    text: str = "x"
    maybe: str | None = None
    choice: Literal["auto", "on", "off"] = "auto"
    capitals: Literal["USR1", "HUP"] = "USR1"
    bits: Literal[16, 8] = 16
    several: tuple[Positive, ...] | None = None
    way: Literal["none", "half"] | None = None
    share: Literal["balanced"] | tuple[Positive, ...] | None = None
    load: Literal[16, 8] | None = None
    interval: Interval = Interval(1, "steps")
    """How often."""


FLAGS = flags_of(Sample)

GOOD: list[tuple[str, Any, Any]] = [
    ("whole", "-3", -3),
    ("whole", 3, 3),
    ("seed", str(2**63 - 1), 2**63 - 1),
    ("rate", "3e-4", 3e-4),
    ("switch", "True", True),
    ("switch", "off", False),
    ("text", "none", "none"),
    ("maybe", 'it\'s "ünï" 日本', 'it\'s "ünï" 日本'),
    ("capitals", "hup", "HUP"),
    ("choice", "True", "on"),
    ("bits", 8, 8),
    ("way", "none", "none"),
    ("share", "none", None),
    ("several", "2,3", (2, 3)),
    ("interval", "200", Interval(200, "steps")),
    ("interval", "0.1ep", Interval(0.1, "epochs")),
    ("interval", "10m", Interval(10, "minutes")),
]


@pytest.mark.parametrize(("name", "word", "value"), GOOD)
def test_a_word_becomes_a_value(name: str, word: Any, value: Any) -> None:
    found = convert(FLAGS[name], word)
    assert found == value
    assert type(found) is type(value)


BAD: list[tuple[str, Any, str]] = [
    ("load", "none", "is not one of 16, 8"),
    ("whole", "3.5", "is not an integer"),
    ("whole", "1e-3", "is not an integer"),
    ("whole", "²", "is not an integer"),
    ("whole", True, "is not an integer"),
    ("positive", "0", "must be at least 1"),
    ("positive", "9" * 5000, "limit"),
    ("count", "-1", "must be at least 0"),
    ("rate", "nan", "is not a finite number"),
    ("fraction", "0", "must be above 0 and at most 1"),
    ("probability", "1", "at most 0.999"),
    ("switch", "maybe", "is neither on nor off"),
    ("text", "  ", "is empty"),
    ("choice", "onn", "is not one of auto, on, off (did you mean on?)"),
    ("several", "2,0", "must be at least 1"),
    ("interval", "-3", "is not an interval"),
    ("interval", "1.5", "is not an interval such as 200 (whole steps)"),
]


@pytest.mark.parametrize(("name", "word", "problem"), BAD)
def test_a_refusal_names_the_flag_the_value_and_the_way_out(name: str, word: Any, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        convert(FLAGS[name], word)
    message = str(refused.value)
    assert message.startswith(f"--{name} {word}: ")
    assert problem in message


def test_help_comes_from_the_string_under_the_field_and_from_bases() -> None:
    assert FLAGS["whole"].help == "A whole number."  # one line, however it is broken in the source
    assert FLAGS["hidden"].help == ""
    assert FLAGS["interval"].help == "How often."


def test_types_are_described_in_words() -> None:
    wanted = {
        "seed": "integer, at least 0 and at most 9.22337e+18",
        "fraction": "number, above 0 and at most 1",
        "switch": "on|off",
        "maybe": "text",
        "bits": "16|8",
        "interval": "interval",
        "share": "balanced or integer, at least 1 (or several: a,b)",
    }
    assert {name: describe_type(FLAGS[name].kind) for name in wanted} == wanted


@pytest.mark.parametrize("text", ["1000000", "1_000_000", "1e6", "1E+6", "1.0e6", "1000000.0"])
def test_a_whole_number_is_written_in_any_way(text: str) -> None:
    assert convert(FLAGS["whole"], text) == 1_000_000
    assert type(convert(FLAGS["whole"], text)) is int
    assert str(Interval.parse(text)) == "1000000"


def test_intervals_in_steps() -> None:
    assert Interval.parse("200").steps(1000, 60) == 200
    assert Interval.parse("0.1ep").steps(1000, 60) == 100  # 0.1 * 1000
    assert Interval.parse("0.1ep").steps(3, 60) == 1  # round(0.3) is 0, and never is no interval
    assert Interval.parse("5%").steps(1000, 60) == 3  # 0.05 * 60
    assert Interval.parse("2.5%").steps(1000, 8) == 1  # round(0.2) is 0


@given(st.integers(0, 2**53))
def test_whole_intervals_keep_every_digit_in_their_text(steps: int) -> None:
    assert str(Interval.parse(str(steps))) == str(steps)  # %g would make 1234567 into 1.23457e+06


@given(st.floats(0, 1e20, allow_nan=False), st.sampled_from(["epochs", "minutes"]))
def test_shares_keep_every_digit_in_their_text(value: float, unit: Any) -> None:
    assert Interval.parse(str(Interval(value, unit))) == Interval(value, unit)


@given(st.text(), st.sampled_from(sorted(FLAGS)))
def test_any_word_is_a_value_or_one_refusal(word: str, name: str) -> None:
    try:
        value = convert(FLAGS[name], word)
    except UserError:
        return
    assert convert(FLAGS[name], to_json_value(value)) == value  # what recipe.json holds gives the value again
