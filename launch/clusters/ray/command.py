"""`ray`: train on a Ray cluster, or print the request as the file that does."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import check_fields, flags_of
from isobatch.core.number_ranges import Count, Positive
from isobatch.engine.runs.run_folder import run_name
from isobatch.launch.local.arguments import request_text
from isobatch.launch.local.placement import on_device, parse, processes_each
from isobatch.launch.local.words import config_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.launch.local.arguments import Request

HERE = r"auto|local|(\[[0-9a-f:]+\]|[\w.-]+):\d+"
"""Addresses of a cluster of which this machine is a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions:
    """Flags of `ray` beside the recipe's, the plan's and the run's."""

    data_is_elsewhere: ClassVar[bool] = True
    """The nodes of the cluster have the data."""

    ray_workers: Positive = 1
    """Ray workers, each with its own resources."""
    gpus_per_worker: Count = 0
    """GPUs of each worker, each with a process of its own."""
    cpus_per_worker: Positive | None = None
    """Cores of each worker; by default Ray counts one, and training takes what the node has."""
    cpu: bool = False
    """Train on CPUs."""
    address: str = "auto"
    """The cluster: auto (the one that this machine is in), local (this machine alone) or HOST:PORT of its
    head."""
    submit: bool = False
    """Train on the cluster."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not re.fullmatch(HERE, self.address):
            raise UserError(
                f"--address {self.address}: give auto, local or HOST:PORT of a cluster's head; elsewhere hand"
                " it in: ray job submit --address URL -- sh -c 'cd FOLDER && isobatch ray ... --submit'"
            )


def ray(words: Sequence[str]) -> int:
    """Print the request in these words as a file, or train it on the cluster."""
    request, options = parse(words, "ray", RayOptions)
    request = on_device(request, "ray", "--gpus-per-worker", options.gpus_per_worker, options.cpu)
    processes = processes_each(request, "--ray-workers", options.ray_workers, options.gpus_per_worker)
    if not options.submit:
        print(as_file(request, options), end="")
        return DONE
    if importlib.util.find_spec("ray") is None:
        raise UserError("--submit needs: pip install 'isobatch[ray]', or 'ray[train]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray sends statistics of its use
    from isobatch.launch.clusters.ray.driver import train_until_done

    return train_until_done(request, options, processes)


def as_file(request: Request, options: RayOptions) -> str:
    """A file for --config: the recipe, the plan's and the run's options, and those of `ray`."""
    name = f"{request.run.name or run_name(request.recipe)}.yaml"
    own = f"isobatch ray --config {shlex.quote(name)} --submit"
    there = shlex.quote(f"cd {shlex.quote(str(Path.cwd()))} && {own}")
    flags = {n: f for n, f in flags_of(RayOptions, "ray").items() if getattr(options, n) != f.default}
    words = [
        f"# {name}: isobatch trains this on a Ray cluster until it is done. Every node has isobatch[ray]",
        f"# and sees this folder, in which the run and its data lie.\n#   {own}",
        f"#   ray job submit --address http://HEAD:8265 -- sh -c {there}\n",
        request_text(request),
        config_text([("ray", flags, {name: getattr(options, name) for name in flags})] if flags else []),
    ]
    return "\n".join(words)
