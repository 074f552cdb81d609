"""`auto` and `resume`: plan, write the run folder, then run in place or start accelerate."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from engine import files, hardware
from engine import options as opt
from engine.errors import BUG, DONE, UserError
from engine.facts import Facts
from engine.plan import Plan, PlanOptions
from engine.planner import make_plan
from engine.prepare import prepare
from engine.recipe import Recipe
from engine.registry import workload
from engine.run import NONCE, Run, RunOptions, free_folder, run_name, runs_in
from launch.flags import Request, own_flags, request, split

HOME = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 120
"""How long children may take to save after a signal before they are killed."""


def auto(words: Sequence[str]) -> int:
    """Usage: auto --task TASK [flags]. Without --data the task's demo runs. Try: auto --task causal-lm"""
    asked = request(words, "auto")
    for note in asked.notes:
        _say(note, asked.run.quiet)
    run = find_run(asked)
    if run is not None and run.status() == "done":
        _say(f"{run.folder} has this recipe and is done (--again for a new run)", asked.run.quiet)
        _print_outcome(run)
        return DONE
    if run is not None:
        _say(f"going on with {run.folder} ({run.status()})", asked.run.quiet)
    return launch(set_up(asked, run), asked.run)


def set_up(asked: Request, run: Run | None, world: int | None = None) -> Run:
    """Facts and plan for this machine in the run's folder; a new one where `run` is None."""
    facts = prepare(asked.workload.make(asked.recipe)[1])
    if run is not None:
        check_data(run, facts)
    plan = make_plan_here(asked.recipe, facts, asked.plan, world)
    run = run or create_run(asked, facts)
    run.write_plan(plan)
    return run


def resume(words: Sequence[str]) -> int:
    """Usage: resume RUN [plan flags, run flags, --data PATH]. The recipe stays, on any machine."""
    positional, flags = split(words)
    if len(positional) != 1:
        raise UserError("resume: give the folder of one run, as in: resume runs/causal-lm-0123456789ab")
    run = Run.open(positional[0])
    if run.status() == "done":
        _say(f"{run.folder} is done", False)
        _print_outcome(run)
        return DONE
    data = flags.pop("data", None)
    plan = own_flags(
        {k: v for k, v in flags.items() if k not in opt.flags_of(RunOptions, "run")}, PlanOptions, "resume"
    )
    options = stored_options(run, {k: v for k, v in flags.items() if k in opt.flags_of(RunOptions, "run")})
    recipe = run.recipe()
    relocate(run, recipe, data)
    run.write_plan(make_plan_here(recipe, run.facts(), plan))
    return launch(run, options)


def stored_options(run: Run, changes: Mapping[str, Any]) -> RunOptions:
    """The run's own options, with what was asked anew."""
    names = opt.flags_of(RunOptions, "run")
    return opt.build(RunOptions, {k: v for k, v in {**run.options(), **changes}.items() if k in names}, "run")


def relocate(run: Run, recipe: Recipe, data: str | None) -> None:
    """Find the prepared data again, from another place if told; it must be the same samples."""
    place = dataclasses.replace(recipe, data=data) if data else recipe
    task, source = workload(recipe.task).make(place)
    facts = run.facts()
    if not data and Path(facts.folder).is_dir() and (Path(facts.folder) / "facts.json").exists():
        return
    source.check()
    fresh = prepare(source)
    check_data(run, fresh)
    files.write_json(run.folder / "facts.json", fresh.to_dict())


def check_data(run: Run, fresh: Facts) -> None:
    if fresh.fingerprint != run.facts().fingerprint:
        raise UserError(
            f"the data is not what {run.folder} was trained on (fingerprint {fresh.fingerprint} against"
            f" {run.facts().fingerprint}): --again starts a new run"
        )


def find_run(asked: Request) -> Run | None:
    """The run to go on with: the one named by --resume, else the newest here with this recipe."""
    choice, wanted = asked.run.resume, asked.recipe.hash()
    if choice not in ("auto", "never"):
        run = Run.open(choice)
        if run.recipe().hash() != wanted:
            raise UserError(
                f"--resume {choice}: that run has another recipe; `resume {choice}` goes on with its own"
            )
        return run
    if choice == "never" or asked.run.again:
        return None
    same = [r for r in runs_in(Path(asked.run.out).expanduser()) if r.recorded_hash() == wanted]
    if asked.run.name:
        same = [r for r in same if r.folder.name == asked.run.name]
    return same[-1] if same else None


