"""Ray as a cluster: the flags of `ray`, and the driver of a run: attempts, each one fit of a TorchTrainer.

Ray restarts nothing by itself. What ended an attempt stands in exit.json, and `launch_run.py` decides whether
another one goes on from the last checkpoint.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import BUG, DONE, FAILED, STOPPED, WRONG_INPUT, UserError, WorkerLostError
from isobatch.core.flags import flags_of, options_to_dict
from isobatch.core.number_ranges import Count, Positive
from isobatch.core.terminal import print_lines
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.launch.clusters.cluster import refuse_if_in_a_job
from isobatch.launch.clusters.local.here import Local
from isobatch.launch.commands.auto import print_outcome
from isobatch.launch.commands.plan import comments_on
from isobatch.launch.control.one_run import LogReader
from isobatch.launch.local import launch_run, placement
from isobatch.launch.local.arguments import Request, request_text
from isobatch.launch.local.interfaces import local_address
from isobatch.launch.local.run_setup import environment_elsewhere
from isobatch.launch.local.words import config_text

HERE = r"auto|local|(\[[0-9a-f:]+\]|[\w.-]+):\d+"
"""Addresses of a cluster of which this machine is a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions(placement.ElsewhereOptions):
    """Flags of `ray`."""

    ray_workers: Positive = 1
    """Ray workers, each with its own resources."""
    gpus_per_worker: Count = 0
    """GPUs of each worker, each with a process of its own."""
    cpus_per_worker: Positive | None = None
    """Cores of each worker; by default Ray counts one, and training takes what the node has."""
    address: str = "auto"
    """The cluster: auto (the one that this machine is in), local (this machine alone) or HOST:PORT of its
    head."""

    def __post_init__(self) -> None:
        if not re.fullmatch(HERE, self.address):
            said = "give auto, local or HOST:PORT of a cluster's head; `isobatch ray` without --submit prints"
            raise UserError(f"--address {self.address}: {said} the `ray job submit` for another")


HEAD = (
    "isobatch ray --config FILE --submit trains this on a Ray cluster until it is done. Every node has",
    "isobatch[ray] and sees FOLDER, in which the run and its data lie. From elsewhere:",
    "  ray job submit --address http://HEAD:8265 -- sh -c 'cd FOLDER && isobatch ray --config FILE --submit'",
)


def submit(words: Sequence[str]) -> int:
    """Usage: ray --task TASK --ray-workers N --gpus-per-worker G [flags] [--submit]

    flags: --cpu --cpus-per-worker C --address auto|local|HOST:PORT, and those of `auto`. All nodes see
           the folder in which this is run, --out and --data.
    """
    request, options = placement.parse(words, "ray", RayOptions, "gpus_per_worker")
    workers, gpus = options.ray_workers, options.gpus_per_worker
    processes = placement.processes_each(request, "--ray-workers", workers, gpus)
    if not options.submit:
        flags = {n: f for n, f in flags_of(RayOptions).items() if getattr(options, n) != f.default}
        own = [("ray", flags, {name: getattr(options, name) for name in flags})] if flags else []
        machine = f"{workers}x{gpus}x{options.hardware or 'h100'}" if gpus else "here"
        print(comments_on(request, machine, HEAD), request_text(request), config_text(own), sep="\n")
        return DONE
    if importlib.util.find_spec("ray") is None:
        raise UserError("--submit needs: pip install 'isobatch[ray]', or 'ray[train]'")
    return train_until_done(request, options, processes)


