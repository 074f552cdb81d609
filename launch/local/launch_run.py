"""From a request to a finished run: find or create it, plan it, and train it to its end in attempts.

A new attempt begins from the last checkpoint after out-of-memory or a lost process.
"""

from __future__ import annotations

import re
import shutil
import sys

from isobatch.core import errors
from isobatch.core.atomic_files import disk_full, is_disk_full
from isobatch.core.errors import BUG, DONE, FAILED, WRONG_INPUT, TrainingError, UserError
from isobatch.core.measures import wait_for
from isobatch.core.recipe import HOOK_CODE
from isobatch.core.terminal import print_lines
from isobatch.engine import consent
from isobatch.engine.optimization.left_out import refuse_where_steps_matter
from isobatch.engine.planning.planner import with_smaller_budget
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.train.own_hooks import with_learning_hooks
from isobatch.launch.clusters.cluster import Cluster, cluster, refuse_if_in_a_job
from isobatch.launch.local import run_setup
from isobatch.launch.local.accelerate_launcher import GRACE_SECONDS
from isobatch.launch.local.arguments import Request


def steps_to_skip(run: RunFolder, asked: str) -> tuple[str, int, int]:
    """(phase, first step, last step) that --skip-step names. Raises UserError."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    refuse_where_steps_matter(task)
    names = [phase.name for phase in task.phases() if run.recipe.phase in (None, phase.name)]
    match = re.fullmatch(r"(?:(.+):)?(\d+)(?:-(\d+))?", asked)
    phase = names[0] if match and match[1] is None and len(names) == 1 else match and match[1]
    start, stop = (int(match[2]), int(match[3] or match[2])) if match else (0, 0)
    if phase not in names or not 0 < start <= stop:
        example = f"{'' if len(names) == 1 else f'{names[-1]}:'}1200-1203"
        raise UserError(f"--skip-step {asked}: give a step or an ascending range of a phase, as in {example}")
    return str(phase), start, stop


def find_or_train(
    request: Request, owns_process: bool = True, trust: bool = False
) -> tuple[RunFolder, Verdict]:
    """Find the request's run or create it, and train it to its end; the run and its verdict.

    With `owns_process` False, as in a notebook, the process is never ended and its signal handlers stay.
    Raises UserError, for example where the run is being trained already, here or by a Slurm job.
    """
    print_lines(*request.notes, quiet=request.run.quiet)
    facts, run = run_setup.known_run(request)
    if run is not None and run.status() == "done":
        said = f"{run.folder} has this recipe and is done (--again for a new run)"
        print_lines(*filter(None, (said, (run.summary() or {}).get("remark"))), quiet=request.run.quiet)
        return run, Verdict(DONE, "")
    if run is not None:
        refuse_if_in_a_job(run)
        print_lines(f"going on with {run.folder} ({run.status()})", quiet=request.run.quiet)
    plan = run_setup.plan_for_training(request.recipe, facts, request.plan, request.run.quiet, run, None)
    is_new, run = run is None, run or run_setup.create_run(request, facts)
    consent.require(run.recipe, run.folder, trust)
    with run.lock("launch"):  # another process may have made and begun the same run meanwhile
        run.refuse_if_training()
        run_setup.store_plan(run, plan)
        verdict = launch_run(run, request.run, owns_process)
    if is_new and verdict.code == WRONG_INPUT and not run.metrics.exists():
        shutil.rmtree(run.folder)  # refused before a step: its name is free again
    return run, verdict


def launch_run(run: RunFolder, options: RunOptions, owns_process: bool = True) -> Verdict:
    """Train by the run's plan, with restarts; the verdict of the last attempt."""
    consent.require(run.recipe, run.folder, options=options)
    if with_learning_hooks(run.recipe, options.hook) != run.recipe:
        trained = ", ".join(run.recipe.options.get(HOOK_CODE, {})) or "none"
        why = f"{run.folder} was trained with these hooks that change what is learnt, as they were: {trained}"
        raise UserError(f"{why}; give the same ones, or train a new run")
    run.write_options(options)
    return train_with_restarts(run, cluster("local", owns_process=owns_process))


LOG_TAIL_CHARACTERS = 6000


def train_with_restarts(run: RunFolder, where: Cluster) -> Verdict:
    """Make attempts until one is not to be repeated; its verdict. Recipe, order and global batches stay."""
    options = run.options()
    restarts, reduced = 0, False
    while True:
        verdict = _verdict_of(run, where.attempt(run))
        if verdict.cause == errors.JobMemoryError.cause and reduced:
            return _fail(run, f"{verdict.reason}, with smaller micro-batches, too: ask for more with --mem")
        if verdict.cause in (errors.OutOfMemoryError.cause, errors.JobMemoryError.cause):
            reduced = True
            try:
                plan = with_smaller_budget(run.plan, run.recipe, run.facts)
            except TrainingError as error:
                return _fail(run, str(error))
            run.write_plan(plan)
            budget = f"{plan.micro_batch_samples} samples, {plan.micro_batch_tokens} tokens"
            recompute = ", activation checkpointing" if plan.activation_checkpointing == "on" else ""
            _log_restart(run, "smaller micro-batches", verdict.reason, f"at most {budget}{recompute}")
        elif verdict.cause == errors.SpikeError.cause:
            print_lines(f"isobatch: {verdict.reason}; going on from the checkpoint before")
        elif verdict.cause == errors.WorkerLostError.cause:
            restarts += 1
            if restarts > options.max_restarts:
                return _fail(run, f"{verdict.reason}; ended after --max-restarts {options.max_restarts}")
            _log_restart(run, "restart", verdict.reason, f"attempt {restarts + 1}")
        else:
            return verdict


def wait_for_orphans(run: RunFolder) -> None:
    """Wait for workers whose launcher was killed: they save and stop, then a new attempt can begin."""
    wait_for(lambda: not run.is_training(["train"]), GRACE_SECONDS, 0.2)


def _verdict_of(run: RunFolder, verdict: Verdict | None) -> Verdict:
    """An attempt's verdict; where it left none, one by the disk's state, or by the process that a signal
    ended first, which stands at the end of torchrun's log.
    """
    log = run.folder / "launcher.log"
    said = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:] if log.exists() else ""
    if verdict is None:
        dead = re.findall(r"rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)", said.rpartition("Root Cause")[2])
        rank, code = dead[-1] if dead else ("", "")
        if is_disk_full(run.folder):
            full = disk_full(run.folder / "exit.json", RuntimeError("No space left on device"))
            verdict = Verdict(FAILED, str(full), errors.DiskFullError.cause)
        elif code.startswith("-"):
            reason = f"rank {rank} was ended by signal {code[1:]}"
            verdict = Verdict(FAILED, reason, errors.WorkerLostError.cause)
        else:
            how = f"rank {rank} ended with exit code {code}" if dead else "no process left a verdict"
            run.write_exit(verdict := Verdict(BUG, f"{how}: see {log}"))
        print_lines(f"isobatch: {verdict.reason}")
    if verdict.code == BUG:
        sys.stderr.write(said)
    return verdict


def _log_restart(run: RunFolder, decision: str, reason: str, change: str) -> None:
    run.log_decision(decision, reason=reason, what=change)
    print_lines(f"isobatch: going on from the last checkpoint: {change}")


def _fail(run: RunFolder, reason: str) -> Verdict:
    run.mark_failed(reason)
    print_lines(f"isobatch: {reason}")
    return Verdict(FAILED, reason)
