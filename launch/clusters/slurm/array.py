"""The runs of one submission: their names, their numbers in a job array, and the folder of its output."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from isobatch.launch.clusters.slurm.options import parse_array
from isobatch.launch.local.arguments import distinct, labelled, named, with_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from isobatch.launch.local.arguments import Request

SUBMITTED = "array.json"
"""In an array's folder once it was submitted: the run of each job."""
MAX_INDEX = 1000
"""Largest number of an array's task where the cluster does not say otherwise (MaxArraySize)."""


def numbered(points: Sequence[tuple[Request, tuple[str, ...]]], array: str | None) -> dict[int, Request]:
    """Number -> request, of a sweep's points (request, names of what was swept) with all seeds of --array.

    A task has its seed as its number where only seeds differ, else they are counted from 0.
    """
    points, seeds = distinct(points), parse_array(array)[0] if array else []
    if not array and len(points) == 1:
        return {0: points[0][0]}
    if array and not points[0][1]:
        return {seed: named(with_seed(points[0][0], seed), str(seed)) for seed in seeds}
    if array:
        points = [(with_seed(r, seed), (*swept, "seed")) for r, swept in points for seed in seeds]
    requests = [labelled(point) for point in points]
    seeds = [request.recipe.seed for request in requests]
    if set(points[0][1]) == {"seed"} and max(seeds) <= MAX_INDEX:
        return dict(zip(seeds, requests, strict=True))
    return dict(enumerate(requests))


def array_text(numbers: Iterable[int], limit: str) -> str:
    """--array for these tasks, such as 0-4,7%2; `limit`: how many may run at once, empty for all."""
    parts: list[str] = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return ",".join(parts) + (f"%{limit}" if limit else "")


def array_folder(out: Path, name: str) -> Path:
    """The folder for an array's script and output: the first slurm-NAME, slurm-NAME-2 ... that no earlier
    submission has.
    """
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    folders = (out / f"slurm-{name}{ending}" for ending in endings)
    return next(folder for folder in folders if not (folder / SUBMITTED).exists())
