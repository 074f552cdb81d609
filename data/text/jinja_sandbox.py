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
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 10.0
"""Of one text; those of known templates take less than a thousandth."""
SCRIPT = Path(__file__).with_name("template_process.py")


class ChatTemplateError(ValueError):
    """A template that cannot be parsed, that raises, or that exceeds a limit. The message is one line."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[tuple[int, int]]
    """Where each part that the template marks as an answer's begins and ends ({% generation %})."""
    prompts: list[tuple[int, str]]
    """Of each of `stops`: how many characters of the text its prompt begins with, and what follows in the
    prompt that is not in the text."""


def render(
    template: str, values: Mapping[str, Any], is_own: bool = False, stops: Sequence[int] = ()
) -> Rendered:
    """The text of a template with these variables, which are JSON. Raises ChatTemplateError.

    `stops`: numbers of messages; the prompt for an answer to so many is compared with the text. One of
    isobatch's own templates (`is_own`) is rendered here, in 20 us where the other process takes 100.
    """
    if is_own:
        from isobatch.data.text import template_process

        answer = template_process.answer(template_process.render_own, template, values, stops)
    else:
        with _lock:
            answer = _renderer().ask(template, values, stops)
    if "error" in answer:
        raise ChatTemplateError(answer["error"])
    return Rendered(**answer)


class _Renderer:
    """The process that renders, for the process that started it."""

    def __init__(self) -> None:
        self.owner, self._template = os.getpid(), ""
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(SCRIPT), str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # an interrupt is its owner's
        )

    def ask(self, template: str, values: Mapping[str, Any], stops: Sequence[int]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        asked = {"values": values, "stops": stops} | (
            {} if template == self._template else {"template": template}
        )
        self._template = template
        try:
            stdin.write(json.dumps(asked) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())
        except (BrokenPipeError, ValueError):  # it has ended
            code = self.close()
            took_long = code == -signal.SIGALRM
            return {"error": f"it takes over {SECONDS:g} s" if took_long else f"its process ended: {code}"}

    def close(self) -> int:
        """End the process; its exit code."""
        _renderers.clear()
        if self.owner == os.getpid():
            self._process.kill()
        return self._process.wait()


_renderers: list[_Renderer] = []
_lock = threading.Lock()


def _renderer() -> _Renderer:
    """The renderer of this process: one that was forked cannot share its parent's."""
    if not _renderers or _renderers[0].owner != os.getpid():
        _renderers[:] = [_Renderer()]
    return _renderers[0]


@atexit.register
def close() -> None:
    """End the process that renders, if there is one; the next text starts another."""
    for renderer in [r for r in _renderers if r.owner == os.getpid()]:
        renderer.close()
