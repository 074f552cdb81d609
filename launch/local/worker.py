"""What each process of a run does.

Under accelerate, torchrun or srun launch/train.py calls `main` in each process; `auto` with one process calls
`train_run` itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.errors import BUG, DONE, FAILED, STOPPED, WRONG_INPUT, UserCodeError, UserError, first_line
from isobatch.core.extras import has
from isobatch.core.package import own_command
from isobatch.core.terminal import LINE_MARK, RELAY_VARIABLE, Console, doing, print_lines, start_status
from isobatch.engine import consent
from isobatch.engine.machine.detect import check_world, detect, rank_and_world_size
from isobatch.engine.runs.classify_errors import classify
from isobatch.engine.runs.run_folder import NONCE, RunFolder, Verdict
from isobatch.engine.train.own_hooks import load_hooks
from isobatch.launch.local import run_setup
from isobatch.launch.local.arguments import Request, parse_request

if TYPE_CHECKING:
    from isobatch.core.plan import PlanOptions
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.runs.run_options import RunOptions

KERNEL_CACHES, MOST_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "64"
"""oneDNN and ideep below torch keep 1,024 kernels each, one for every shape, with memory of its own: in bf16
on a CPU 0.5 GB within twelve steps of rows of many lengths, and no step was faster for it (measured)."""
RANK_0_REPORTS_FIRST_SECONDS = 3
PROJECT, FINAL = "isobatch", "final/"
"""The project of all runs in a tracker, and what stands before their final metrics."""


def train_run(run: RunFolder, options: RunOptions, owns_process: bool = True) -> int:
    """Train a run by its plan in this process group; returns the exit code and writes exit.json.

    With `owns_process` False no signal is handled and no watchdog ends the process.
    """
    if not owns_process:
        options = dataclasses.replace(options, hang_timeout=0)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.update({name: os.environ.get(name, MOST_KERNELS) for name in KERNEL_CACHES})
    if not options.debug:
        warnings.filterwarnings("ignore", category=FutureWarning)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main = rank_and_world_size(os.environ)[0] == 0
    if main and owns_process and not options.quiet:
        start_status(_mark())
    with run.lock("train") if main else contextlib.nullcontext():
        from isobatch.engine.distributed.communicator import Communicator

        world = Communicator(run.plan, options.hang_timeout, options.tracker, str(run.folder))
        verdict: Verdict | None = None  # after a second Ctrl-C: who asked for the first knows it
        try:
            verdict = _train(run, options, world, owns_process)
        except Exception as bug:
            verdict = Verdict(BUG, f"a traceback, whose last line is {type(bug).__name__}: {first_line(bug)}")
            raise
        finally:
            if verdict and (main or verdict.code not in (DONE, STOPPED)):
                run.write_exit(verdict)
        code = verdict.code
        if code not in (DONE, STOPPED):
            # The other ranks may wait in a collective for ever: exit, and the launcher ends them.
            world.exit_process(code)
        world.close()
    # torchrun treats any other code as a crash and would kill ranks that are still writing.
    world.exit_process(DONE if code == STOPPED else code)
    return code


def _train(run: RunFolder, options: RunOptions, world: Communicator, owns_process: bool) -> Verdict:
    doing("loading the libraries")
    import torch

    from isobatch.core.errors import WorkerLostError
    from isobatch.engine.distributed.liveness import PeerMonitor
    from isobatch.engine.trainer import train_run as trainer

    log = run.folder / "log.txt" if world.is_main else None
    console = Console(log, options.quiet or not world.is_main, _mark())

    def end_process(reason: str) -> None:
        """Called by peer monitor and watchdog: the main thread is blocked and cannot end it itself."""
        if not run.has_verdict():
            run.write_exit(Verdict(FAILED, reason, WorkerLostError.cause))
            console.say(f"isobatch: {reason}", always=True)
        os._exit(FAILED)

    peers = PeerMonitor(world, end_process)
    try:
        if options.tracker != "none":
            begin_tracking(run, world)
        plotter = Plotter(run, draws=world.is_main and has("matplotlib"))
        with peers, torch.autograd.set_detect_anomaly(options.anomaly):
            own = load_hooks(options.hook)
            on_rank = trainer.RunOnRank(
                run, world, options, console, end_process, own, owns_process, plotter.start
            )
            state = trainer.train_run(on_rank)
        if state.task.plot_every:
            plotter.finish()
        if world.is_main:
            on_rank.tracker.send((run.summary() or {}).get("metrics", {}), state.progress.steps, FINAL)
        return Verdict(DONE, "")
    except Exception as caught:
        error = classify(caught)
        own_code = isinstance(error, UserCodeError)
        if error is None or (own_code and (options.debug or not owns_process)):
            raise
        if isinstance(error, UserCodeError):
            console.say(error.what.rstrip("\n"))
        lost = isinstance(error, WorkerLostError)
        if lost:
            traceback.print_exc()
            error = WorkerLostError(peers.reason() or str(error))
        code = error.exit_code
        if (code == FAILED or own_code) and world.is_main:
            with contextlib.suppress(UserError):  # a full disk has no room for it
                run.mark_failed(str(error))
        doing()
        if owns_process and ((world.is_main and not lost) or _failed_alone(run)):
            line = " ".join(str(error).split())
            console.say(line if code == STOPPED else f"isobatch: {line}", always=error.cause != "planned")
        return Verdict(code, str(error), error.cause)  # without a process of its own, the caller raises it


def _mark() -> str:
    """Distinguishes under `auto` the run's own lines from the launcher's."""
    return LINE_MARK if NONCE in os.environ else ""


def _failed_alone(run: RunFolder) -> bool:
    """Print once: rank 0 reports errors common to all ranks; a rank that fails alone reports itself."""
    time.sleep(RANK_0_REPORTS_FIRST_SECONDS)
    return not run.has_verdict()


def begin_tracking(run: RunFolder, world: Communicator) -> None:
    """Open the trackers with the run's recipe and plan as hyper-parameters; a resumed run goes on.

    Raises UserError.
    """
    name = run.folder.name
    planned = {f"plan.{name}": value for name, value in run.plan.to_dict().items() if name != "reasons"}
    settings = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in {**run.recipe.values(), **planned}.items()
    }
    identity = hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:16]
    named = {"name": name, "resume": "allow"}
    options = {"wandb": {**named, "id": identity}, "mlflow": {"run_name": name}, "trackio": named}
    try:
        project = os.environ.get("WANDB_PROJECT", PROJECT) if run.options().tracker == "wandb" else PROJECT
        world.accelerator.init_trackers(project, config=settings, init_kwargs=options)
    except Exception as error:  # each library has errors of its own: no server, no key, no database
        tracker = run.options().tracker
        raise UserError(f"--tracker {tracker}: cannot begin: {type(error).__name__}: {error}") from error


class Plotter:
    """Starts `isobatch report RUN --png`; at most one at a time. `draws`: whether this rank does."""

    def __init__(self, run: RunFolder, draws: bool) -> None:
        self.run, self.draws = run, draws
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Draw in the background, at the lowest priority, unless that is still going on."""
        if self.draws and (self._process is None or self._process.poll() is not None):
            words = ["nice", "-n", "19", *own_command("report", str(self.run.folder), "--png")]
            none, own = subprocess.DEVNULL, {**os.environ, **consent.environment()}
            self._process = subprocess.Popen(words, env=own, stdin=none, stdout=none, stderr=none)

    def finish(self) -> None:
        """Draw what there is at the end, and wait for it."""
        if self._process is not None:  # what it draws may be older
            self._process.wait()
        self.start()
        if self._process is not None:
            self._process.wait()


