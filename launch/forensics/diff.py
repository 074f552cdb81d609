"""`diff`: where two runs part: recipe, samples, step, module, and a sentence that says so."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, FAILED, UserError
from isobatch.core.measures import printable
from isobatch.core.plan import INVARIANCES
from isobatch.core.terminal.status import doing
from isobatch.engine.forensics.compare_logs import EXACT_FLOOR, compare_logs
from isobatch.engine.runs.step_rows import step_rows
from isobatch.engine.verification.tolerance import TOLERANCE, rounding_tolerance
from isobatch.launch.forensics.diff_text import lines_of, verdict_of
from isobatch.launch.forensics.parted import parted_samples, parted_step
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import TrustOptions, open_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.runs.step_rows import LossAndNorm

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
    json: bool = False
    """One JSON object on standard output."""


def diff(words: Sequence[str]) -> int:
    """Usage: diff RUN RUN [--level step|module|sample] [--json]: where two runs part, and why.

    Exit code 0 where only the order of float sums differs, 3 at a true difference.
    """
    positional, flags = split_words(words)
    if len(positional) != 2:
        raise UserError("diff: give two runs, as in: diff runs/a runs/b (`compare` takes more)")
    options = command_options(flags, DiffOptions, "diff")
    one, other = (open_run(place, options.trust) for place in positional)
    found = diff_runs(one, other, options.level)
    print(atomic_files.json_text(found) if options.json else printable("\n".join(lines_of(found))))
    return DONE if found["equal"] else FAILED


def diff_runs(one: RunFolder, other: RunFolder, level: str = "module") -> dict[str, Any]:
    """The answer of --json. Raises UserError where a run logged no step."""
    doing("comparing the logs")
    runs = one, other
    logs = [list(step_rows(run.metrics)) for run in runs]
    if empty := [run for run, log in zip(runs, logs, strict=True) if not log]:
        raise UserError(f"{empty[0].folder}: no step is logged, so there is nothing to compare")
    parted = compare_logs(logs[0], logs[1], *_explained(runs))
    versions = [_versions(run) for run in runs]
    plans = [run.plan.to_dict() if run.has_plan else {} for run in runs]
    found: dict[str, Any] = {
        "runs": [str(run.folder) for run in runs],
        "recipe": differing(*(run.recipe.to_compare() for run in runs)),
        "plan": differing(*({name: plan.get(name) for name in PLAN} for plan in plans)),
        "versions": differing(*versions) if all(versions) else {},
        "data_differs": one.facts.fingerprint != other.facts.fingerprint,
        "log": dataclasses.asdict(parted),
    }
    if parted.kind == "samples" or found["data_differs"]:
        found["samples"] = parted_samples(runs, parted)
    elif level != "step" and parted.kind in ("jump", "drift"):
        found["step"] = parted_step(runs, parted, level)
    found["verdict"], found["equal"] = verdict_of(found)
    return found


def _explained(runs: tuple[RunFolder, RunFolder]) -> tuple[LossAndNorm, LossAndNorm]:
    """The differences of a step, and of a run, that the tighter of both plans explains.

    So a run in bf16 parts from one in fp32, and two in bf16 may differ by what bf16 rounds.
    """
    tighter = min((run.plan.invariance for run in runs), key=INVARIANCES.index)
    floor = {"exact": EXACT_FLOOR, "rounding": max(rounding_tolerance(run.plan.rounding) for run in runs)}
    return floor.get(tighter, TOLERANCE[tighter]), TOLERANCE[tighter]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Name -> both values, where they differ; None where one has none."""
    names = dict.fromkeys([*one, *other])
    return {n: [one.get(n), other.get(n)] for n in names if one.get(n) != other.get(n)}


def _versions(run: RunFolder) -> dict[str, Any]:
    """Library -> version, as the newest checkpoint has it; empty where none is kept."""
    states = [path / "state.json" for path in run.checkpoints.glob("*-*")]
    kept = sorted((path for path in states if path.is_file()), key=lambda path: path.stat().st_mtime)
    return atomic_files.read_json(kept[-1]).get("versions") or {} if kept else {}
