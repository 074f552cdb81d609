"""`inspect`: what a run is, for a run that somebody sent: its files are read, nothing of it is executed."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.measures import printable
from isobatch.core.terminal.console import format_metrics
from isobatch.engine import consent
from isobatch.engine.named_places import adapter_base, places
from isobatch.engine.runs.log_reader import thinned_rows
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.step_rows import is_step
from isobatch.launch.commands.describe import ListingOptions
from isobatch.launch.local.arguments import command_options, split_words

if TYPE_CHECKING:
    from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
POINTS = 400
"""Rows that are read of a long log."""
WIDTH = 48
"""Most characters of a curve."""


def inspect(words: Sequence[str]) -> int:
    """Usage: inspect RUN [--json]: recipe, status, curves and metrics of a run, what code it brings, what it
    reads and where it sends. Nothing that came with it is executed, read or sent to.
    """
    positional, flags = split_words(words)
    options = command_options(flags, ListingOptions, "inspect")
    if len(positional) != 1:
        raise UserError("inspect: give the folder of one run (`runs` lists them)")
    found = describe_run(RunFolder.open(positional[0]))
    print(atomic_files.json_text(found) if options.json else printable(_format(found)))
    return 0


def describe_run(run: RunFolder) -> dict[str, Any]:
    """What the run's files say, as JSON. Raises UserError where they are damaged."""
    recipe, summary = run.recipe, run.summary() or {}
    metrics = summary.get("metrics")
    unknown = consent.unknown_code(recipe, run.folder)
    code = consent.code_of(recipe, run.folder)
    base, targets = adapter_base(run.folder), run.options().sends()
    return {
        "folder": str(run.folder),
        "task": recipe.task,
        "hash": recipe.hash(),
        "recorded_hash": run.recorded_hash,
        "recipe": recipe.to_dict(),
        "status": run.status(),
        "reason": str(summary.get("reason") or ""),
        "steps": summary.get("steps"),
        "split": str(summary.get("split") or "no split"),
        "metrics": metrics if isinstance(metrics, dict) else {},
        "curves": _curves(thinned_rows(run.metrics, POINTS, ("split",))),
        "code": [{"file": f, "sha256": code[f], "agreed": f not in unknown} for f in code],
        "reads": dict(places(recipe))
        | {"prepared data": run.facts.folder}
        | ({"base of final/": base} if base else {}),
        "sends": targets,
        "asks": [
            *consent.unknown_places(recipe, run.folder),
            *consent.unknown_bases(recipe, run.folder),
            *consent.unknown_targets(recipe, targets),
        ],
    }


def _curves(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Name -> its values over the steps: the training loss, and the loss of each held-out split."""
    found: dict[str, list[float]] = {}
    for row in rows:
        value = row.get("loss")
        if isinstance(value, float | int) and math.isfinite(value) and (is_step(row) or "split" in row):
            found.setdefault(str(row.get("split", "training")), []).append(float(value))
    return found


def curve(values: list[float]) -> str:
    """A curve as text: a bar for each value, or for each of `WIDTH` equally long parts its mean."""
    count = min(WIDTH, len(values))
    borders = [len(values) * n // count for n in range(count + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(borders)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _format(found: dict[str, Any]) -> str:
    forged = "" if found["hash"] == found["recorded_hash"] else f" (its file says {found['recorded_hash']})"
    lines = [
        f"{found['folder']}: {found['task']}, {found['status']}, {found['steps'] or 'no'} steps",
        f"recipe {found['hash']}{forged}",
        *(f"  {k}: {_short(v)}" for k, v in found["recipe"].items() if v is not None and k != "options"),
        *(f"  {k}: {_short(v)}" for k, v in found["recipe"]["options"].items() if v is not None),
    ]
    if found["reason"]:
        lines.append(f"reason: {found['reason']}")
    for name, values in found["curves"].items():
        lines.append(f"loss, {name}: {values[0]:.4g} {curve(values)} {values[-1]:.4g}")
    if found["metrics"]:
        shown = format_metrics(found["metrics"], ".4g")
        lines.append(f"metrics of {found['split']}, as its file says: {shown}")
    lines += [f"reads {name}: {_short(value)}" for name, value in found["reads"].items()]
    lines += [f"sends {target}" for target in found["sends"]]
    lines += [f"only with --trust: {_short(one)}" for one in found["asks"]]
    for code in found["code"]:
        agreed = "agreed to by this user" if code["agreed"] else "only with --trust"
        lines.append(f"executes {code['file']} (SHA-256 {code['sha256'][:16]}): {agreed}")
    if not found["code"]:
        lines.append("executes no code of its own")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else atomic_files.json_text(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."
