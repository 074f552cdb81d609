"""`verify`: checks a run against its recipe: its records, steps redone under another plan, or all of it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from isobatch.core.errors import DONE, FAILED, TrainingError
from isobatch.core.number_ranges import Positive
from isobatch.core.plan import INVARIANCES, Plan, StrategyChoice
from isobatch.core.recipe import HOOK_CODE
from isobatch.core.terminal import doing, print_answer, rendered
from isobatch.engine.hooks.checkpoint import versions_apart
from isobatch.engine.machine.detect import detect
from isobatch.engine.planning.choices import choose_invariance
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.task_files import task_file_problem
from isobatch.engine.train.first_step import RESERVED as STEP_FIELDS
from isobatch.engine.verification import windows
from isobatch.engine.verification.audit import audit_records, recipe_problems
from isobatch.engine.verification.log_audit import LogRecord
from isobatch.engine.verification.proof import Proof
from isobatch.engine.verification.tolerance import FEW, HELD_OUT, NEAR, claimed_rounding, tolerances
from isobatch.engine.verification.windows import CHOICE, INITIAL, Job, Window
from isobatch.launch.local.options import RedoOptions
from isobatch.launch.local.redo_steps import plan_to_redo, redo, replay_in_full
from isobatch.launch.local.run_setup import compare_source, locate_data, open_run, open_single_run

LEADING_SECONDS = 10.0
"""Predicted time of the steps that lead to the last checkpoints."""
LEAST_LEADING, MOST_LEADING = 20, 150
"""Bounds of their number: other programs make the predicted time of a step longer, and may hide nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions(RedoOptions):
    """Flags of `verify`."""

    level: Literal["records", "steps", "full"] = "steps"
    """records: data, samples of every step, logs and files agree; steps: also redo steps, those of the end
    among them, and the held-out metrics; full: train all of it again and compare."""
    steps: Positive = 3
    """Least number of steps to redo from each starting point."""
    processes: Positive = 1
    """World size to redo them in."""
    strategy: StrategyChoice = "auto"
    """Strategy to redo them under, with --processes 2 or more."""
    micro_batch: Positive | None = None
    """Samples per micro-batch; by default half of what the run used, or as many where values are rounded."""


def verify(words: Sequence[str]) -> int:
    """Usage: verify RUN [--level records|steps|full] [--steps 3] [--processes N] [--strategy S]
    [--micro-batch M] [--data PATH] [--base PLACE] [--json]

    Exit 3 on a difference, and where the level's proof is not complete.
    """
    run, options = open_single_run(words, "verify", VerifyOptions, runs_code=False)
    if not (recipe_problems(run) or task_file_problem(run.recipe)):  # else nothing of it is executed
        run = open_run(run.folder, options.trust, options.base)
    report = verify_run(run, options)
    claimed = run.plan.invariance if run.has_plan else ""
    print_answer(report, rendered(__file__, "verify", **report, claimed=claimed), options.json)
    return DONE if report["verified"] else FAILED