OFF = ("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "RAY_TRAIN_METRICS_ENABLED", "RAY_USAGE_STATS_ENABLED")
"""Ray would start the workers of a node that is about to go anew within an attempt, without another plan; and
send statistics of its use.
"""
WATCH_SECONDS = 1.0


class Ray(Local):
    """Ray, driven by a process of this machine: the run's lock is here, as where it trains here."""

    options: RayOptions
    order: dict[str, Any]
    """What the workers of the next attempt are told; they plan where the first one begins."""
    stop: StopFlag
    log: LogReader

    def attempt(self, run: RunFolder) -> Verdict | None:
        launch_run.wait_for_orphans(run)
        if self.stop.requested:
            return Verdict(STOPPED, "asked to stop before it began")
        folder, nonce = run.folder / "ray", secrets.token_hex(8)
        folder.mkdir(exist_ok=True)
        own = {"run": str(run.folder), "nonce": nonce, "storage": str(folder)}
        order = {**self.order, **own, "environment": environment_elsewhere()}
        error = self._fit(order, folder / f"stop-{nonce}")
        self.order["plan"] = ""
        run.forget_plan()
        verdict = judge(run.read_exit(nonce), error, self.stop.requested)
        if verdict is None or verdict.code == BUG:
            logs = sorted(folder.glob("worker-*.log"))
            atomic_files.write_text(run.folder / "launcher.log", placement.ends_of_logs(logs))
        return verdict

    def _fit(self, order: dict[str, Any], stop: Path) -> str:
        """Run one fit, and pass a request to stop on by this file; what went wrong with it.

        In a thread: in the main one, Ray would end the workers at the first Ctrl-C.
        """
        error: list[str] = []

        def fit() -> None:
            try:
                self.trainer(order).fit()
            except Exception as caught:
                error.append(_first_failure(caught))

        attempt = threading.Thread(target=fit, daemon=True)
        attempt.start()
        while attempt.is_alive():
            if self.stop.requested:
                stop.touch()
            attempt.join(WATCH_SECONDS)
            self.log.print_new()
        stop.unlink(missing_ok=True)
        return "".join(error)

    def trainer(self, order: dict[str, Any]) -> Any:
        """A TorchTrainer of one attempt. isobatch makes another one from the last checkpoint, not Ray."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        from isobatch.launch.clusters.ray.workers import HostGroup, work

        gpus = self.options.gpus_per_worker
        resources = {"CPU": self.options.cpus_per_worker or 1, **({"GPU": gpus} if gpus else {})}
        return TorchTrainer(
            work,
            train_loop_config=order,
            torch_config=HostGroup(),
            scaling_config=ScalingConfig(
                num_workers=self.options.ray_workers, use_gpu=bool(gpus), resources_per_worker=resources
            ),
            run_config=RunConfig(storage_path=order["storage"], failure_config=FailureConfig(max_failures=0)),
        )


def judge(verdict: Verdict | None, error: str, is_asked_to_stop: bool) -> Verdict | None:
    """What an attempt's end means. `error`: of its fit."""
    if verdict is not None and verdict.code != STOPPED:
        return verdict
    if is_asked_to_stop:
        return verdict or Verdict(STOPPED, "ended before it could save")
    if verdict is not None:
        error = error or "a signal stopped the workers, and not the run"
    return Verdict(FAILED, f"a Ray worker was lost: {error}", WorkerLostError.cause) if error else None


def _first_failure(error: Exception) -> str:
    """A line on what ended a fit: of the first worker that failed, where Ray says which."""
    failures = getattr(error, "worker_failures", None) or {}
    said = [f"worker {rank}: {failure}" for rank, failure in sorted(failures.items())]
    return " ".join((said[0] if said else str(error)).split()).partition(" Worker info:")[0][:300]


def train_until_done(request: Request, options: RayOptions, processes: int) -> int:
    """Train the run of a request in attempts until it is done; its exit code. `processes`: of each worker."""
    _connect(options.address)
    run = placement.find_or_create(request)
    refuse_if_in_a_job(run)
    if run.status() == "done":
        print_lines(f"{run.folder} is done (--again for a new run)", quiet=request.run.quiet)
        return DONE
    ray = Ray()
    ray.options, ray.stop = options, StopFlag()
    ray.log = LogReader(run.folder / "log.txt", None if request.run.quiet else sys.stderr)
    ray.log.print_new(0)
    plan = atomic_files.json_text({**options_to_dict(request.plan), "processes": None})
    own = {"processes": processes, "cpus": options.cpus_per_worker or 0, "folder": str(Path.cwd())}
    ray.order = {**own, "plan": plan}
    with ray.stop, run.lock("launch"):
        run.refuse_if_training()
        run.write_options(request.run)
        verdict = launch_run.train_with_restarts(run, ray)
    ray.log.print_new()
    if verdict.code == DONE:
        print_outcome(run)
    elif verdict.code == WRONG_INPUT and verdict.reason not in ray.log.last:
        print_lines(f"isobatch: {verdict.reason}")
    return verdict.code


def _connect(address: str) -> None:
    """Join the cluster. Raises UserError where there is none."""
    os.environ.update({name: os.environ.get(name, "0") for name in OFF})
    import ray

    host, colon, port = address.rpartition(":")
    if colon and not local_address(host.strip("[]"), int(port)):
        raise UserError(f"--address {address}: nothing answers there; `ray status` shows a node's cluster")
    if not ray.is_initialized():
        try:
            # The run's own lines stand in its log.
            dashboard = False if address == "local" else None
            ray.init(address=address, include_dashboard=dashboard, log_to_driver=False)
        except ConnectionError:
            said = f"--address {address}: this machine is in no Ray cluster: `ray start --head` makes one"
            raise UserError(f"{said}, and --address local needs none") from None
