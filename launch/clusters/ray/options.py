"""The flags of `ray` beside those of `auto`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from isobatch.core.errors import UserError
from isobatch.core.flags import check_fields
from isobatch.core.number_ranges import Count, Positive

if TYPE_CHECKING:
    from isobatch.launch.local.arguments import Request

HERE = r"auto|local|(\[[0-9a-f:]+\]|[\w.-]+):\d+"
"""Addresses of which this machine is a node."""
ELSEWHERE = r"(https?|ray)://.+"
"""Addresses at which Ray takes jobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions:
    """Flags of `ray` beside the recipe's, the plan's and the run's."""

    data_is_elsewhere: ClassVar[bool] = True
    """The nodes of the cluster have the data."""

    ray_workers: Positive = 1
    """Ray workers, each with its own resources."""
    min_ray_workers: Positive | None = None
    """Go on with so few where there is no room for all, and take more as they come; by default all."""
    gpus_per_worker: Count = 0
    """GPUs of each worker, each with a process of its own."""
    cpus_per_worker: Positive | None = None
    """Cores of each worker; by default Ray counts one, and training takes what the node has."""
    cpu: bool = False
    """Train on CPUs."""
    address: str = "auto"
    """The cluster: auto (the one that this machine is in), local (this machine alone) or HOST:PORT of its
    head, to train from here; http://HOST:8265 or ray://HOST:10001 to hand in a job."""
    submit: bool = False
    """Train on the cluster; a job is handed in, and its number printed."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.cpu and not self.gpus_per_worker:
            raise UserError("ray: needs --gpus-per-worker, or --cpu for nodes without GPUs")
        if self.cpu and self.gpus_per_worker:
            raise UserError("--cpu: and GPUs were asked for, too; leave one of them out")
        if self.least > self.ray_workers:
            raise UserError(
                f"--min-ray-workers {self.min_ray_workers}: is more than --ray-workers {self.ray_workers}"
            )
        if not re.fullmatch(f"{HERE}|{ELSEWHERE}", self.address):
            raise UserError(
                f"--address {self.address}: give auto, local, HOST:PORT of a cluster's head, or http://HOST:8265"
            )

    @property
    def least(self) -> int:
        """The fewest workers to go on with."""
        return self.min_ray_workers or self.ray_workers

    @property
    def hands_in_a_job(self) -> bool:
        return re.fullmatch(ELSEWHERE, self.address) is not None

    @property
    def resources(self) -> dict[str, int]:
        """Of a worker, in Ray's words."""
        gpus = {"GPU": self.gpus_per_worker} if self.gpus_per_worker else {}
        return {"CPU": self.cpus_per_worker or 1, **gpus}


def processes_per_worker(request: Request, options: RayOptions) -> int:
    """--processes / --ray-workers, else one for each GPU, or one where there is none. Raises UserError."""
    asked, workers = request.plan.processes, options.ray_workers
    if asked and asked % workers:
        raise UserError(f"--processes {asked}: must be a multiple of --ray-workers {workers}")
    if asked and options.gpus_per_worker and asked > workers * options.gpus_per_worker:
        raise UserError(f"--processes {asked}: every process needs a GPU of its own; leave the flag out")
    return asked // workers if asked else max(1, options.gpus_per_worker)
