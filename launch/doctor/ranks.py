"""Who waits for whom: the last step of each rank of a run, from ranks.json."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from isobatch.launch.doctor.check import Check, broken, ok, warning

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SILENT_SECONDS = 30.0
"""Ranks speak every second."""
STILL_SECONDS, STILL_STEPS = 60.0, 10.0
"""All ranks stand still for that long, and for so many steps: the run hangs."""
OLD_SECONDS = 60.0
"""Rank 0 writes every ten seconds."""


def check_ranks(
    record: Mapping[str, Any], age: float, training: bool, folder: str, step_seconds: float = 0.0
) -> Check:
    """`age`: seconds since ranks.json was written; `training`: whether a process still holds the run;
    `step_seconds`: of a usual step. Raises TypeError, KeyError or ValueError where the record is damaged.
    """
    ranks = [dict(rank) for rank in record["ranks"]]
    where = describe_ranks(ranks)
    if not training:
        return warning("ranks", f"in the ten seconds before it ended: {where}", f"isobatch resume {folder}")
    mend = f"isobatch cancel {folder} --now, then isobatch resume {folder}"
    if age > OLD_SECONDS:
        process = str(ranks[0].get("process", "PID"))
        text = f"rank 0 ({process}) wrote nothing for {age:.0f} s: stopped, or the disk hangs; then {where}"
        return broken("ranks", text, f"kill -CONT {process.split()[0]} lets it go on; else {mend}")
    stuck = blamed(ranks)
    still = min((float(r["still_seconds"]) for r in ranks if "still_seconds" in r), default=0.0) + age
    silent = any(float(r.get("silent_seconds", 0.0)) > SILENT_SECONDS for r in ranks)
    if still < max(STILL_SECONDS, STILL_STEPS * step_seconds) and not silent:
        return ok("ranks", f"moved {still:.0f} s ago: {where}")
    look = [f"py-spy dump --pid {r['process'].replace(' ', ' (', 1)})" for r in stuck if "process" in r][:1]
    return broken("ranks", f"no step for {still:.0f} s: {where}", "; ".join([*look, mend]))


def blamed(ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The ranks that the others wait for: in no collective, silent, or never heard of."""
    return [r for r in ranks if "place" not in r or not r["waiting"] or _is_silent(r)]


def _is_silent(rank: Mapping[str, Any]) -> bool:
    return float(rank.get("silent_seconds", 0.0)) > SILENT_SECONDS


def describe_ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    """A sentence for each group of ranks that do the same; those that others wait for come first."""
    if len(ranks) > 1 and not blamed(ranks):
        return f"{_groups(ranks)}; each waits for the others"
    return _groups([*blamed(ranks), *(r for r in ranks if r not in blamed(ranks))])


def _groups(ranks: Sequence[Mapping[str, Any]]) -> str:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        groups[_doing(rank)].append(int(rank["rank"]))
    return "; ".join(f"{_names(numbers)} {doing}" for doing, numbers in groups.items())


def _doing(rank: Mapping[str, Any]) -> str:
    if "place" not in rank:
        return "was never heard of"
    place = rank["place"]
    if _is_silent(rank):
        return f"says nothing for {float(rank['silent_seconds']):.0f} s; it was at {place}, in {rank['code']}"
    if rank["waiting"]:
        return f"at {place}, waiting in {rank['waiting']}"
    return f"at {place}, in {rank['code']}"


def _names(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"
