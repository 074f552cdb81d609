"""Kubernetes as a cluster: the manifest of a run, which `k8s` prints or gives to kubectl, and `pod`, which a
pod runs: torchrun for its processes, and then the exit code that the Job acts on.

The manifest is an Indexed Job of a pod per node, the name by which pods find the first, and the recipe.
Only kinds of every cluster, without operators: ConfigMap, headless Service, Job (batch/v1, Kubernetes 1.29 or
newer). A pod that fails or is evicted is replaced, its world ends and comes together again with the new pod,
and the run goes on from its last checkpoint on the shared volume. torchrun itself ends with 0 where all
processes were asked to save and stop: the Job would take the run for done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isobatch.core.errors import BUG, DONE, FAILED, STOPPED, WRONG_INPUT, OutOfMemoryError, UserError
from isobatch.core.flags import spelling
from isobatch.core.number_ranges import Count, Positive
from isobatch.core.terminal import compiled, print_lines
from isobatch.engine import consent
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.machine.gpu_table import named_model
from isobatch.engine.runs.run_folder import RunFolder, Verdict, run_name
from isobatch.engine.task_files import imported_files, is_task_file, task_file
from isobatch.launch.clusters.local.here import Local
from isobatch.launch.commands.plan import comments_on
from isobatch.launch.local import placement
from isobatch.launch.local.arguments import Request, parse_request, request_text, split_words

TEMPLATE = Path(__file__).with_name("manifest.yaml.jinja")
VOLUME = "/isobatch"
"""Where pods see the claim: runs, prepared data and downloads lie in it."""
FILES = "/isobatch-job"
"""Where pods see the recipe, and the user's task."""
RECIPE = "recipe.yaml"
PORT = 29500
STOP_SECONDS = 120
"""That a pod has, from its eviction on, to save."""
NAME = r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?"
MOST_NAME = 52
"""Characters of a name, so that those of its pods are names of hosts, too (63)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions(placement.ElsewhereOptions):
    """Flags of `k8s`; --data is a path within the claim, or a name on the hub."""

    image: str | None = None
    """The image of the pods: with Python, isobatch and what it requires."""
    claim: str | None = None
    """A PersistentVolumeClaim that all nodes may write (ReadWriteMany): runs, prepared data and downloads."""
    nodes: Positive = 1
    """Pods, each on a node of its own as far as its GPUs fill one."""
    gpus_per_node: Count = 0
    """GPUs of each pod."""
    cpus: Positive | None = None
    """Cores of each pod; by default 8 for each GPU, 4 without one."""
    mem: str | None = None
    """Memory of each pod, as Kubernetes writes it: 64Gi. By default 32Gi for each GPU, 16Gi without one."""
    user: Positive = 1000
    """Number of the user, and of the group, as which pods train; never root."""
    node_selector: str | None = None
    """Labels that nodes must have: gpu=h100, or gpu=h100,zone=b."""
    secret: str | None = None
    """A Secret whose entries pods get as environment variables, such as HF_TOKEN."""

    def __post_init__(self) -> None:
        if not (self.image and self.claim):
            raise UserError("k8s: needs --image, with isobatch in it, and --claim, the volume of all pods")
        word = r"\w[-\w./:@]*"
        labels = f"{word}=({word})?(,{word}=({word})?)*"
        for flag, pattern in {"image": word, "claim": NAME, "node_selector": labels}.items():
            if (name := getattr(self, flag)) and not re.fullmatch(pattern, name, re.ASCII):
                how = (
                    "small letters, digits and dashes"
                    if flag == "claim"
                    else "no spaces, a label as gpu=h100"
                )
                raise UserError(f"{spelling(flag)} {name}: is no such name in Kubernetes: give {how}")
        if self.secret and not re.fullmatch(NAME, self.secret):  # not repeated
            raise UserError("--secret: give a Secret's name, which alone belongs into a manifest")


def _apply(text: str) -> str:
    """Give a manifest to kubectl; what it says. Raises UserError where there is none, or it refuses."""
    if shutil.which("kubectl") is None:
        raise UserError("--submit: there is no kubectl here: without --submit the manifest is printed")
    command = ["kubectl", "apply", "-f", "-"]
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"kubectl: {(done.stderr.strip() or 'refused the manifest').splitlines()[-1]}")
    return done.stdout


def render(request: Request, options: KubernetesOptions, unseen: Sequence[str]) -> str:
    """The manifest as YAML. Raises UserError where the name is none that Kubernetes takes.

    `unseen`: lines on what pods do not see, which stand in it.
    """
    name = request.run.name or re.sub("[^a-z0-9]+", "-", run_name(request.recipe).lower())
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > MOST_NAME:
        form = f"{MOST_NAME} small letters, digits and dashes at most"
        raise UserError(f"--name {name}: give {form}: a letter first, a letter or a digit last")
    processes = placement.processes_each(request, "--nodes", options.nodes, options.gpus_per_node)
    memory = options.mem or f"{32 * options.gpus_per_node or 16}Gi"
    # Kubernetes reads 64m as a thousandth of 64 bytes.
    gib = placement.memory_bytes(memory, "" if memory.endswith("m") else f"{memory}B", "64Gi") / 2**30
    cpus, gpus = options.cpus or 8 * options.gpus_per_node or 4, options.gpus_per_node
    labels = dict(one.split("=", 1) for one in (options.node_selector or "").split(",") if one)
    card = options.hardware or next(filter(None, map(named_model, labels.values())), "h100")
    machine = f"{options.nodes}x{gpus}x{card}" if gpus else f"cpu:{cpus}x{gib:.0f}gb"
    world = [f"--nnodes={options.nodes}", f"--nproc-per-node={processes}"]
    world += [f"--master-addr={name}-0.{name}", f"--master-port={PORT}"]
    page = compiled(TEMPLATE, finalize=_yaml, keep_trailing_newline=True)
    return comments_on(request, machine, unseen, VOLUME) + page.render(
        metadata={"name": name, "labels": {"app.kubernetes.io/name": "isobatch", "isobatch/run": name}},
        options=options,
        labels=labels,
        command=["python3", "-m", "isobatch", "pod", f"{VOLUME}/runs/{name}", f"{FILES}/{RECIPE}", *world],
        contents=_files(request),
        **{"memory": memory, "cpu": str(cpus), "shm": f"{int(gib * 512)}Mi"},
        restarts=request.run.max_restarts,
        for_good=[WRONG_INPUT, FAILED],
        stopped=[STOPPED],
        **{"port": PORT, "stop_seconds": STOP_SECONDS, "volume": VOLUME, "files": FILES},
    )


def _yaml(value: object) -> str:
    """A value in YAML: a text of printable lines as a block, as people read it, all others as JSON."""
    if not isinstance(value, str) or "\n" not in value or not re.sub("[\n\t]", "", value).isprintable():
        return json.dumps(value)
    block = "|2+\n" if value.endswith("\n") else "|2-\n"
    return (block + re.sub("(?m)^(?=.)", " " * 4, value)).removesuffix("\n")


def _files(request: Request) -> dict[str, str]:
    """The recipe as a file for --config; of a user's own task its code as well. Place in FILES -> content."""
    task, files = request.recipe.task, {}
    if request.run.hook:
        raise UserError(f"--hook {request.run.hook[0]}: pods do not get its file: leave it out, or use slurm")
    if is_task_file(task):
        file = task_file(task).resolve()
        files = {str(p.relative_to(file.parent)): p.read_text(encoding="utf-8") for p in imported_files(file)}
        there = dataclasses.replace(request.recipe, task=f"{FILES}/{file.name}:{task.rpartition(':')[2]}")
        request = dataclasses.replace(request, recipe=there)
    plan = dataclasses.replace(request.plan, processes=None)  # as many as there are
    lines = request_text(dataclasses.replace(request, plan=plan)).splitlines()
    flags = [line.rstrip() for line in lines if line and not line.startswith("#")]
    return {RECIPE: "\n".join([*flags, ""]), **files}