def main(words: Sequence[str]) -> int:
    """`--run FOLDER` from `auto`, `--redo FOLDER` from `verify`, or a task's flags under a launcher.

    `--run FOLDER --plan OPTIONS` plans for the world that is here: OPTIONS as JSON.
    """
    if list(words[:1]) == ["--redo"] and len(words) == 2:
        from isobatch.launch.local.redo_steps import redo_task_file

        if RELAY_VARIABLE in os.environ and rank_and_world_size(os.environ)[0] == 0:
            start_status(LINE_MARK)
        return redo_task_file(Path(words[1]))
    if list(words[:1]) == ["--run"] and len(words) in (2, 4):
        run = run_setup.open_run(words[1])
        if words[2:3] == ["--plan"]:
            _plan_for_this_world(run, run_setup.plan_options_from_request(json.loads(words[3])))
        options = run.options()
        consent.require(run.recipe, run.folder, options=options)
        return train_run(run, options)
    return _train_from_flags(words)


def _agreed(choose: Callable[[], str], asked: PlanOptions, hang_timeout: int) -> str:
    """What rank 0 chooses, on every rank, before there is a plan. Raises its UserError on every rank."""
    rank, size = rank_and_world_size(os.environ)
    if size == 1:
        return choose()
    from isobatch.engine.distributed.communicator import broadcast_choice_before_planning

    on_cpu = asked.device == "cpu" or (asked.device == "auto" and detect().kind == "cpu")
    return broadcast_choice_before_planning(choose, rank, on_cpu, hang_timeout)


