"""`verify`: prove that a run is what its recipe says; also the child that redoes steps in a world."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HOME = str(Path(__file__).resolve().parent.parent)
if __name__ == "__main__":
    sys.path[0] = HOME  # as in train.py

import dataclasses  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

from engine import files  # noqa: E402
from engine.detection import detect  # noqa: E402
from engine.errors import DONE, FAILED, TrainingError, UserError  # noqa: E402
from engine.plan import AnyStrategy, Plan, PlanOptions  # noqa: E402
from engine.registry import workload  # noqa: E402
from engine.run import Run  # noqa: E402
from models.fields import Positive  # noqa: E402

TOLERANCE = {"exact": (1e-4, 1e-2), "rounding": (2e-3, 5e-2), "precision": (2e-2, 2e-1), "noise": (1e-1, 1.0)}
"""Invariance -> largest difference of loss and gradient norm that rounding (or noise) explains.

"rounding" is for exact plans of tasks that round activations: a flipped level was seen to move a loss by
1.4e-4 within three steps.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """Flags of `verify`."""

    steps: Positive = 3
    """Steps to redo from each starting point."""
    processes: Positive = 1
    """World size to redo them in."""
    strategy: AnyStrategy = "auto"
    """Strategy to redo them under, with --processes 2 or more."""
    micro_batch: Positive | None = None
    """Samples per micro-batch; by default half of what the run used."""
    data: str | None = None
    """Where the data lies now, if it has moved."""
    json: bool = False
    """One JSON object on standard output."""


def verify(words: Sequence[str]) -> int:
    """Usage: verify RUN [--steps 3] [--processes N] [--strategy S] [--micro-batch M] [--data PATH] [--json]

    Exit 3 on a difference.
    """
    from engine.records import problems, recipe_problems
    from launch.flags import own_flags, split
    from launch.setting_up import relocate

    positional, flags = split(words)
    if len(positional) != 1:
        raise UserError("verify: give the folder of one run (`runs` lists them)")
    run, own = Run.open(positional[0]), own_flags(flags, VerifyOptions, "verify")
    report: dict[str, Any] = {"run": str(run.folder), "problems": recipe_problems(run), "steps": []}
    if not report["problems"]:
        relocate(run, run.recipe(), own.data)
        report["problems"] = problems(run)
    plan = run.plan()
    if not report["problems"]:
        other = _other_plan(run, own)
        looser: str = max(plan.invariance, other.invariance, key=list(TOLERANCE).index)
        if looser == "exact" and workload(run.recipe().task).task.rounds:
            looser = "rounding"
        report |= {"world_size": other.processes, "micro_batch_samples": other.micro_batch_samples}
        try:
            report["steps"] = _redo(run, other, own.steps)
            report["problems"] = _differences(report["steps"], looser)
        except TrainingError as error:
            report["problems"] = [str(error)]
    report["verified"] = not report["problems"]
    print(json.dumps(report) if own.json else _sheet(report, plan.invariance))
    return DONE if report["verified"] else FAILED


def _other_plan(run: Run, own: VerifyOptions) -> Plan:
    """A plan for this machine in another cut than the run's, and in as many processes as asked."""
    from launch.setting_up import make_plan_here

    plan = run.plan()
    samples = own.micro_batch or max(1, plan.micro_batch_samples // 2)
    here = detect().kind
    asked = PlanOptions(
        device=here,
        processes=own.processes,
        strategy=own.strategy,
        micro_batch=min(samples, run.recipe().batch_size),
        precision=plan.precision if plan.device == here else "auto",
        compile="off",
    )
    made = make_plan_here(run.recipe(), run.facts(), asked)
    return dataclasses.replace(made, reduction="explicit")


def _redo(run: Run, plan: Plan, steps: int) -> list[dict[str, Any]]:
    if plan.processes == 1:
        return redone(run, plan, steps)
    from launch.children import start_children

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        task = {"run": str(run.folder.resolve()), "plan": plan.to_dict(), "steps": steps}
        files.write_json(place / "task.json", task)
        code = start_children(plan, Path(__file__), [str(place)], place).code
        if code != DONE or not (place / "report.json").exists():
            sys.stderr.write((place / "launcher.log").read_text(errors="replace")[-4000:])
            raise RuntimeError(f"the {plan.processes} processes that redid the steps ended with {code}")
        steps_redone: list[dict[str, Any]] = files.read_json(place / "report.json")["steps"]
        return steps_redone


def redone(run: Run, plan: Plan, steps: int, place: Path | None = None) -> list[dict[str, Any]]:
    """The steps done again in this world, as JSON, in `place` where the processes end with it."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from engine.redo import Redo

    redo = Redo(run, plan)
    found = [
        {**dataclasses.asdict(r), "loss_difference": r.loss_difference, "norm_difference": r.norm_difference}
        for r in redo.steps(steps)
    ]
    if place is not None and redo.world.is_main:
        files.write_json(place / "report.json", {"steps": found})
    redo.world.close()
    redo.world.leave(DONE)
    return found


def _differences(rows: list[dict[str, Any]], invariance: str) -> list[str]:
    loss, norm = TOLERANCE[invariance]
    if not rows:
        return ["no logged step could be redone: metrics.jsonl has none after the start or a checkpoint"]
    return [
        f"phase {r['phase']}, step {r['step']}: loss {r['loss']:.6f} redone, {r['logged_loss']:.6f} logged"
        for r in rows
        if not (r["loss_difference"] <= loss and r["norm_difference"] <= norm)
    ]


def _sheet(report: dict[str, Any], invariance: str) -> str:
    lines = []
    if report["steps"]:
        lines.append(
            f"redone on {report['world_size']} process(es), micro-batches of {report['micro_batch_samples']}:"
        )
    for r in report["steps"]:
        lines.append(
            f"  {r['phase']} {r['step']:>6} from {r['start']}: loss {r['loss']:.6f}, logged"
            f" {r['logged_loss']:.6f},"
            f" difference {r['loss_difference']:.1e}; gradient norm {r['norm_difference']:.1e}"
        )
    lines += [f"  {problem}" for problem in report["problems"]]
    verdict = f"verified ({invariance})" if report["verified"] else "NOT what its recipe says"
    return "\n".join([*lines, f"{report['run']}: {verdict}"])


def _child(folder: Path) -> int:
    task = files.read_json(folder / "task.json")
    redone(Run.open(task["run"]), Plan.from_dict(task["plan"]), task["steps"], folder)
    return DONE


if __name__ == "__main__":
    from launch.cli import guarded

    sys.exit(guarded(lambda: _child(Path(sys.argv[1]))))