def verify_run(run: RunFolder, options: VerifyOptions, owns_process: bool = True) -> dict[str, Any]:
    """`Proof.to_dict()` with `run`, and `world_size` and `micro_batch_samples` where steps were redone.

    Raises UserError.
    """
    proof = Proof(options.level, problems=recipe_problems(run))
    cut: dict[str, Any] = {}
    if missing := task_file_problem(run.recipe):
        proof.unproven.append(missing)
    elif not proof.problems:
        locate_data(run, options.data)
        doing("checking the records")
        proof.unproven, proof.trusted = compare_source(run, options.data)
        proof.problems, proof.log = audit_records(run)
    if (log := proof.log) is not None:
        proof.covered += versions_apart(run)
        proof.unproven += log.unproven
        unknown = [name for name, digests in run.exports().items() if digests is None]
        proof.trusted += [f"{name}/, of which there is no record" for name in unknown]
        if options.level == "records":
            proof.trusted.insert(0, "losses, weights, final/ and metrics (--level steps computes them again)")
        elif HOOK_CODE in run.recipe.options:
            proof.unproven.append("a hook changes what is learnt, and no step is redone with it")
        else:
            plan, own = _other_plan(run, options), _own_plan(run, options)
            if own and run.plan.invariance == "rounding" and not options.micro_batch:
                plan = own  # another cut may move a step by more than can be told from a forgery
            cut = {"world_size": plan.processes, "micro_batch_samples": plan.micro_batch_samples}
            try:
                # Trained again without giving final/ bit for bit, its end has to be redone, too.
                if options.level == "steps" or not replay_in_full(run, own or plan, proof, log, owns_process):
                    _verify_steps(run, options.steps, plan, own, proof, log, owns_process)
            except TrainingError as error:
                proof.problems.append(str(error))
            if run.status() != "done":
                proof.covered.append(f"of a run that is {run.status()}")
    return {"run": str(run.folder), **cut, **proof.to_dict()}


def _verify_steps(
    run: RunFolder, steps: int, plan: Plan, own: Plan | None, proof: Proof, log: LogRecord, owns_process: bool
) -> None:
    """Redo steps under another plan; those of the end, and what follows from them, under the run's `own`, if
    it can be had.
    """
    finished = run.status() == "done"
    closing, others = windows.closing_windows(log), windows.other_windows(run, log, steps)
    missing = _missing_checkpoint(run, log, closing) if finished else ""
    proof.unproven += [missing] if missing else []
    ending = [] if missing else closing
    if own is not None and run.plan.invariance != "exact":  # long windows say more under the same plan
        ending = [*others, *ending]
        others = [dataclasses.replace(w, count=min(w.count, NEAR)) for w in others]
    if not missing:
        ending = windows.longest([*windows.leading_windows(run, log, _leading_steps(own, plan)), *ending])
    jobs = [(plan, Job(others)), (own or plan, Job(ending, finished and not missing))]
    shown = _distance_of_fp32(run, log)
    found = redo(run, jobs, owns_process)
    for (used, _), redone in zip(jobs, found, strict=True):
        exact = run.plan.invariance == used.invariance == "exact" and run.plan.device == used.device
        proof.add(redone, partial(tolerances, run, used, shown=shown), partial(claimed_rounding, run), exact)
    if not proof.steps and (log.steps or not finished):
        proof.unproven.append("no logged step could be redone: none follows the start or a checkpoint")
    proof.problems += _wrong_class(run, any(r.foreign_noise for r in found))
    exported = f"{log.phases[-1].schedule.name}-{log.exported_step}"
    for weights in [r.weights[exported] for r in found if exported in r.weights][-1:]:
        how = f"within {weights['largest']:.0e}" if weights["different"] else "bit for bit"
        proof.covered.append(f"final weights reproduced {how}")
    if jobs[-1][1].held_out:
        looser = max(run.plan.invariance, (own or plan).invariance, key=INVARIANCES.index)
        proof.add_export(found[-1])
        proof.add_metrics(log, found[-1], run.facts.samples, HELD_OUT[looser])
    if said := windows.trusted_weights(log, proof.redone):
        proof.trusted.insert(0, said)
    named = STEP_FIELDS.union({"loss"}, *(r.parts for r in found))
    if unknown := sorted(log.fields.get("step", set()) - named):
        proof.trusted.append(f"the rows' {', '.join(unknown)}")


