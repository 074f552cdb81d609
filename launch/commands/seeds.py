"""`auto --seeds N`: one recipe with several seeds, and what its metrics are worth."""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE
from isobatch.launch.local.arguments import Request
from isobatch.launch.local.launch_run import find_or_train

FILE = "seeds.json"


def train_seeds(asked: Request, count: int, as_json: bool) -> int:
    """A run per seed, from the recipe's own on; seeds.json in the first run's folder.

    Typed again, the command goes on where it was stopped.
    """
    runs = []
    for seed in range(asked.recipe.seed, asked.recipe.seed + count):
        run, verdict = find_or_train(with_seed(asked, seed))
        if verdict.code != DONE:
            return verdict.code
        runs.append(run)
    metrics = aggregate([(run.summary() or {}).get("metrics", {}) for run in runs])
    found = {"runs": [str(run.folder) for run in runs], "metrics": metrics}
    atomic_files.write_json(runs[0].folder / FILE, found)
    print(json.dumps(found) if as_json else _sheet(found))
    return DONE


def with_seed(asked: Request, seed: int) -> Request:
    recipe = dataclasses.replace(asked.recipe, seed=seed)
    name = asked.run.name
    run = dataclasses.replace(asked.run, name=f"{name}-seed{seed}" if name else None)
    return dataclasses.replace(asked, recipe=recipe, run=run)


def aggregate(metrics: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Name -> mean, sample standard deviation, least and largest, of every number that all runs have."""
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


def _sheet(found: dict[str, Any]) -> str:
    lines = [f"{len(found['runs'])} seeds: {', '.join(found['runs'])}"]
    for name, of in found["metrics"].items():
        spread = f"{of['deviation']:.2g} ({of['least']:.6g} to {of['largest']:.6g})"
        lines.append(f"  {name} {of['mean']:.6g} +- {spread}")
    return "\n".join(lines)
