"""`diff`: where two runs part: recipe, samples, step, module, and a sentence that says so."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, FAILED, UserError
from isobatch.core.measures import now, printable
from isobatch.core.plan import INVARIANCES
from isobatch.core.terminal.status import doing
from isobatch.engine.forensics.compare_logs import EXACT_FLOOR, LogDifference, compare_logs
from isobatch.engine.forensics.logged_steps import read_logged_steps
from isobatch.engine.verification.tolerance import TOLERANCE, rounding_tolerance
from isobatch.launch.forensics.diff_text import lines_of, verdict_of, weights_verdict
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import TrustOptions, open_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isobatch.engine.runs.run_folder import RunFolder

RECIPE_FILE = "recipe.json"
"""What makes a folder a run."""
WATCH_SECONDS = 2.0
"""Between two looks at the logs."""
WATCH_SHARE = 5
"""A look may take so many times less than the time between two: long logs take seconds."""
PLAN = (
    *("device", "processes", "strategy", "precision", "attention", "compile", "pack", "pad_multiple"),
    *("micro_batch_samples", "micro_batch_tokens", "activation_checkpointing", "reduction"),
)
"""Fields of a plan that may move results by rounding, or beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffOptions(TrustOptions):
    """Flags of `diff`."""

    level: Literal["step", "module", "sample"] = "module"
    """step: from the logs alone; module: also redo the step where they part, on both sides; sample: say too
    which samples carry the difference."""
    watch: bool = False
    """Wait while one of the runs trains, until they part or none trains any more."""
    json: bool = False
    """One JSON object on standard output."""


def diff(words: Sequence[str]) -> int:
    """Usage: diff RUN RUN [--level step|module|sample] [--watch] [--json]: where two runs part, and why.

    A checkpoint of ours, or a folder of weights of transformers or its Trainer, in place of a run: only the
    weights are compared. Exit code 0 where only the order of float sums differs, 3 at a true difference.
    """
    positional, flags = split_words(words)
    if len(positional) != 2:
        raise UserError("diff: give two runs, as in: diff runs/a runs/b (`compare` takes more)")
    options = command_options(flags, DiffOptions, "diff")
    if any(Path(place).exists() and not (Path(place) / RECIPE_FILE).exists() for place in positional):
        return say(diff_weights(*map(Path, positional)), options)
    one, other = (open_run(place, options.trust) for place in positional)
    if options.watch:
        wait_for_difference(one, other)
    return say(diff_runs(one, other, options.level), options)


def say(found: dict[str, Any], options: DiffOptions) -> int:
    """Print what was found; the exit code."""
    if options.json:
        print(atomic_files.json_text(found))
    else:
        print(printable("\n".join(lines_of(found))))
    return DONE if found["equal"] else FAILED


def diff_weights(one: Path, other: Path) -> dict[str, Any]:
    """The answer of --json where one is no run: its weights, and of a run those that it exported.

    Raises UserError where a place holds no weights.
    """
    from isobatch.engine.checkpointing.weight_files import compare_weight_files, open_weights

    doing("comparing the weights")
    places = [_weights_of(place) for place in (one, other)]
    parted = compare_weight_files(*map(open_weights, places))
    verdict = weights_verdict(parted)
    found = {"runs": list(map(str, places)), "weights": parted.to_dict()}
    return {**found, "verdict": verdict, "equal": parted.equal}


def wait_for_difference(one: RunFolder, other: RunFolder) -> None:
    """Return when the logs part, or when neither run trains. What both say is compared as it grows."""
    trains = True
    while trains:
        began = now()
        trains = one.is_training() or other.is_training()  # first: what it logs to its end is then read
        common = [len(read_logged_steps(run.metrics)) if run.metrics.exists() else 0 for run in (one, other)]
        if all(common) and not diff_runs(one, other, "step")["equal"]:
            return
        if trains:
            doing(f"equal so far: {min(common):,} logged steps")
            time.sleep(max(WATCH_SECONDS, WATCH_SHARE * (now() - began)))


def diff_runs(one: RunFolder, other: RunFolder, level: str = "module") -> dict[str, Any]:
    """The answer of --json. Raises UserError where a run logged no step."""
    doing("comparing the logs")
    logs = [read_logged_steps(run.metrics) for run in (one, other)]
    for run, log in zip((one, other), logs, strict=True):
        if not len(log):
            raise UserError(f"{run.folder}: no step is logged, so there is nothing to compare")
    parted = compare_logs(logs[0], logs[1], *_explained(one, other))
    found: dict[str, Any] = {
        "runs": [str(one.folder), str(other.folder)],
        "recipe": differing(*(_recipe(run) for run in (one, other))),
        "plan": differing(*({n: _plan(run).get(n) for n in PLAN} for run in (one, other))),
        "versions": differing(*versions) if all(versions := [_versions(run) for run in (one, other)]) else {},
        "data_differs": one.facts.fingerprint != other.facts.fingerprint,
        "log": _as_dict(parted),
    }
    if parted.kind == "samples" or found["data_differs"]:
        from isobatch.launch.forensics.parted_samples import parted_samples

        found["samples"] = parted_samples(one, other, parted)
    if level != "step" and parted.kind in ("jump", "drift") and not found["data_differs"]:
        from isobatch.launch.forensics.parted_step import parted_step

        found["step"] = parted_step(one, other, parted, level)
    found["verdict"], found["equal"] = verdict_of(found)
    return found


def _explained(one: RunFolder, other: RunFolder) -> tuple[dict[str, float], dict[str, float]]:
    """The differences of a step, and of a run, that the tighter of both plans explains.

    So a run in bf16 parts from one in fp32, and two in bf16 may differ by what bf16 rounds.
    """
    tighter = min((run.plan.invariance for run in (one, other)), key=INVARIANCES.index)
    measured = [run.plan.rounding for run in (one, other)]
    floor = {"exact": EXACT_FLOOR, "rounding": max(map(rounding_tolerance, measured))}
    pairs = floor.get(tighter, TOLERANCE[tighter]), TOLERANCE[tighter]
    named = [dict(zip(("loss", "grad_norm"), pair, strict=True)) for pair in pairs]
    return named[0], named[1]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Name -> both values, where they differ; None where one has none."""
    names = dict.fromkeys([*one, *other])
    return {n: [one.get(n), other.get(n)] for n in names if one.get(n) != other.get(n)}


def _weights_of(place: Path) -> Path:
    """Of a run its export, or its newest checkpoint; else the place itself."""
    if not (place / RECIPE_FILE).exists():
        return place
    if (place / "final").is_dir():
        return place / "final"
    return max(place.glob("checkpoints/*-*"), key=lambda path: path.stat().st_mtime, default=place)


def _recipe(run: RunFolder) -> dict[str, Any]:
    return run.recipe.to_compare()


def _plan(run: RunFolder) -> dict[str, Any]:
    return run.plan.to_dict() if run.has_plan else {}


def _versions(run: RunFolder) -> dict[str, Any]:
    """Library -> version, as the newest checkpoint has it; empty where none is kept."""
    states = [path / "state.json" for path in run.checkpoints.glob("*-*")]
    kept = sorted((path for path in states if path.is_file()), key=lambda path: path.stat().st_mtime)
    return atomic_files.read_json(kept[-1]).get("versions") or {} if kept else {}


def _as_dict(parted: LogDifference) -> dict[str, Any]:
    return {
        **{"kind": parted.kind, "common_steps": parted.common, "largest": dict(parted.largest)},
        **{"phase": parted.phase, "step": parted.step, "previous": parted.previous},
        **{"figure": parted.figure, "values": list(parted.values)},
    }
