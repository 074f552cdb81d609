"""The driver of a run on Ray: it makes attempts, each one fit of a TorchTrainer, as `auto` makes them here.

Ray restarts nothing by itself. What ended an attempt stands in exit.json, and `restarts.py` decides whether
another one goes on from the last checkpoint, in as many workers as there is room for.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from isobatch.core import atomic_files
from isobatch.core.errors import (
    BUG,
    DONE,
    FAILED,
    RESIZED,
    STOPPED,
    WRONG_INPUT,
    UserError,
    WorkerLostError,
)
from isobatch.core.flags import options_to_dict
from isobatch.engine import consent
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.engine.runs.slurm_queue import refuse_if_in_a_job
from isobatch.launch.cli import guarded
from isobatch.launch.clusters.ray.places import Places
from isobatch.launch.clusters.ray.run_log import RunLog
from isobatch.launch.commands.auto import print_outcome
from isobatch.launch.local import restarts
from isobatch.launch.local.arguments import Request, parse_request
from isobatch.launch.local.interfaces import local_address
from isobatch.launch.local.run_setup import (
    create_run,
    environment_elsewhere,
    find_run,
    prepare_facts,
    print_unless_quiet,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WATCH_SECONDS = 1.0
OWN_RESTARTS = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_TRAIN_METRICS_ENABLED": "0"}
"""Ray would start the workers of a node that is about to go anew within an attempt, without another plan."""
LOG_TAIL_CHARACTERS = 2500


class Trainer(Protocol):
    """What an attempt needs of a TorchTrainer."""

    def fit(self) -> Any: ...


def train_until_done(
    trainer: Callable[[int, dict[str, Any]], Trainer],
    flags: str,
    *,
    folder: str,
    address: str,
    workers: tuple[int, int],
    processes: int,
    resources: Mapping[str, float],
    limit_cpus: bool = False,
) -> int:
    """Train the run of `flags` in attempts until it is done; its exit code.

    `trainer(workers, order)`: one attempt with so many workers. `folder`: where relative paths begin, on all
    nodes. `workers`: at least and at most. `processes`: of each worker. `limit_cpus`: whether training keeps
    to the cores among `resources`.
    """
    places = Places(resources, *workers)
    cpus = int(resources["CPU"]) if limit_cpus else 0

    def train() -> int:
        os.chdir(folder)
        request = _request(flags)
        _connect(address)
        run = _find_or_create_run(request)
        if run.status() == "done":
            print_unless_quiet(f"{run.folder} is done (--again for a new run)", request.run.quiet)
            return DONE
        with StopFlag() as stop, run.lock("launch"):
            run.refuse_if_training()
            run.write_options(request.run)
            order = {"processes": processes, "cpus": cpus, "folder": folder}
            plan = atomic_files.json_text({**options_to_dict(request.plan), "processes": None})
            log = RunLog(run.folder / "log.txt", request.run.quiet)
            attempts = Attempts(trainer, places, order, plan, stop, log)
            verdict = restarts.train_with_restarts(run, attempts)
        if verdict.code == DONE:
            print_outcome(run)
        elif verdict.code == WRONG_INPUT:
            log.print_unless_said(verdict.reason)
        return verdict.code

    return guarded(train)


def _request(flags: str) -> Request:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flags.yaml"
        path.write_text(flags, encoding="utf-8")
        return parse_request(["--config", str(path)], "ray")


def _connect(address: str) -> None:
    """Join the cluster. Raises UserError where there is none."""
    import ray

    host, colon, port = address.rpartition(":")
    if colon and not local_address(host.strip("[]"), int(port)):
        raise UserError(f"--address {address}: nothing answers there; `ray status` shows a node's cluster")
    os.environ.update({name: os.environ.get(name, value) for name, value in OWN_RESTARTS.items()})
    if not ray.is_initialized():
        try:
            ray.init(
                address=address,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,  # the run's own lines stand in its log
            )
        except ConnectionError:
            raise UserError(
                f"--address {address}: this machine is in no Ray cluster; `ray start --head` makes one, and"
                " --address local needs none"
            ) from None


def _find_or_create_run(request: Request) -> RunFolder:
    facts = prepare_facts(request)
    consent.remember(request.recipe, request.run.sends())
    run = find_run(request, facts)
    if run is not None:
        refuse_if_in_a_job(run)
    return RunFolder((run or create_run(request, facts)).folder.resolve())


class Attempts:
    """An `Attempt` of restarts.py: each call is one fit, in the workers that there is room for."""

    def __init__(
        self,
        trainer: Callable[[int, dict[str, Any]], Trainer],
        places: Places,
        order: dict[str, Any],
        plan: str,
        stop: StopFlag,
        log: RunLog,
    ) -> None:
        self._trainer, self._places, self._order, self._plan = trainer, places, order, plan
        self._stop, self._log = stop, log
        self._workers = 0
        """Of the attempt before; 0 before the first."""

    def __call__(self, run: RunFolder) -> Verdict | None:
        """Run one attempt to its end; None where no process left a verdict."""
        restarts.wait_for_orphans(run)
        workers = self._places.count(lambda: self._stop.requested)
        if self._stop.requested:
            return Verdict(STOPPED, "asked to stop before it began")
        order = self._order_for(run, workers)
        error, more = self._fit(run, workers, order)
        run.forget_plan()
        verdict = judge(run.read_exit(order["nonce"]), error, more, self._stop.requested)
        if verdict is not None and verdict.cause == WorkerLostError.cause:
            self._places.distrust()
        if verdict is None or verdict.code == BUG:
            atomic_files.write_text(run.folder / "launcher.log", _worker_logs(run))
        return verdict

    def _order_for(self, run: RunFolder, workers: int) -> dict[str, Any]:
        """What the workers are told. They plan where this launch begins, and where the world is another."""
        if self._workers and workers != self._workers:
            print(f"isobatch: going on with {workers} of {self._places.most} workers", file=sys.stderr)
        plan = "" if workers == self._workers else self._plan
        self._workers = workers
        storage = run.folder / "ray"
        storage.mkdir(exist_ok=True)
        return {
            **self._order,
            "run": str(run.folder),
            "nonce": secrets.token_hex(8),
            "plan": plan,
            "storage": str(storage),
            "environment": environment_elsewhere(),
        }

    def _fit(self, run: RunFolder, workers: int, order: dict[str, Any]) -> tuple[str, int]:
        """Run one fit; what went wrong with it, and for how many more workers there was room, if any.

        In a thread: in the main one, Ray would end the workers at the first Ctrl-C.
        """
        from isobatch.launch.clusters.ray.workers import started_file, stop_file

        error: list[str] = []

        def fit() -> None:
            try:
                self._trainer(workers, order).fit()
            except Exception as caught:
                error.append(_first_failure(caught))

        attempt, more = threading.Thread(target=fit, daemon=True), 0
        started, stop = started_file(run, order["nonce"]), stop_file(run, order["nonce"])
        attempt.start()
        looks_for_more = False
        while attempt.is_alive():
            if not looks_for_more and started.exists():  # before, it would take the workers' own places
                self._places.want(self._places.most - workers)
                looks_for_more = True
            if not more and (found := self._places.found()) and self._places.has_settled():
                more = found
            if self._stop.requested or more:
                stop.touch()
            attempt.join(WATCH_SECONDS)
            self._log.print_new()
        self._places.release()
        for mark in (started, stop):
            mark.unlink(missing_ok=True)
        return "".join(error), more


def judge(verdict: Verdict | None, error: str, more: int, is_asked_to_stop: bool) -> Verdict | None:
    """What an attempt's end means. `error`: of its fit; `more`: workers for which it was to make room."""
    if verdict is not None and verdict.code != STOPPED:
        return verdict
    if is_asked_to_stop:
        return verdict or Verdict(STOPPED, "ended before it could save")
    if more:
        return Verdict(STOPPED, f"there is room for {more} more workers", RESIZED)
    if verdict is not None:
        error = error or "a signal stopped the workers, and not the run"
    return Verdict(FAILED, f"a Ray worker was lost: {error}", WorkerLostError.cause) if error else None


def _first_failure(error: Exception) -> str:
    """A line on what ended a fit: of the first worker that failed, where Ray says which."""
    failures = getattr(error, "worker_failures", None) or {}
    said = [f"worker {rank}: {failure}" for rank, failure in sorted(failures.items())]
    line = " ".join((said[0] if said else str(error)).split())
    return line.partition(" Worker info:")[0][:300]


def _worker_logs(run: RunFolder) -> str:
    """The ends of the workers' logs, one below the other."""
    paths = sorted((run.folder / "ray").glob("worker-*.log"))
    ends = [(path.name, path.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]) for path in paths]
    return "".join(f"--- {name}\n{text}\n" for name, text in ends)
