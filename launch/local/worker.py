"""What each process of a run does. Under accelerate, torchrun or srun launch/train.py calls `main` in all of
them; `auto` calls `train_run` in place for one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.errors import BUG, DONE, FAILED, STOPPED, UserError
from isobatch.engine.runs.classify_errors import classify
from isobatch.engine.runs.run_folder import NONCE, RunFolder, Verdict
from isobatch.engine.runs.run_options import RunOptions

if TYPE_CHECKING:
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.launch.local.arguments import Request

RANK_0_SPEAKS_FIRST_SECONDS = 3


def train_run(run: RunFolder, options: RunOptions, owns_process: bool = True) -> int:
    """Train a run's plan in this world; returns the exit code and leaves it in exit.json.

    Where the process is another program's, no signal is caught and no watchdog may end it.
    """
    if not owns_process:
        options = dataclasses.replace(options, hang_timeout=0)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _quiet_libraries(options)
    from isobatch.engine.distributed.communicator import Communicator, rank_and_world_size

    main = rank_and_world_size(os.environ)[0] == 0
    with run.lock("train") if main else contextlib.nullcontext():
        world = Communicator(run.plan, options.hang_timeout, options.tracker, str(run.folder))
        verdict = Verdict(BUG, "a bug: see the traceback")
        try:
            verdict = _train(run, options, world, owns_process)
        finally:
            code = verdict.code
            if main or code not in (DONE, STOPPED):
                run.write_exit(verdict)
        if code not in (DONE, STOPPED):
            # The others may stand in a collective that will never end: leave, and the launcher ends them.
            world.exit_process(code)
        world.close()
    # torchrun takes any other code for a crash and would kill ranks that are still writing.
    world.exit_process(DONE if code == STOPPED else code)
    return code


def _train(run: RunFolder, options: RunOptions, world: Communicator, owns_process: bool) -> Verdict:
    import torch

    from isobatch.core.errors import WorkerLostError
    from isobatch.engine.runs.console import LINE_MARK, Console
    from isobatch.engine.training.run_context import RunContext
    from isobatch.engine.training.trainer import train

    # Under `auto` the run's own lines are told from the launcher's by a mark.
    mark = LINE_MARK if NONCE in os.environ else ""
    log = run.folder / "log.txt" if world.is_main else None
    console = Console(log, options.quiet or not world.is_main, mark)

    def end(reason: str) -> None:
        """From the watch: the main thread stands in something that will not return."""
        if not run.has_verdict():
            run.write_exit(Verdict(FAILED, reason, WorkerLostError.cause))
            console.say(f"isobatch: {reason}", always=True)
        os._exit(FAILED)

    if options.tracker != "none":
        world.accelerator.init_trackers("isobatch", config={})
    try:
        with torch.autograd.set_detect_anomaly(options.anomaly):
            train(RunContext(run, world, options, console, catch_signals=owns_process), end)
        return Verdict(DONE, "")
    except Exception as caught:
        error = classify(caught)
        if error is None:
            raise
        code = error.exit_code
        if isinstance(error, WorkerLostError):
            traceback.print_exc()
        if code == FAILED and world.is_main:
            run.mark_failed(str(error))
        console.end_phase()
        line = " ".join(str(error).split())
        if not owns_process:  # whose program gets the error raised
            return Verdict(code, str(error), error.cause)
        if (world.is_main and not isinstance(error, WorkerLostError)) or _failed_alone(run):
            console.say(line if code == STOPPED else f"isobatch: {line}", always=True)
        return Verdict(code, str(error), error.cause)


def _failed_alone(run: RunFolder) -> bool:
    """Print once: rank 0 reports errors common to all ranks; a rank that fails alone reports itself."""
    time.sleep(RANK_0_SPEAKS_FIRST_SECONDS)
    return not run.has_verdict()


def _quiet_libraries(options: RunOptions) -> None:
    if not options.debug:
        warnings.filterwarnings("ignore", category=FutureWarning)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main(words: Sequence[str]) -> int:
    """`--run FOLDER` from `auto`, `--redo FOLDER` from `verify`, or a task's flags in a launcher's world."""
    if list(words[:1]) == ["--redo"] and len(words) == 2:
        from isobatch.launch.local.redo_steps import redo_as_told

        return redo_as_told(Path(words[1]))
    if list(words[:1]) == ["--run"] and len(words) == 2:
        run = RunFolder.open(words[1])
        return train_run(run, run.options())
    return _with_flags(words)


def _with_flags(words: Sequence[str]) -> int:
    from isobatch.engine.distributed.communicator import (
        broadcast_choice_before_planning,
        check_world,
        rank_and_world_size,
    )
    from isobatch.engine.planning.detect import detect
    from isobatch.launch.local.arguments import parse_request
    from isobatch.launch.local.run_setup import find_run, plan_run, prepare_facts

    rank, size = rank_and_world_size(os.environ)
    asked = _under_deepspeed(parse_request(words, "train.py"))
    if asked.plan.processes:
        check_world(asked.plan.processes, size)
    # Every rank asks; one makes, the others wait at a file lock: no process group stands idle meanwhile.
    facts = prepare_facts(asked)

    def choose() -> str:
        run = find_run(asked, facts)
        if run is None or run.status() != "done":
            if run is not None:
                run.refuse_if_training()
            run = plan_run(asked, facts, run, size)
            run.write_options(asked.run)
        return str(run.folder.resolve())

    cpu = asked.plan.device == "cpu" or (asked.plan.device == "auto" and detect().kind == "cpu")
    run = RunFolder.open(broadcast_choice_before_planning(choose, rank, size, cpu, asked.run.hang_timeout))
    if run.status() == "done":
        print(f"{run.folder} is done (--again for a new run)", file=sys.stderr)
        return DONE
    return train_run(run, asked.run)


def _under_deepspeed(asked: Request) -> Request:
    """The strategy of the DeepSpeed config that accelerate was given. The engine is ours to build."""
    if os.environ.pop("ACCELERATE_USE_DEEPSPEED", "false") != "true":
        return asked
    from isobatch.engine.strategies.deepspeed_engine import given_config, strategy_of

    config = given_config()
    if config is None:
        raise UserError("accelerate's config asks for DeepSpeed without a deepspeed_config_file: name one")
    strategy = strategy_of(config)
    if asked.plan.strategy not in ("auto", strategy):
        raise UserError(f"--strategy {asked.plan.strategy}: the DeepSpeed config is for {strategy}")
    return dataclasses.replace(asked, plan=dataclasses.replace(asked.plan, strategy=strategy))
