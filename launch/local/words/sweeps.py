"""Sweeps: lists for flags that take one value, as one set of flags for each combination.

`--lr 1e-3,3e-3 --seed 0-2` is six. Lists are for whole numbers (also as 0-2), numbers, intervals and choices;
a text may have commas of its own, and a flag such as --epochs takes a list as it is.
"""

from __future__ import annotations

import itertools
import math
import re
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue, Interval, choices_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from isobatch.core.flags import Flag
    from isobatch.core.recipe import Recipe

MOST_COMBINATIONS = 1000


@dataclass(frozen=True, slots=True)
class Combination:
    """One of a sweep's sets of flags."""

    flags: dict[str, str]
    """With one value each."""
    swept: tuple[str, ...]
    """Those that had several."""


def combinations(flags: Mapping[str, str], sweepable: Mapping[str, Flag]) -> list[Combination]:
    """Every combination of the values in `flags`, the last flag changing fastest; one where none has several.

    `sweepable`: those that may have several values. Raises UserError for too many.
    """
    values = {
        name: values_of(sweepable[name].kind, text) if name in sweepable else [text]
        for name, text in flags.items()
    }
    swept = tuple(sorted(name for name, several in values.items() if len(several) > 1))
    if math.prod(map(len, values.values())) > MOST_COMBINATIONS:
        raise UserError(f"a sweep has {MOST_COMBINATIONS:,} runs at most, and these lists make more")
    return [
        Combination(dict(zip(values, chosen, strict=True)), swept)
        for chosen in itertools.product(*values.values())
    ]


def values_of(kind: Any, text: str) -> list[str]:
    """The values that `text` lists for a flag of type `kind`, each once; the text itself where it is none."""
    if isinstance(text, BareValue) or not _takes_one_value(kind):
        return [text]
    parts = [part.strip() for part in text.split(",")]
    if int in set(_scalars(kind)):
        parts = [value for part in parts for value in _numbers(part)]
    return list(dict.fromkeys(parts)) if all(parts) else [text]


def label(recipe: Recipe, swept: Iterable[str]) -> str:
    """What a run of a sweep is called: lr0.001-seed0, the seed last, whatever the order of the flags."""
    names = sorted(swept, key=lambda name: (name == "seed", name))
    values = {name: getattr(recipe, name, recipe.options.get(name)) for name in names}
    return "-".join(name.replace("_", "-") + _as_file_name(value) for name, value in values.items())


def _as_file_name(value: Any) -> str:
    text = repr(value) if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]", "_", text.removesuffix(".0"))


def _numbers(part: str) -> list[str]:
    """0-2 as 0, 1, 2; anything else as it is."""
    match = re.fullmatch(r"(\d+)-(\d+)", part)
    if match is None or not 0 < int(match[2]) - int(match[1]) <= MOST_COMBINATIONS:
        return [part]
    return [str(number) for number in range(int(match[1]), int(match[2]) + 1)]


def _takes_one_value(kind: Any) -> bool:
    """Whether a comma can only stand between several values of a flag."""
    return set(_scalars(kind)) <= {int, float, bool, Interval, "choice"}


def _scalars(kind: Any) -> Iterable[Any]:
    """The types of single values that a flag's type is made of; `choice` for those of a list of words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if choices_of(kind):
        yield "choice"
    elif origin is typing.Annotated:
        yield from _scalars(arguments[0])
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            if argument is not type(None):
                yield from _scalars(argument)
    else:
        yield kind
