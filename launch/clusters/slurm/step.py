"""A step of a job: srun starts a launcher on every node. Its words say what became of them."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

from isobatch.core.errors import FAILED, WRONG_INPUT, JobMemoryError, WorkerLostError
from isobatch.core.package import own_command
from isobatch.engine.runs.run_folder import Verdict
from isobatch.launch.clusters.slurm.containers import (
    ENVIRONMENT,
    Container,
    find_runtime,
    node_command,
    srun_words,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.launch.clusters.slurm import client
    from isobatch.launch.clusters.slurm.job_request import JobRequest

ORPHANED = 96
"""Exit code of a launcher that finds the job's script gone."""
LOG_TAIL_CHARACTERS = 2500
LINES_KEPT = 200
"""Of what srun says."""
END_SECONDS = 30.0
"""How long srun may take to end after it was told to."""
STEP_SHELL = """trap '' USR1 USR2 TERM INT HUP
refuse() { echo "isobatch: $SLURMD_NODENAME does not see $1: $2" >&2; exit 2; }
[ -d "$0" ] || refuse "the run's folder ${0%/slurm}" "choose an --out on a file system that all nodes share"
command -v -- "$1" >/dev/null || refuse "the Python environment $1" "make it where all nodes see it"
"$@"
code=$?
[ $code -gt 128 ] && kill -$((code - 128)) $$
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
until [ $code -ne {orphaned} ] || scontrol requeue "${job:-$SLURM_JOB_ID}"; do sleep 5; done
exit $code
""".replace("{orphaned}", str(ORPHANED))
"""Signals are ignored while Python starts; the job repeats them until the workers handle them.

Where the job's script died with the first node, this shell puts the job back into the queue: with --no-kill
Slurm leaves it idle until its time limit. It tries until Slurm answers, and stands outside of apptainer.
"""

MEMORY = r"exceeded (?:job |step )?memory limit|oom[-_ ]?kill|Out Of Memory"
NOT_STARTED = r"Task launch for \S+ failed on node (\S+?):"
ENDED = r"srun: error: (\S+): tasks? \S+: (\w[\w ]+)"
BY_ITSELF = ("Exited", "Terminated")
NOT_CREATED = r"^srun: (?:error: )?((?:unrecognized|invalid) option.*|Unable to create step(?!.*contact).*)$"
REFUSED = r"^isobatch: (\S+ does not see .+)$"
SLURMS_OWN = ("srun:", "slurmstepd")


class Step:
    """A running srun. What its nodes say is printed below `heading`, and its last lines are kept.

    Slurm's own first lines wait for those of the nodes, which tell what is wrong.
    """

    def __init__(self, command: Sequence[str], heading: str) -> None:
        self._heading = heading
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._held: list[str] | None = []
        """Slurm's lines until a node has said something; None from then on."""
        self._relay = threading.Thread(target=self._print_lines, daemon=True)
        self._relay.start()

    def _print_lines(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace")
            self._lines.append(text)
            is_slurms = text.startswith(SLURMS_OWN)
            if is_slurms and (held := self._held) is not None:  # the job's thread may end that
                held.append(text)
                continue
            if self._heading and not (is_slurms or re.match(REFUSED, text)):
                text, self._heading = f"{self._heading}\n{text}", ""
            _print(text)
            self.print_held_lines()
        self.print_held_lines()

    def print_held_lines(self) -> None:
        """Print what Slurm said at first, and hold nothing from now on."""
        held, self._held = self._held, None
        if held:
            _print("".join(held))

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether a signal from outside ended srun itself."""
        return (self._process.poll() or 0) < 0

    def signal(self, number: int) -> None:
        """srun forwards SIGUSR1 to every process of the step; at SIGTERM and SIGINT it ends the step."""
        self._process.send_signal(number)

    def end(self) -> None:
        """End a step whose srun waits for a node that is gone."""
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def said(self) -> str:
        """The last lines of a step that has ended."""
        self._process.wait()
        self._relay.join(timeout=5)
        return "".join(self._lines)


def _print(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def explain_end(said: str) -> Verdict | None:
    """What ended a step, from what srun said; None where it does not say."""
    if re.search(MEMORY, said, re.IGNORECASE):
        return Verdict(FAILED, "the job's memory limit was exceeded", JobMemoryError.cause)
    if refused := re.findall(REFUSED, said, re.MULTILINE):
        return Verdict(WRONG_INPUT, refused[0])
    if refused := re.findall(NOT_CREATED, said, re.MULTILINE):
        return Verdict(WRONG_INPUT, f"srun starts no step: {refused[-1].strip()} (words of --srun?)")
    if nodes := unreachable_nodes(said):
        return Verdict(FAILED, f"Slurm cannot reach {', '.join(nodes)}", WorkerLostError.cause)
    # The first one that ends: srun kills the others then.
    node, how = next(iter(re.findall(ENDED, said)), ("", ""))
    if how and not how.startswith(BY_ITSELF):
        return Verdict(FAILED, f"the launcher on {node} was ended by a signal ({how})", WorkerLostError.cause)
    return None


def unreachable_nodes(said: str) -> list[str]:
    """The nodes on which srun could start nothing."""
    return sorted(set(re.findall(NOT_STARTED, said)))


def srun_command(
    run: RunFolder, nodes: Sequence[str], allocation: client.Allocation, request: JobRequest, nonce: str
) -> list[str]:
    """The command of a step: one launcher per node; one that fails ends the others.

    Raises UserError where the container cannot be had.
    """
    words = ("node", str(run.folder.resolve()), nonce)
    if request.container is None:
        before, inside, launcher = [], [], own_command(*words)
    else:
        container = Container(**request.container)
        runtime = find_runtime(container.image)
        before, inside = list(ENVIRONMENT), srun_words(container, runtime)
        launcher = node_command(container, runtime, allocation.gpus, *words)
    return [
        *before,
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        "--ntasks-per-node=1",
        # A step does not inherit --cpus-per-task from sbatch.
        f"--cpus-per-task={allocation.cpus}",
        *([f"--gpus-per-node={allocation.gpus}"] if allocation.gpus else []),
        # The step of a node that died holds the processors of the others until Slurm has cleaned up.
        "--overlap",
        "--kill-on-bad-exit=1",
        "--unbuffered",
        # A job that was submitted with --export=NONE would hand that on to its steps.
        "--export=ALL",
        *request.srun,
        *inside,
        *("/bin/bash", "-c", STEP_SHELL, str(run.folder.resolve() / "slurm")),
        *launcher,
    ]


def node_logs(run: RunFolder, nodes: Sequence[str]) -> str:
    """The ends of the nodes' logs, one below the other."""
    paths = [run.folder / "slurm" / f"node-{name}.log" for name in nodes]
    ends = [(p.name, p.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]) for p in paths if p.is_file()]
    return "".join(f"--- {name}\n{text}\n" for name, text in ends)
