"""`ray`: print the script of a run on a Ray cluster, or run it.

The script is of Ray Train's TorchTrainer, whose workers run ours, in a loop of attempts (driver.py).
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import check_fields
from isobatch.core.number_ranges import Count, Positive
from isobatch.engine.runs.run_folder import run_name
from isobatch.launch.local.placement import flags_text, on_device, parse, processes_each

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
                " the printed script in: ray job submit --address URL --working-dir . -- python SCRIPT"
            )


TEMPLATE = '''"""isobatch: trains {task} as {name} on a Ray cluster until it is done.

    python {name}.py                                                       on a node of the cluster
    ray job submit --address http://HEAD:8265 --working-dir . -- python {name}.py

Every node has isobatch[ray] and sees {folder}, where the run and its data lie.
"""

import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from isobatch.launch.clusters.ray.driver import train_until_done
from isobatch.launch.clusters.ray.workers import HostGroup, work

FLAGS = """\\
{flags}"""


def trainer(order):
    """One attempt. isobatch makes another one from the last checkpoint, not Ray."""
    return TorchTrainer(
        work,
        train_loop_config=order,
        torch_config=HostGroup(),
        scaling_config=ScalingConfig(
            num_workers={workers}, use_gpu={use_gpu}, resources_per_worker={resources}
        ),
        run_config=RunConfig(storage_path=order["storage"], failure_config=FailureConfig(max_failures=0)),
    )


if __name__ == "__main__":
    sys.exit(
        train_until_done(
            trainer,
            FLAGS,
            folder={folder!r},
            address={address!r},
            processes={processes},  # of each worker
            cpus={cpus},  # of each worker, that training keeps to; 0 for all of the node
        )
    )
'''


def ray(words: Sequence[str]) -> int:
    """Print the script of the request in these words, or run it."""
    request, options = parse(words, "ray", RayOptions)
    request = on_device(request, "ray", "--gpus-per-worker", options.gpus_per_worker, options.cpu)
    script = render(request, options)
    if not options.submit:
        print(script, end="")
        return DONE
    if importlib.util.find_spec("ray") is None:
        raise UserError("--submit needs: pip install 'isobatch[ray]', or 'ray[train]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray sends statistics of its use
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "isobatch_on_ray.py"
        path.write_text(script, encoding="utf-8")
        return _run(path)


def render(request: Request, options: RayOptions) -> str:
    """The script. Raises UserError where the flags contradict each other."""
    gpus, flags = options.gpus_per_worker, flags_text(request)
    if '"""' in flags or "\\" in flags:
        raise UserError('ray: a flag has """ or \\ in its value, which a script cannot hold: use another one')
    return TEMPLATE.format(
        task=request.recipe.task,
        name=request.run.name or run_name(request.recipe),
        folder=str(Path.cwd()),
        resources={"CPU": options.cpus_per_worker or 1, **({"GPU": gpus} if gpus else {})},
        flags=flags,
        use_gpu=bool(gpus),
        address=options.address,
        workers=options.ray_workers,
        processes=processes_each(request, "--ray-workers", options.ray_workers, gpus),
        cpus=options.cpus_per_worker or 0,
    )


def _run(script: Path) -> int:
    """Run a script in this process; its exit code."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return DONE
