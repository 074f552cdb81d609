"""`inspect`: what a run is, for a run that somebody sent: its files are read, nothing of it is executed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.terminal.console import format_metrics, print_answer
from isobatch.engine import consent
from isobatch.engine.consent import adapter_base, places
from isobatch.launch.commands.describe import ListingOptions
from isobatch.launch.local.run_setup import open_single_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.runs.run_folder import RunFolder


def inspect(words: Sequence[str]) -> int:
    """Usage: inspect RUN [--json]: recipe, status and metrics of a run, what code it brings, what it
    reads and where it sends. Nothing that came with it is executed, read or sent to.
    """
    run, options = open_single_run(words, "inspect", ListingOptions, runs_code=False)
    found = describe_run(run)
    return print_answer(found, _format(found), options.json)


def describe_run(run: RunFolder) -> dict[str, Any]:
    """What the run's files say, as JSON. Raises UserError where they are damaged."""
    recipe, summary = run.recipe, run.summary() or {}
    metrics = summary.get("metrics")
    options, base = run.options(), adapter_base(run.folder)
    code = consent.code_of(recipe, run.folder) | consent.hook_code(options)
    asked = consent.asks(recipe, run.folder, options)
    unknown = asked.pop(consent.CODE, ())
    return {
        **{"folder": str(run.folder), "task": recipe.task, "status": run.status()},
        **{"hash": recipe.hash(), "recorded_hash": run.recorded_hash, "recipe": recipe.to_dict()},
        **{"steps": summary.get("steps"), "reason": str(summary.get("reason") or "")},
        "split": str(summary.get("split") or "no split"),
        "metrics": metrics if isinstance(metrics, dict) else {},
        "code": [{"file": f, "sha256": code[f], "agreed": f not in unknown} for f in code],
        "reads": {**dict(places(recipe)), "prepared data": run.facts.folder}
        | ({"base of final/": base} if base else {}),
        "sends": options.sends(),
        "asks": [one for named in asked.values() for one in named],
    }


def _format(found: dict[str, Any]) -> str:
    values = {**found["recipe"], **found["recipe"]["options"], "options": None}
    shown = format_metrics(found["metrics"], ".4g")
    lines = [
        f"{found['folder']}: {found['task']}, {found['status']}, {found['steps'] or 'no'} steps",
        f"recipe {found['hash']} (its file says {found['recorded_hash']})",
        *(f"  {name}: {_short(value)}" for name, value in values.items() if value is not None),
        *([f"reason: {found['reason']}"] if found["reason"] else []),
        *([f"metrics of {found['split']}, as its file says: {shown}"] if shown else []),
        *(f"reads {name}: {_short(value)}" for name, value in found["reads"].items()),
        *(f"sends {target}" for target in found["sends"]),
        *(f"only with --trust: {_short(one)}" for one in found["asks"]),
    ]
    for code in found["code"]:
        agreed = "agreed to by this user" if code["agreed"] else "only with --trust"
        lines.append(f"executes {code['file']} (SHA-256 {code['sha256'][:16]}): {agreed}")
    return "\n".join([*lines, *([] if found["code"] else ["executes no code of its own"])])


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else atomic_files.json_text(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."
