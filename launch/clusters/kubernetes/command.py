"""`k8s`: print the manifest of a run on a Kubernetes cluster, or give it to kubectl.

It is an Indexed Job of a pod per node, the name by which pods find the first, and the recipe.
Only kinds of every cluster, without operators: ConfigMap, headless Service, Job (batch/v1, Kubernetes 1.29 or
newer). A pod that fails or is evicted is replaced, its world ends and comes together again with the new pod,
and the run goes on from its last checkpoint on the shared volume.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from isobatch.core.errors import DONE, FAILED, STOPPED, WRONG_INPUT, UserError
from isobatch.core.flags import check_fields
from isobatch.core.number_ranges import Count, Positive
from isobatch.engine.runs.run_folder import run_name
from isobatch.engine.task_files import imported_files, is_task_file, task_file
from isobatch.launch.local.arguments import request_text
from isobatch.launch.local.placement import on_device, parse, processes_each

if TYPE_CHECKING:
    from collections.abc import Sequence

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
NODE_LABEL = r"([\w./-]+)=([\w.-]{1,63})"
FORMS = {
    "image": (".+", "the image that pods run, with isobatch in it"),
    "claim": (".+", "the volume for runs and data that all pods share"),
    "secret": (r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", "a Secret's name, which alone belongs into a manifest"),
    "namespace": (r"(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?", "at most 63 small letters, digits and -"),
    "mem": (r"\d+(\.\d+)?([KMGT]i?)?", "an amount such as 64Gi"),
    "node_selector": (NODE_LABEL, "a label such as gpu=h100"),
}
"""Flag -> the pattern of its values, and what they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions:
    """Flags of `k8s` beside the recipe's, the plan's and the run's."""

    data_is_elsewhere: ClassVar[bool] = True
    """--data is a path within the claim, or a name on the hub."""

    image: str | None = None
    """The image of the pods: with Python, isobatch and what it requires."""
    claim: str | None = None
    """A PersistentVolumeClaim that all nodes may write (ReadWriteMany): runs, prepared data and downloads."""
    nodes: Positive = 1
    """Pods, each on a node of its own as far as its GPUs fill one."""
    gpus_per_node: Count = 0
    """GPUs of each pod."""
    cpu: bool = False
    """Train on CPUs."""
    cpus: Positive | None = None
    """Cores of each pod."""
    mem: str | None = None
    """Memory of each pod, as Kubernetes writes it: 64Gi."""
    node_selector: str | None = None
    """A label that nodes must have: gpu=h100."""
    secret: str | None = None
    """A Secret whose entries pods get as environment variables, such as HF_TOKEN."""
    namespace: str | None = None
    """By default kubectl's own."""
    submit: bool = False
    """Give the manifest to kubectl."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, (form, meaning) in FORMS.items():
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is None and name in ("image", "claim"):
                raise UserError(f"k8s: needs {flag}, {meaning}")
            if value is not None and not re.fullmatch(form, value):
                shown = f"{value.partition('=')[0]}..." if name == "secret" else value
                raise UserError(f"{flag} {shown}: is not {meaning}")


def k8s(words: Sequence[str]) -> int:
    """Print the manifest of the request in these words, or give it to kubectl."""
    request, options = parse(words, "k8s", KubernetesOptions)
    request = on_device(request, "k8s", "--gpus-per-node", options.gpus_per_node, options.cpu)
    text = render(request, options)
    if options.submit:
        text = _apply(text)
    print(text, end="")
    return DONE


def _apply(text: str) -> str:
    """Give a manifest to kubectl; what it says. Raises UserError where there is none, or it refuses."""
    if shutil.which("kubectl") is None:
        raise UserError("--submit: there is no kubectl here: without --submit the manifest is printed")
    command = ["kubectl", "apply", "-f", "-"]
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"kubectl: {(done.stderr.strip() or 'refused the manifest').splitlines()[-1]}")
    return done.stdout


def render(request: Request, options: KubernetesOptions) -> str:
    """The manifest as YAML. Raises UserError where the name is none that Kubernetes takes."""
    name = request.run.name or re.sub("[^a-z0-9]+", "-", run_name(request.recipe).lower())
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > MOST_NAME:
        raise UserError(
            f"--name {name}: Kubernetes takes small letters, digits and dashes, a letter first, at most"
            f" {MOST_NAME}"
        )
    files = _files(request)
    namespace = {"namespace": options.namespace} if options.namespace else {}
    labels = {"app.kubernetes.io/name": "isobatch", "isobatch/run": name}
    metadata = {"name": name, **namespace, "labels": labels}
    # By it a pod has a name, before it is ready too: the first one waits for the others.
    service = {
        **{"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        | {"data": {_key(place): text for place, text in files.items()}},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
        | {"spec": _job(request, options, name, labels, list(files))},
    ]
    return "---\n".join(yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=1000) for one in documents)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


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
    return {RECIPE: _flags_text(request), **files}


def _flags_text(request: Request) -> str:
    """The recipe, the plan's and the run's options as a file for --config; as many processes as there are."""
    plan = dataclasses.replace(request.plan, processes=None)
    lines = request_text(dataclasses.replace(request, plan=plan)).splitlines()
    return "\n".join([*(line.rstrip() for line in lines if line and not line.startswith("#")), ""])


def _key(place: str) -> str:
    """Of a file in a ConfigMap, which has no folders."""
    return place.replace("/", "..")


def _job(
    request: Request, options: KubernetesOptions, name: str, labels: dict[str, str], files: list[str]
) -> dict[str, Any]:
    items = [{"key": _key(place), "path": place} for place in files]
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}},
        {"name": "job", "configMap": {"name": name, "items": items}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # loader processes share memory
    ]
    selector = re.fullmatch(NODE_LABEL, options.node_selector or "")
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_SECONDS,
        **({"nodeSelector": {selector[1]: selector[2]}} if selector else {}),
        "containers": [_container(request, options, name)],
        "volumes": volumes,
    }
    exits = {"containerName": CONTAINER, "operator": "In"}
    evicted = {"type": "DisruptionTarget", "status": "True"}
    # What another start would not mend ends the Job; who was asked to go does not count as failed.
    rules: list[dict[str, Any]] = [
        {"action": "FailJob", "onExitCodes": {**exits, "values": [WRONG_INPUT, FAILED]}},
        {"action": "Ignore", "onExitCodes": {**exits, "values": [STOPPED]}},
        {"action": "Ignore", "onPodConditions": [evicted]},
    ]
    return {
        "completionMode": "Indexed",
        "completions": options.nodes,
        "parallelism": options.nodes,
        # The pods of a world end together: each new start takes as many of them.
        "backoffLimit": request.run.max_restarts * options.nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }


def _container(request: Request, options: KubernetesOptions, name: str) -> dict[str, Any]:
    found = {"cpu": options.cpus, "memory": options.mem, "nvidia.com/gpu": options.gpus_per_node or None}
    limits = {resource: str(value) for resource, value in found.items() if value is not None}
    variables = {
        "ISOBATCH_CACHE": f"{VOLUME}/cache",
        "HF_HOME": f"{VOLUME}/hub",
        "PET_SHUTDOWN_TIMEOUT": str(STOP_SECONDS - 20),
    }
    processes = processes_each(request, "--nodes", options.nodes, options.gpus_per_node)
    world = [f"--nnodes={options.nodes}", f"--nproc-per-node={processes}"]
    world += [f"--master-addr={name}-0.{name}", f"--master-port={PORT}"]
    words = ["pod", f"{VOLUME}/runs/{name}", f"{FILES}/{RECIPE}", *world]
    mounts = {"shared": VOLUME, "job": FILES, "memory": "/dev/shm"}
    return {
        "name": CONTAINER,
        "image": options.image,
        "command": ["python3", "-m", "isobatch", *words],
        "env": [{"name": variable, "value": value} for variable, value in variables.items()],
        **({"envFrom": [{"secretRef": {"name": options.secret}}]} if options.secret else {}),
        "resources": {"limits": limits, "requests": limits} if limits else {},
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
        "ports": [{"containerPort": PORT}],
    }
