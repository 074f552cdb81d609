"""The witness: writes the log's running seal to a place outside the run, a line at a time.

Whoever can change a run's folder can seal it anew. A witness that only grows, such as a file of another user
or a log server, holds what the log was while the run trained. It is told by the environment and not by the
run's files: those may come from someone else.
"""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import rows_in

if TYPE_CHECKING:
    from collections.abc import Callable

WITNESS = "ISOBATCH_WITNESS"
"""Environment variable with the witness: a file to append to, or `|` and a command that reads a line."""
COMMAND_SECONDS = 30
"""Longest time for the command."""


def use_witness(target: str | None) -> None:
    """Let this process and its children write to a witness."""
    if target:
        os.environ[WITNESS] = target if target.startswith("|") else str(Path(target).expanduser().absolute())


def witness_environment() -> dict[str, str]:
    """The variable that hands the witness to a process elsewhere; nothing where there is none."""
    return {WITNESS: os.environ[WITNESS]} if os.environ.get(WITNESS) else {}


class Witness:
    """Sends lines in the background; what goes wrong is said once, and training goes on."""

    def __init__(self, target: str, say: Callable[[str], None]) -> None:
        self._target, self._say = target, say
        self._thread = ThreadPoolExecutor(1, "witness")
        self._failed = False

    @classmethod
    def from_environment(cls, say: Callable[[str], None]) -> Witness | None:
        """The witness that the environment names; None where it names none."""
        target = os.environ.get(WITNESS, "")
        return cls(target, say) if target else None

    def send(self, line: dict[str, Any]) -> None:
        """Send a line, in order."""
        self._thread.submit(self._send, json.dumps(line, sort_keys=True) + "\n")

    def close(self) -> None:
        """Wait until all lines are sent."""
        self._thread.shutdown()

    def _send(self, text: str) -> None:
        try:
            if self._target.startswith("|"):
                subprocess.run(
                    self._target[1:],
                    shell=True,  # the user's own words, from the user's own environment
                    input=text.encode(),
                    stdout=subprocess.DEVNULL,
                    timeout=COMMAND_SECONDS,
                    check=True,
                )
            else:
                with Path(self._target).open("a", encoding="utf-8") as stream:
                    stream.write(text)
        except (OSError, subprocess.SubprocessError) as error:
            if not self._failed:
                self._say(f"the witness misses a line, and training goes on: {error}")
            self._failed = True


def read_witness(path: Path, run: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of a witness file about a run, and where its log was cut and begun again.

    A resumed run cuts its log and goes on: a line of fewer bytes than those before it takes their place. So
    does one who forges the log and tells the witness: whoever knows the run knows how often it was resumed.
    """
    lines: list[dict[str, Any]] = []
    restarts: list[str] = []
    for line in rows_in(path):
        if line.get("run") != run or not isinstance(line.get("bytes"), int):
            continue
        if lines and lines[-1]["bytes"] >= line["bytes"]:
            restarts.append(f"{line.get('phase', 'the beginning')} {line.get('step', '')}".strip())
        while lines and lines[-1]["bytes"] >= line["bytes"]:
            lines.pop()
        lines.append(line)
    return lines, restarts
