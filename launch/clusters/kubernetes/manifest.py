"""The manifest of a run: an Indexed Job of a pod per node, the name by which pods find the first, its recipe.

Only kinds of every cluster, without operators: ConfigMap, headless Service, Job (batch/v1, Kubernetes 1.29 or
newer). A pod that fails or is evicted is replaced, its world ends and comes together again with the new pod,
and the run goes on from its last checkpoint on the shared volume.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from isobatch.core.errors import FAILED, STOPPED, WRONG_INPUT, UserError
from isobatch.engine.runs.run_folder import run_name
from isobatch.engine.task_files import imported_files, is_task_file, task_file
from isobatch.launch.clusters.kubernetes.options import KubernetesOptions
from isobatch.launch.local.arguments import request_text

if TYPE_CHECKING:
    from isobatch.launch.local.arguments import Request

VOLUME = "/isobatch"
"""Where pods see the claim: runs, prepared data and downloads lie in it."""
FILES = "/isobatch-job"
"""Where pods see the recipe, and the user's task."""
RECIPE = "recipe.yaml"
CONTAINER = "train"
PORT = 29500
STOP_SECONDS = 120
"""That a pod has, from its eviction on, to save."""
MOST_NAME = 52
"""Characters of a name, so that those of its pods are names of hosts, too (63)."""


@dataclass(frozen=True, slots=True)
class Pods:
    """What all pods of a run are."""

    name: str
    options: KubernetesOptions
    processes: int
    """Of each pod."""
    max_restarts: int
    """How often they are started anew."""
    files: list[str]
    """What pods find in FILES, by their places there."""

    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "isobatch", "isobatch/run": self.name}

    def metadata(self) -> dict[str, Any]:
        namespace = {"namespace": self.options.namespace} if self.options.namespace else {}
        return {"name": self.name, **namespace, "labels": self.labels()}


def render(request: Request, options: KubernetesOptions) -> str:
    """The manifest as YAML. Raises UserError where the name is none that Kubernetes takes."""
    files = _files(request)
    pods = Pods(_name(request), options, _processes(request, options), request.run.max_restarts, list(files))
    documents = [_config_map(pods, files), _service(pods), _job(pods)]
    return "---\n".join(yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=1000) for one in documents)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _name(request: Request) -> str:
    name = request.run.name or re.sub("[^a-z0-9]+", "-", run_name(request.recipe).lower())
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > MOST_NAME:
        raise UserError(
            f"--name {name}: Kubernetes takes small letters, digits and dashes, a letter first, at most"
            f" {MOST_NAME}"
        )
    return name


def _processes(request: Request, options: KubernetesOptions) -> int:
    """Of each pod: one for each GPU."""
    asked, nodes = request.plan.processes, options.nodes
    if asked and asked % nodes:
        raise UserError(f"--processes {asked}: must be a multiple of --nodes {nodes}")
    return asked // nodes if asked else max(1, options.gpus_per_node)


def _files(request: Request) -> dict[str, str]:
    """The recipe as a file for --config; of a user's own task its code as well. Place in FILES -> content."""
    task, files = request.recipe.task, {}
    if is_task_file(task):
        file = task_file(task).resolve()
        files = {
            str(path.relative_to(file.parent)): path.read_text(encoding="utf-8")
            for path in imported_files(file)
        }
        there = dataclasses.replace(request.recipe, task=f"{FILES}/{file.name}:{task.rpartition(':')[2]}")
        request = dataclasses.replace(request, recipe=there)
    plan = dataclasses.replace(request.plan, processes=None)  # as many as there are
    lines = request_text(dataclasses.replace(request, plan=plan)).splitlines()
    given = [line.rstrip() for line in lines if line and not line.startswith("#")]
    return {RECIPE: "\n".join([*given, ""]), **files}


def _config_map(pods: Pods, files: dict[str, str]) -> dict[str, Any]:
    data = {_key(place): text for place, text in files.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": pods.metadata(), "data": data}


def _key(place: str) -> str:
    """Of a file in a ConfigMap, which has no folders."""
    return place.replace("/", "..")


def _service(pods: Pods) -> dict[str, Any]:
    """By which a pod has a name, before it is ready too: the first one waits for the others."""
    spec = {
        "clusterIP": "None",
        "selector": pods.labels(),
        "publishNotReadyAddresses": True,
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": pods.metadata(), "spec": spec}


def _job(pods: Pods) -> dict[str, Any]:
    options = pods.options
    spec = {
        "completionMode": "Indexed",
        "completions": options.nodes,
        "parallelism": options.nodes,
        # The pods of a world end together: each new start takes as many of them.
        "backoffLimit": pods.max_restarts * options.nodes,
        "podFailurePolicy": {"rules": _rules()},
        "template": {"metadata": {"labels": pods.labels()}, "spec": _pod(pods)},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": pods.metadata(), "spec": spec}


def _rules() -> list[dict[str, Any]]:
    """What another start would not mend ends the Job; who was asked to go does not count as failed."""
    evicted = {"type": "DisruptionTarget", "status": "True"}
    return [
        {"action": "FailJob", "onExitCodes": _codes(WRONG_INPUT, FAILED)},
        {"action": "Ignore", "onExitCodes": _codes(STOPPED)},
        {"action": "Ignore", "onPodConditions": [evicted]},
    ]


def _codes(*codes: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def _pod(pods: Pods) -> dict[str, Any]:
    options, items = pods.options, [{"key": _key(place), "path": place} for place in pods.files]
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}},
        {"name": "job", "configMap": {"name": pods.name, "items": items}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # loader processes share memory
    ]
    return {
        "subdomain": pods.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_SECONDS,
        **({"nodeSelector": dict([options.node_label])} if options.node_label else {}),
        "containers": [_container(pods)],
        "volumes": volumes,
    }


def _container(pods: Pods) -> dict[str, Any]:
    options = pods.options
    found = {"cpu": options.cpus, "memory": options.mem, "nvidia.com/gpu": options.gpus_per_node or None}
    limits = {name: str(value) for name, value in found.items() if value is not None}
    variables = {
        "ISOBATCH_CACHE": f"{VOLUME}/cache",
        "HF_HOME": f"{VOLUME}/hub",
        "PET_SHUTDOWN_TIMEOUT": str(STOP_SECONDS - 20),
    }
    mounts = {"shared": VOLUME, "job": FILES, "memory": "/dev/shm"}
    return {
        "name": CONTAINER,
        "image": options.image,
        "command": start_command(pods),
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        **({"envFrom": [{"secretRef": {"name": options.secret}}]} if options.secret else {}),
        "resources": {"limits": limits, "requests": limits} if limits else {},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
        "ports": [{"containerPort": PORT}],
    }


def start_command(pods: Pods) -> list[str]:
    """What a pod runs."""
    options = pods.options
    words: dict[str, Any] = {
        "config": f"{FILES}/{RECIPE}",
        "out": f"{VOLUME}/runs",
        "name": pods.name,
        "nodes": options.nodes,
        "processes": pods.processes,
        "master": f"{pods.name}-0.{pods.name}",
        "port": PORT,
    }
    return ["python3", "-m", "isobatch", "pod", *(f"--{name}={value}" for name, value in words.items())]
