"""The points of a sweep: requests, each with the names of what was swept."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from isobatch.launch.local.words.sweeps import label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.launch.local.arguments import Request

    Point = tuple[Request, tuple[str, ...]]


def distinct(points: Sequence[Point]) -> list[Point]:
    """The points without those of an equal recipe: of equal values, however spelt, the first stays."""
    found = {request.recipe.hash(): (request, swept) for request, swept in reversed(points)}
    return list(reversed(found.values()))


def labelled(point: Point) -> Request:
    """The point's request, named after its values."""
    request, swept = point
    return named(request, label(request.recipe, swept))


def named(request: Request, ending: str) -> Request:
    """With the ending behind --name; a run without a name is called after its recipe."""
    name = f"{request.run.name}-{ending}" if request.run.name else None
    return dataclasses.replace(request, run=dataclasses.replace(request.run, name=name))


def with_seed(request: Request, seed: int) -> Request:
    """The request with another seed."""
    return dataclasses.replace(request, recipe=dataclasses.replace(request.recipe, seed=seed))
