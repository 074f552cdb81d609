"""Trials: the steps of a variant, in rounds that alternate with those of the base.

    with trial(base, world) as session:
        seconds = session.round(steps=4).seconds_for("samples")

A round loads its data anew, so that nothing is fetched ahead of it while another trial runs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import flags_of
from isobatch.core.measures import now
from isobatch.core.package import ROOT
from isobatch.core.plan import Plan
from isobatch.core.terminal import print_answer, print_lines, rendered
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.loader import StepWork
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.machine.detect import detect, rank_and_world_size
from isobatch.engine.planning.estimate import Target
from isobatch.engine.runs.run_folder import run_name
from isobatch.engine.train.build import Builder
from isobatch.engine.train.hooks import Hook, Hooks, Seen
from isobatch.engine.train.loop import run_phase
from isobatch.engine.train.state import Training
from isobatch.launch.local.accelerate_launcher import launch_workers
from isobatch.launch.local.arguments import parse_request
from isobatch.launch.local.run_setup import prepare_facts
from isobatch.models.attention_functions import register_again, registered_attention
from isobatch.models.base import ModelSize

WARM_STEPS = 2
ROUND_SECONDS = 0.4
"""A round has as many steps as fit into this."""
LEAST_STEPS, MOST_STEPS = 4, 50
"""Loader processes bring their batches together: a single step would show none or all of a wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A recipe and its plan on this machine: what a trial runs."""

    target: Target
    size: ModelSize
    plan: Plan

    def changed(self, plan: Mapping[str, Any], recipe: Mapping[str, Any]) -> Variant:
        """The same with these options of the plan and fields of the recipe.

        Raises UserError where the planner refuses it.
        """
        asked = dataclasses.replace(self.target.asked, **plan)
        target, size = dataclasses.replace(self.target, asked=asked), self.size
        if recipe:
            common = {k: v for k, v in recipe.items() if k in flags_of(type(target.recipe))}
            options = target.recipe.options | {k: v for k, v in recipe.items() if k not in common}
            other = dataclasses.replace(target.recipe, **common, options=options)
            target = dataclasses.replace(target, recipe=other)
            task, data = target.workload.make(target.recipe)
            task.check()
            target = dataclasses.replace(target, facts=prepare(data))
            size = task.model_size(target.facts)
        return Variant(target=target, size=size, plan=target.plan(size))


Measure = Callable[[Variant, Communicator, Any, Path], dict[str, Any]]
"""(what is measured, the world, the command's options, a folder for files) -> what was found, as JSON."""


def answer_in_world(
    words: Sequence[str], command: str, kind: str, options_class: type, measure: Measure, **shown: Any
) -> int:
    """Print what `measure(base, world, options, folder)` finds, on rank 0: as JSON, or as COMMAND.jinja says
    it with what is `shown` beside.

    Measures in this process, in the world that a launcher formed, or else in the plan's processes, which run
    the same words. `folder`: OUT/`kind`/NAME, which keeps the answer as COMMAND.json. Raises UserError.
    """
    request = parse_request(words, command, options_class)
    rank, world_size = rank_and_world_size(os.environ)
    if rank == 0:
        print_lines(*request.notes, quiet=request.run.quiet)
    facts = prepare_facts(request)
    size = request.workload.make(request.recipe)[0].model_size(facts)
    formed = world_size if world_size > 1 else None
    target = Target(command, request.workload, request.recipe, facts, detect(), request.plan, formed)
    base = Variant(target=target, size=size, plan=target.plan(size))
    # More loader processes than cores are tried on purpose: they may wait for a slow storage.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if base.plan.processes > world_size:
        script = str(ROOT / "launch" / "__main__.py")
        with tempfile.TemporaryDirectory() as temporary:
            code, _ = launch_workers(base.plan, [script, command, *words], Path(temporary))
            if code != DONE:
                sys.stderr.write((Path(temporary) / "launcher.log").read_text(errors="replace")[-4000:])
                raise UserError(f"{command}: its {base.plan.processes} processes ended with {code}")
        return DONE  # rank 0 has printed
    folder = Path(request.run.out).expanduser() / kind / (request.run.name or run_name(request.recipe))
    world, options = Communicator(base.plan), options_class(**request.extra)
    with atomic_files.explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(base, world, options, folder)
        if world.is_main:
            atomic_files.write_json(folder / f"{command}.json", found)
    if world.is_main:
        print_answer(found, rendered(__file__, command, **found, **shown), as_json=options.json)
    if world_size > 1:
        sys.stdout.flush()
        world.close()
        world.exit_process(DONE)
    return DONE


@contextlib.contextmanager
def trial(variant: Variant, world: Communicator) -> Iterator[TrialSession]:
    """The training of a variant in its last phase, warm: its buffers are made and its graphs compiled."""
    gc.collect()  # what an earlier trial has left
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    world = copy.copy(world)
    world.plan = variant.plan
    with Builder(variant.target.recipe, variant.target.facts, variant.plan, world) as builder:
        for schedule in builder.schedules[:-1]:
            builder.prepare_phase(schedule)
        with builder.phase(builder.schedules[-1]) as state:
            yield TrialSession(variant, state)


class TrialSession:
    """A phase of which steps are run when asked."""

    def __init__(self, variant: Variant, state: Training) -> None:
        self.variant, self.state, self.world = variant, state, state.world
        self._step = 0
        self._attention = registered_attention()
        began = now()
        self._run(WARM_STEPS)
        self.synchronize()
        fitting = int(ROUND_SECONDS * WARM_STEPS / (now() - began))
        self.steps_per_round = int(self.world.broadcast_object(min(MOST_STEPS, max(LEAST_STEPS, fitting))))
        """As many as fit into ROUND_SECONDS by the warm ones, and what is compiled in them; on every rank."""

    def round(self, steps: int, traces: bool = False) -> Stopwatch:
        """So many steps, timed. The loader begins in steps before them: its processes bring a batch each."""
        watch = Stopwatch(self, skip=1 + self.state.plan.workers, steps=steps, traces=traces)
        self._run(watch.stop + 1, watch)
        return watch

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def _run(self, count: int, *hooks: Hook) -> None:
        """The next `count` steps; from the phase's first again where it has no more. No more is fetched."""
        whole = self.state.schedule.steps
        torch.set_num_threads(self.state.plan.threads or torch.get_num_threads())
        register_again(self._attention)
        if self._step + count > whole:
            self._step = 0
        while count:
            taken = min(count, whole - self._step)
            run_phase(self.state, Hooks(hooks), self._step, self._step + taken)
            self._step, count = (self._step + taken) % whole, count - taken


class Stopwatch(Seen):
    """Times `steps` steps behind the first `skip`, with an idle device at both ends; one more must follow."""

    def __init__(self, session: TrialSession, skip: int, steps: int, traces: bool) -> None:
        """`traces`: whether the one that follows is traced by torch.profiler."""
        super().__init__()
        self.session, self.start, self.stop, self.traces = session, skip, skip + steps, traces
        self._begun = 0
        self.trace: Any = None
        self.wall = self.busy = 0.0
        """Seconds of the steps, by the clock and of the processor."""
        self.parts: dict[str, float] = {}
        """Part of a step -> seconds in all of them."""

    @property
    def works(self) -> list[StepWork]:
        """What this rank did in the steps."""
        return [figures.output.loaded.work for figures in self.figures[self.start : self.stop]]

    def seconds_for(self, unit: str) -> float:
        """For one of the batch's `samples`, or of its `tokens` without padding."""
        return self.wall / max(1, sum(len(w.samples) if unit == "samples" else w.tokens for w in self.works))

    def around(self, state: Training, step: int) -> AbstractContextManager[None]:  # noqa: ARG002
        if self._begun == self.start:
            self.session.synchronize()
            self.busy = time.process_time()
            state.world.recorder.start(state.world.device)
        if self._begun == self.stop:
            self.parts = state.world.recorder.stop()  # waits for the device
            self.wall, self.busy = sum(self.parts.values()), time.process_time() - self.busy
        self._begun += 1
        return self._traced() if self.traces and self._begun > self.stop else contextlib.nullcontext()

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """The trace names the parts of the step, and has Python's stacks with the modules."""
        world, kinds = self.session.world, torch.profiler.ProfilerActivity
        activities = [kinds.CPU, *([kinds.CUDA] if world.device.type == "cuda" else [])]
        with torch.profiler.profile(activities=activities, acc_events=True, with_stack=True) as self.trace:
            world.recorder.start(world.device, annotate=True)
            yield
            world.recorder.stop()
