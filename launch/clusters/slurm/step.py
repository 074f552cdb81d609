"""A step of a job: srun starts a launcher on every node. Its words say what became of them."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from isobatch.core.errors import FAILED, WRONG_INPUT, JobMemoryError, WorkerLostError
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.launch.clusters.slurm.client import Allocation
from isobatch.launch.clusters.slurm.containers import ENVIRONMENT, in_container
from isobatch.launch.clusters.slurm.legs import JobRequest

ORPHANED = 96
"""Exit code of a launcher that finds the job's script gone."""
LINES_KEPT = 200
"""Of what srun says."""
END_SECONDS = 30.0
"""How long srun may take to end after it was told to."""
_SHELL = Path(__file__).with_name("step.sh.jinja").read_text(encoding="utf-8")
STEP_SHELL = _SHELL.replace("{{ orphaned }}", str(ORPHANED))
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


class Step(subprocess.Popen[bytes]):
    """A running srun. What it and its nodes say is printed, and its last lines are kept.

    srun forwards SIGUSR1 to every process of the step; at SIGTERM and SIGINT it ends the step.
    """

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._relay = threading.Thread(target=self._print_lines, daemon=True)
        self._relay.start()

    def _print_lines(self) -> None:
        assert self.stderr is not None
        for line in self.stderr:
            self._lines.append(line.decode(errors="replace"))
            sys.stderr.write(self._lines[-1])
            sys.stderr.flush()

    def end(self) -> None:
        """End a step whose srun waits for a node that is gone."""
        self.terminate()
        try:
            self.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def said(self) -> str:
        """The last lines of a step that has ended."""
        self.wait()
        self._relay.join(timeout=5)
        return "".join(self._lines)


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
    run: RunFolder, nodes: Sequence[str], allocation: Allocation, request: JobRequest, words: Sequence[str]
) -> list[str]:
    """The command of a step: one launcher per node, which gets `words`; one that fails ends the others.

    Raises UserError where the container cannot be had.
    """
    folder = str(run.folder.resolve())
    inside, launcher = in_container(request.container, allocation.gpus, "node", folder, *words)
    return [
        *(ENVIRONMENT if request.container else ()),
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
        *("/bin/bash", "-c", STEP_SHELL, f"{folder}/slurm", run.facts.folder),
        *launcher,
    ]
