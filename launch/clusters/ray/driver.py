"""The driver of a run on Ray: it makes attempts, each one fit of a TorchTrainer, as `auto` makes them here.

Ray restarts nothing by itself. What ended an attempt stands in exit.json, and `launch_run.py` decides whether
another one goes on from the last checkpoint.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, WRONG_INPUT, UserError
from isobatch.core.flags import options_to_dict
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.runs.slurm_queue import refuse_if_in_a_job
from isobatch.launch.cli import guarded
from isobatch.launch.clusters.common import find_or_create
from isobatch.launch.clusters.ray.attempts import Attempts, RunLog
from isobatch.launch.commands.auto import print_outcome
from isobatch.launch.local import launch_run
from isobatch.launch.local.arguments import Request, parse_request
from isobatch.launch.local.interfaces import local_address
from isobatch.launch.local.run_setup import print_unless_quiet

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.launch.clusters.ray.attempts import Trainer

OWN_RESTARTS = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_TRAIN_METRICS_ENABLED": "0"}
"""Ray would start the workers of a node that is about to go anew within an attempt, without another plan."""


def train_until_done(
    trainer: Callable[[dict[str, Any]], Trainer],
    flags: str,
    *,
    folder: str,
    address: str,
    processes: int,
    cpus: int = 0,
) -> int:
    """Train the run of `flags` in attempts until it is done; its exit code.

    `trainer(order)`: one attempt. `folder`: where relative paths begin, on all nodes. `processes`: of each
    worker. `cpus`: cores that training keeps to; 0 for all of the node.
    """

    def train() -> int:
        os.chdir(folder)
        request = _request(flags)
        _connect(address)
        run = find_or_create(request)
        refuse_if_in_a_job(run)
        if run.status() == "done":
            print_unless_quiet(f"{run.folder} is done (--again for a new run)", request.run.quiet)
            return DONE
        with StopFlag() as stop, run.lock("launch"):
            run.refuse_if_training()
            run.write_options(request.run)
            order = {"processes": processes, "cpus": cpus, "folder": folder}
            plan = atomic_files.json_text({**options_to_dict(request.plan), "processes": None})
            log = RunLog(run.folder / "log.txt", request.run.quiet)
            attempts = Attempts(trainer, order, plan, stop, log)
            verdict = launch_run.train_with_restarts(run, attempts)
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
