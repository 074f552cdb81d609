"""`auto --seeds N`: trains one recipe with several seeds; mean and deviation of its metrics."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE
from isobatch.launch.local.launch_run import find_or_train
from isobatch.launch.sweeps.points import named, with_seed

if TYPE_CHECKING:
    from isobatch.launch.local.arguments import Request

FILE_NAME = "seeds.json"


def train_seeds(request: Request, count: int, as_json: bool) -> int:
    """Train runs with the recipe's seed and those after it; writes seeds.json to the first run's folder.

    Returns the exit code. Called again, it goes on where it was stopped.
    """
    runs = []
    for seed in range(request.recipe.seed, request.recipe.seed + count):
        run, verdict = find_or_train(named(with_seed(request, seed), f"seed{seed}"))
        if verdict.code != DONE:
            return verdict.code
        runs.append(run)
    summaries = [run.summary() or {} for run in runs]
    metrics = aggregate([summary.get("metrics", {}) for summary in summaries])
    split = summaries[0].get("split")
    result = {"runs": [str(run.folder) for run in runs], "split": split, "metrics": metrics}
    atomic_files.write_json(runs[0].folder / FILE_NAME, result)
    print(atomic_files.json_text(result) if as_json else _format_result(result))
    return DONE


def aggregate(metrics: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Metric -> mean, sample standard deviation, least and largest, for each number that all runs have."""
    names = [k for k, v in metrics[0].items() if isinstance(v, float | int)]
    columns = {name: [m[name] for m in metrics] for name in names if all(name in m for m in metrics)}
    return {
        name: {
            "mean": statistics.fmean(values),
            "deviation": statistics.stdev(values),
            "least": min(values),
            "largest": max(values),
        }
        for name, values in columns.items()
    }


def _format_result(result: dict[str, Any]) -> str:
    on = f", {result['split']}" if result["split"] else ""
    lines = [f"{len(result['runs'])} seeds{on}: {', '.join(result['runs'])}"]
    for name, values in result["metrics"].items():
        spread = f"{values['deviation']:.2g} ({values['least']:.6g} to {values['largest']:.6g})"
        lines.append(f"  {name} {values['mean']:.6g} +- {spread}")
    return "\n".join(lines)