LINGER_SECONDS = 10.0
"""How long torchrun may wait for those of other pods, where all processes of this one have saved: it would
wait for five minutes where another pod is evicted."""
INDEX = "JOB_COMPLETION_INDEX"
"""Environment variable with a pod's number, from 0; Kubernetes sets it."""
POLL_SECONDS = 0.5


class Kubernetes(Local):
    """Kubernetes. An attempt is what a pod runs; the cluster makes the next one, and `kubectl` ends it."""

    config: str
    """The file with the recipe, in a pod."""
    world: Sequence[str]
    """torchrun's words for the pods of the run."""

    def attempt(self, run: RunFolder) -> Verdict | None:
        before = _verdict_time(run)
        with StopFlag() as stop:
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=static"),
                *(f"--node-rank={os.environ[INDEX]}", *self.world),
                *("-m", "isobatch.launch.train", "--config", self.config),
                *("--out", str(run.folder.parent), "--name", run.folder.name),
            ]
            _run_torchrun(command, stop, lambda: _verdict_time(run) != before)
        return run.read_exit() if _verdict_time(run) != before else None


def submit(words: Sequence[str]) -> int:
    """Usage: k8s --task TASK --image IMAGE --claim CLAIM --nodes N --gpus-per-node G [flags] [--submit]

    flags: --cpu --cpus N --mem 64Gi --user 1000 --node-selector gpu=h100 --secret NAME, and those of
           `auto`; --data is a path under /isobatch, where pods see the claim, or a name on the hub
    """
    positional, flags = split_words(words)
    start = flags.pop("from", "")
    if has_start := start.startswith(f"{VOLUME}/") and not Path(start).exists():
        words = [*positional, *(f"{spelling(name)}={value}" for name, value in flags.items())]
    request, options = placement.parse(words, "k8s", KubernetesOptions, "gpus_per_node", "node-selector gpu")
    if has_start:
        print_lines(f"--from {start}: pods take its weights; its recipe is not here, so type its flags, too")
        recipe = dataclasses.replace(request.recipe, starts_from={"run": start})
        request = dataclasses.replace(request, recipe=recipe)
    unseen = [
        f"{spelling(name)} {value}: pods see {VOLUME} and their image alone: copy it into --claim"
        f" {options.claim}, and give {VOLUME}/{Path(value).name}"
        for name, value in consent.places(request.recipe)
        if (value[0] in "/.~" or Path(value).exists()) and not value.startswith(f"{VOLUME}/")
    ]
    if options.submit and unseen:
        raise UserError(unseen[0])
    text = render(request, options, unseen)
    print_lines(*unseen)
    print(_apply(text) if options.submit else text, end="")
    return DONE


