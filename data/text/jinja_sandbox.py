"""Renders chat templates, in a process of their own that is limited in time, memory and text."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from isobatch.data.text import template_process

SECONDS = 10.0
"""Of one text; those of known templates take less than a thousandth."""

Wanted = tuple[int, bool]
"""The text of so many of the messages, and whether it is the prompt for an answer to them."""
Job = tuple[Mapping[str, Any], Sequence[Wanted], "dict[Wanted, Rendered]"]
"""The variables of a template, which are JSON, `messages` among them; texts of it; where they are put."""


class Rendered(NamedTuple):
    """Some messages as text."""

    first: str
    same: int
    rest: str
    spans: list[tuple[int, int]]
    """Where each part that the template marks as an answer's begins and ends ({% generation %})."""

    @property
    def text(self) -> str:
        """Put together when it is asked for: of a long conversation the prompts are far longer than it is."""
        return self.first[: self.same] + self.rest


def render(template: str, jobs: Sequence[Job], is_own: bool = False) -> str:
    """Render the texts of all jobs, and say in a line why those of one are refused.

    One of isobatch's own templates (`is_own`) is rendered here, in 20 us where the other process takes 100.
    """
    asked, refused = [(values, wanted) for values, wanted, _ in jobs], ""
    if is_own:
        answers = template_process.texts(template_process.render_own, template, asked)
    else:
        with _lock:
            answers = _ask(template, asked)
    for (_, wanted, found), answer in zip(jobs, answers, strict=True):
        if isinstance(answer, str):
            refused = answer
        else:
            found.update({k: Rendered(answer[0][1], *text) for k, text in zip(wanted, answer, strict=True)})
    return refused


_processes: dict[int, subprocess.Popen[str]] = {}
"""The process that renders, by the one that started it: who was forked cannot share its parent's."""
_lock = threading.Lock()


def _ask(template: str, jobs: Sequence[Any]) -> list[Any]:
    """As `template_process.texts`; where the process ends, the reason for each job."""
    if (process := _processes.get(os.getpid())) is None:
        process = _processes[os.getpid()] = subprocess.Popen(
            [sys.executable, "-I", template_process.__file__, str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # an interrupt is its owner's
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps([template, jobs]) + "\n")
        process.stdin.flush()
        found: list[Any] = json.loads(process.stdout.readline())
    except (BrokenPipeError, ValueError):  # it has ended
        code = close()
        took_long = code == -signal.SIGALRM
        return [f"it takes over {SECONDS:g} s" if took_long else f"its process ended: {code}"] * len(jobs)
    return found


@atexit.register
def close() -> int | None:
    """End the process that renders, if there is one, and give its code; the next text starts another."""
    if process := _processes.pop(os.getpid(), None):
        process.kill()
        return process.wait()
    return None
