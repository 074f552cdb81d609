"""`runs compare`: runs side by side, first what their recipes and plans differ in, then what they came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import value_text
from isobatch.core.measures import aligned, printable
from isobatch.engine.runs.run_folder import RunFolder, list_runs
from isobatch.launch.local.arguments import read_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PLAN = ("device", "processes", "strategy", "precision", "compile", "invariance")
"""Fields of a plan that may move results by rounding."""
SWEEP_FILE = "sweep.json"
TOO_FEW = "runs compare: give two runs or more, as in: runs compare runs/a runs/b (`runs` lists them)"
FIGURES = ("steps", "train_seconds", "peak_memory_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """Flags of `runs compare`."""

    json: bool = False
    """One JSON object on standard output."""


def compare(words: Sequence[str]) -> int:
    """Usage: runs compare RUN RUN... [--json]: what differs between runs, and their metrics side by side.

    A folder of runs stands for all of them.
    """
    positional, options = read_command(words, CompareOptions, "runs compare")
    runs = [run for place in positional for run in _runs_at(place, alone=len(positional) == 1)]
    if len(runs) < 2:
        raise UserError(TOO_FEW)
    found = compared(runs)
    print(atomic_files.json_text(found) if options.json else printable_lines(found))
    return DONE


def _runs_at(place: str, alone: bool) -> list[RunFolder]:
    """The run in this folder, or else the runs that lie in it. Raises UserError where there is none.

    `alone`: whether no other place was given.
    """
    folder = Path(place).expanduser()
    if not alone and (folder / SWEEP_FILE).is_file():
        return []  # no run, but the table of some: `compare runs/*` names it, too
    inside = [] if (folder / "recipe.json").exists() else list(list_runs(folder))
    if alone and not inside:
        raise UserError(TOO_FEW)
    return inside or [RunFolder.open(place)]


def compared(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """The answer of --json: in each part name -> a value per run, None where a run has none."""
    summaries = [run.summary() or {} for run in runs]
    metrics = [_numbers_and_words(s.get("metrics")) for s in summaries]
    plans = [run.plan.to_dict() if run.has_plan else {} for run in runs]
    pairs = zip(runs, summaries, strict=True)
    data = _differing([{"data": run.facts.fingerprint, "held-out split": s.get("split")} for run, s in pairs])
    return {
        "runs": [str(run.folder) for run in runs],
        "recipe": _differing([run.recipe.to_compare() for run in runs]),
        "data": data,
        "plan": _differing([{name: plan.get(name) for name in PLAN} for plan in plans]),
        "split": None if "held-out split" in data else summaries[0].get("split"),
        "metrics": _side_by_side(metrics),
        "figures": _side_by_side([{name: s.get(name) for name in FIGURES} for s in summaries]),
    }


def _numbers_and_words(metrics: Any) -> dict[str, Any]:
    """Of a summary's metrics those that fit into a cell; none where a received run has something else."""
    found = metrics if isinstance(metrics, dict) else {}
    return {name: value for name, value in found.items() if isinstance(value, float | int | str)}


def _side_by_side(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name) for column in columns] for name in names}


def _differing(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    rows = _side_by_side(columns)
    return {name: values for name, values in rows.items() if any(v != values[0] for v in values)}


def printable_lines(found: Mapping[str, Any]) -> str:
    """The comparison as a table with a section for each part."""
    if not found["recipe"]:
        remark = "the same recipe" + ("" if found["data"] else " and data")
    else:
        remark = "another protocol: metrics are not comparable" if found["data"] else ""
    cells = [["", *found["runs"]]]
    for part in ("recipe", "data", "plan"):
        cells += _section(part, found[part], lambda value: "" if value is None else value_text(value))
    metrics = f"metrics, {found['split']}" if found["split"] else "metrics"
    for title, rows in ((metrics, found["metrics"]), ("figures", found["figures"])):
        cells += _section(title, rows, _figure)
    return "\n".join([*map(printable, aligned(cells)), *([remark] if remark else [])])


def _section(part: str, rows: Mapping[str, list[Any]], form: Callable[[Any], str]) -> list[list[str]]:
    if not rows:
        return []
    width = len(next(iter(rows.values())))
    return [[part, *[""] * width], *([f"  {n.replace('_', ' ')}", *map(form, v)] for n, v in rows.items())]


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, float | int):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