def _plan_for_this_world(run: RunFolder, asked: PlanOptions) -> None:
    """Plan a run for the processes that are here, however many there were before; its recipe stays."""
    options, (_, size) = run.options(), rank_and_world_size(os.environ)

    def plan() -> str:
        plan = run_setup.plan_for_training(run.recipe, run.facts, asked, options.quiet, run, size)
        run_setup.store_plan(run, plan)
        return ""

    try:
        _agreed(plan, asked, options.hang_timeout)
    except UserError as error:
        run.write_exit(Verdict(WRONG_INPUT, str(error)))
        raise
    run.forget_plan()


def _train_from_flags(words: Sequence[str]) -> int:
    from isobatch.launch.clusters.cluster import refuse_if_in_a_job

    rank, size = rank_and_world_size(os.environ)
    request = _with_deepspeed_strategy(parse_request(words, "train.py"))
    quiet = request.run.quiet or rank != 0
    print_lines(*request.notes, quiet=quiet)
    if request.plan.processes:
        check_world(request.plan.processes, size)
    # One rank prepares, the others wait for its file lock: a process group could time out meanwhile.
    facts = run_setup.prepare_facts(request)

    def choose_run() -> str:
        run = run_setup.find_run(request, facts)
        if run is None or run.status() != "done":
            if run is not None:
                refuse_if_in_a_job(run)
                run.refuse_if_training()
            plan = run_setup.plan_for_training(request.recipe, facts, request.plan, quiet, run, size)
            run = run or run_setup.create_run(request, facts)
            run_setup.store_plan(run, plan)
            run.write_options(request.run)
        consent.remember(request.recipe, request.run)
        return str(run.folder.resolve())

    run = RunFolder.open(_agreed(choose_run, request.plan, request.run.hang_timeout))
    if run.status() == "done":
        print_lines(f"{run.folder} is done (--again for a new run)")
        return DONE
    return train_run(run, request.run)


def _with_deepspeed_strategy(request: Request) -> Request:
    """The request with the strategy of accelerate's DeepSpeed config; accelerate itself builds no engine.

    Raises UserError where the config has no deepspeed_config_file or --strategy contradicts it.
    """
    if os.environ.pop("ACCELERATE_USE_DEEPSPEED", "false") != "true":
        return request
    from isobatch.engine.strategies.deepspeed_engine import given_config, strategy_of

    config = given_config()
    if config is None:
        raise UserError("accelerate's config asks for DeepSpeed without a deepspeed_config_file: name one")
    strategy = strategy_of(config)
    if request.plan.strategy not in ("auto", strategy):
        raise UserError(f"--strategy {request.plan.strategy}: the DeepSpeed config is for {strategy}")
    return dataclasses.replace(request, plan=dataclasses.replace(request.plan, strategy=strategy))