def create_run(asked: Request, facts: Facts) -> Run:
    """A new run folder with recipe and facts, named after the recipe unless the user named it."""
    out = Path(asked.run.out).expanduser()
    name = asked.run.name or run_name(asked.recipe)
    folder = out / name if asked.run.name else free_folder(out, name)
    return Run.create(folder, asked.recipe, facts, opt.as_dict(asked.run))


def make_plan_here(recipe: Recipe, facts: Facts, asked: PlanOptions, world: int | None = None) -> Plan:
    """The plan for this machine, which can be run by this version."""
    task, _ = workload(recipe.task).make(recipe)
    plan = make_plan(recipe, facts, task.shape(facts), hardware.detect(), asked, world=world)
    if plan.strategy.startswith("zero"):
        raise UserError(
            f"this recipe needs --strategy {plan.strategy} here ({plan.reasons['strategy']}), which can be"
            " planned but not yet run: take a smaller model, or devices with more memory"
        )
    return plan


def launch(run: Run, options: RunOptions) -> int:
    """Train by the run's plan and answer with the run's own exit code."""
    from filelock import FileLock, Timeout

    files.write_json(run.folder / "run.json", opt.as_dict(options))
    try:
        with FileLock(run.folder / ".lock", timeout=0):
            return _in_place(run, options) if run.plan().processes == 1 else _in_children(run)
    except Timeout:
        raise UserError(f"{run.folder} is being trained by another process") from None


def _in_place(run: Run, options: RunOptions) -> int:
    from launch.train import train_run

    code = train_run(run, options)
    if code == DONE:
        _print_outcome(run)
    return code


def _in_children(run: Run) -> int:
    nonce = secrets.token_hex(8)
    arguments = ["--run", str(run.folder.resolve())]
    # accelerate's own code says only 0 or 1, and 1 for a clean stop too: the run's own file is the truth.
    start_children(run.plan(), HOME / "launch" / "train.py", arguments, run.folder, {NONCE: nonce})
    verdict = run.read_exit(nonce)
    if verdict is None or verdict[0] == BUG:
        sys.stderr.write((run.folder / "launcher.log").read_text(errors="replace")[-6000:])
        return BUG
    if verdict[0] == DONE:
        _print_outcome(run)
    return verdict[0]


def start_children(
    plan: Plan, script: Path, arguments: list[str], folder: Path, extra: Mapping[str, str] | None = None
) -> int:
    """Run `script` in the plan's world under accelerate; config and launcher.log go to `folder`."""
    config = write_config(folder, plan)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), str(script)]
    environment = {
        **os.environ,
        # Without these accelerate launch dies on SIGUSR1 and kills its workers 30 s after a signal.
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "PET_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS),
        # torchrun binds a free port itself; a port that was probed and released may be taken meanwhile.
        "PET_STANDALONE": "1",
        "OMP_NUM_THREADS": str(max(1, plan.threads)),
        **(extra or {}),
    }
    return _wait([*command, *arguments], environment, folder)


def _wait(command: list[str], environment: dict[str, str], folder: Path) -> int:
    """Run the launcher in a session of its own; pass every first signal on; keep its noise in a log."""
    with (folder / "launcher.log").open("ab") as noise:
        child = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)
        seen: set[int] = set()

        def forward(number: int, frame: FrameType | None) -> None:
            if number in seen and number == signal.SIGINT:
                os.killpg(child.pid, signal.SIGKILL)
            elif number not in seen:
                seen.add(number)
                child.send_signal(number)

        before = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        try:
            _copy_progress(child, noise)
            return child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _copy_progress(child: subprocess.Popen[bytes], noise: Any) -> None:
    """Show what the run says; keep the launcher's own chatter, and any traceback, in launcher.log."""
    from launch.train import SPOKEN

    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith(SPOKEN):
            sys.stderr.write(line[len(SPOKEN) :].decode(errors="replace"))
            sys.stderr.flush()
        else:
            noise.write(line)


def write_config(folder: Path, plan: Plan) -> Path:
    """The accelerate config of this plan, rendered from configs/accelerate."""
    import yaml

    template = HOME / "configs" / "accelerate" / ("cpu.yaml" if plan.device == "cpu" else "multi_gpu.yaml")
    config = yaml.safe_load(template.read_text())
    config.update(num_processes=plan.processes, num_machines=plan.nodes)
    path = folder / "accelerate.yaml"
    files.write_text(path, yaml.safe_dump(config))
    return path


def _print_outcome(run: Run) -> None:
    summary = run.summary() or {}
    figures = "  ".join(f"{k} {v:.4g}" for k, v in summary.get("metrics", {}).items() if isinstance(v, float))
    status, steps, split = (summary.get(k) for k in ("status", "steps", "split"))
    print(f"{run.folder}: {status}, {steps} steps, {split}: {figures}")


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr)