def pod(words: Sequence[str]) -> int:
    """Usage: pod RUN CONFIG WORDS, in a pod of a job that `k8s` made; WORDS: those of torchrun"""
    if len(words) < 2 or INDEX not in os.environ:
        raise UserError("pod: runs in a pod of a Kubernetes job; `k8s` makes one")
    cluster, run = Kubernetes(), RunFolder(Path(words[0]))
    cluster.config, cluster.world = words[1], words[2:]
    parse_request(["--config", cluster.config], "pod")  # what is wrong is said before torch is imported
    return exit_code(run, cluster.attempt(run))


def _run_torchrun(command: list[str], stop: StopFlag, has_verdict: Callable[[], bool]) -> None:
    """Run torchrun to its end, pass a request to stop on to it, and end it where it only waits for others."""
    import psutil

    child = subprocess.Popen(command)
    idle_since: float | None = None
    while child.poll() is None:
        if stop.requested:
            child.send_signal(signal.SIGTERM)  # it hands that on, and waits until they have saved
            child.wait()
            return
        idle = has_verdict() and not psutil.Process(child.pid).children()
        idle_since = (idle_since or time.monotonic()) if idle else None
        if idle_since is not None and time.monotonic() - idle_since > LINGER_SECONDS:
            child.kill()  # it is blocked where it answers no other signal, and has no processes any more
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)


def exit_code(run: RunFolder, verdict: Verdict | None) -> int:
    """What the Job acts on: done; wrong input and failures that another start would not mend; asked to stop;
    else a failure after which the pod is replaced. `verdict`: of this attempt.
    """
    if run.status_or_none() == "done":
        return DONE
    if verdict is None:
        return BUG
    is_for_good = verdict.code in (WRONG_INPUT, FAILED) and verdict.cause in ("", OutOfMemoryError.cause)
    return verdict.code if is_for_good or verdict.code == STOPPED else BUG


def _verdict_time(run: RunFolder) -> int:
    """When exit.json was written; 0 where there is none."""
    path = run.folder / "exit.json"
    return path.stat().st_mtime_ns if path.exists() else 0
