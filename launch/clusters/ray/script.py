"""The script of a run: Ray Train's TorchTrainer, whose workers run ours, in a loop of attempts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.engine.runs.run_folder import run_name
from isobatch.launch.clusters.ray.options import RayOptions, processes_per_worker
from isobatch.launch.local.arguments import request_text

if TYPE_CHECKING:
    from isobatch.launch.local.arguments import Request

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

RESOURCES = {resources}  # of a worker
FLAGS = """\\
{flags}"""


def trainer(workers, order):
    """One attempt with so many workers. isobatch makes another one from the last checkpoint, not Ray."""
    return TorchTrainer(
        work,
        train_loop_config=order,
        torch_config=HostGroup(),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu={use_gpu}, resources_per_worker=RESOURCES),
        run_config=RunConfig(
            storage_path=order["storage"],
            failure_config=FailureConfig(max_failures=0, controller_failure_limit={controller_failures}),
        ),
    )


if __name__ == "__main__":
    sys.exit(
        train_until_done(
            trainer,
            FLAGS,
            folder={folder!r},
            address={address!r},
            workers=({least}, {most}),  # at least, at most
            processes={processes},  # of each worker
            resources=RESOURCES,
            limit_cpus={limit_cpus},
        )
    )
'''


def render(request: Request, options: RayOptions) -> str:
    """The script. Raises UserError where the flags contradict each other."""
    processes, folder = processes_per_worker(request, options), Path.cwd()
    flags = _flags(request)
    if '"""' in flags or "\\" in flags:
        raise UserError('ray: a flag has """ or \\ in its value, which a script cannot hold: use another one')
    return TEMPLATE.format(
        task=request.recipe.task,
        name=script_name(request),
        folder=str(folder),
        resources=options.resources,
        flags=flags,
        use_gpu=bool(options.gpus_per_worker),
        address="auto" if options.hands_in_a_job else options.address,
        least=options.least,
        most=options.ray_workers,
        processes=processes,
        # Ray waits for room for ever; where fewer workers will do, they are counted anew.
        controller_failures=0 if options.least < options.ray_workers else -1,
        limit_cpus=options.cpus_per_worker is not None,
    )


def script_name(request: Request) -> str:
    """The run's name."""
    return request.run.name or run_name(request.recipe)


def _flags(request: Request) -> str:
    """The recipe, the plan's and the run's options as a file for --config."""
    plan = dataclasses.replace(request.plan, processes=None)  # as many as there are
    lines = request_text(dataclasses.replace(request, plan=plan)).splitlines()
    return "\n".join([*(line.rstrip() for line in lines if line and not line.startswith("#")), ""])