def redo_first_steps(run: RunFolder, trained: Sequence[int], steps: int, processes: int = 1) -> Proof:
    """Make steps from the initial weights again, at least `steps` and up to twice as many, and compare.

    `trained`: the steps of the first phase that were not left out, ascending.
    """
    options = VerifyOptions(steps=steps, processes=processes)
    own = None if run.plan.invariance == "exact" else _own_plan(run, options)
    plan = own or _other_plan(run, options)
    phase = next(iter(workload_of(run.here).make(run.here)[0].phases())).name
    proof = Proof("steps")
    if not trained:
        return proof
    last = trained[min(len(trained), steps + CHOICE.randint(0, steps)) - 1]
    (redone,) = redo(run, [(plan, Job([Window(INITIAL, phase, 0, last)]))])
    redone.steps = [{**step, "parts": {}} for step in redone.steps]  # a receipt has the whole loss alone
    proof.add(redone, partial(tolerances, run, plan), partial(claimed_rounding, run))
    proof.problems += _wrong_class(run, redone.foreign_noise)
    return proof


def _distance_of_fp32(run: RunFolder, log: LogRecord) -> float:
    """How far the first logged losses are from those of fp32, where the plan claims coarser arithmetic."""
    phase = log.phases[0]
    if run.plan.invariance != "precision" or not phase.step:
        return math.inf
    plan = dataclasses.replace(_other_plan(run, VerifyOptions()), precision="fp32")
    (redone,) = redo(run, [(plan, Job([Window(INITIAL, phase.schedule.name, 0, min(FEW, phase.step))]))])
    found = [step["loss_difference"] for step in redone.steps]
    return statistics.median(found) if found else math.inf  # of all: some may be forged


def _leading_steps(own: Plan | None, here: Plan) -> int:
    """Most steps to redo before the closing ones, by the time they take and how far rounding may spread."""
    in_time = int(LEADING_SECONDS / max(1e-4, here.predicted_step_seconds))
    most = MOST_LEADING if own is not None and own.invariance == "exact" else FEW
    return min(max(in_time, LEAST_LEADING), most)


def _missing_checkpoint(run: RunFolder, log: LogRecord, closing: list[Window]) -> str:
    """A checkpoint without which the end of a finished run cannot be redone; empty where all are there."""
    phase = log.phases[-1].schedule.name
    needed = [f"{phase}-{log.exported_step}", f"{phase}-{log.phases[-1].step}"]
    needed += [window.checkpoint for window in closing]
    gone = [name for name in needed if not (run.checkpoints / name / "state.json").is_file()]
    return f"the checkpoint {gone[0]} is missing: final/ was compared with nothing" if gone else ""


def _wrong_class(run: RunFolder, draws_noise: bool) -> list[str]:
    """A plan may not claim a looser class than recipe, precision and model have: more would be allowed."""
    plan, (task, _) = run.plan, workload_of(run.here).make(run.here)
    size = task.model_size(run.facts)
    has, _ = choose_invariance(run.recipe, plan.precision, plan.compile != "off", draws_noise, size.rounds)
    if INVARIANCES.index(plan.invariance) <= INVARIANCES.index(has):
        return []
    return [f"plan.json says {plan.invariance}, and this recipe and precision are {has}"]


def _own_plan(run: RunFolder, options: VerifyOptions) -> Plan | None:
    """The run's own plan, if it can be had here as it was: then the same steps give the same bits."""
    plan, here = run.plan, detect()
    same_world = plan.processes == options.processes and options.strategy in ("auto", plan.strategy)
    if not same_world or plan.compile != "off" or plan.device != here.kind:
        return None
    memory = here.gpu.memory_bytes if here.gpus else here.ram_bytes
    return plan if plan.predicted_peak_memory_bytes <= memory else None


def _other_plan(run: RunFolder, options: VerifyOptions) -> Plan:
    """A plan for this machine with half the run's micro-batch unless given, and the processes asked for."""
    device = detect().kind
    return plan_to_redo(
        run,
        options.micro_batch or max(1, run.plan.micro_batch_samples // 2),
        device=device,
        processes=options.processes,
        strategy=options.strategy,
        attention="auto",
        activation_checkpointing="auto",
        precision=run.plan.precision if run.plan.device == device else "auto",
    )
