"""Runs what may crash, hang or take long in processes of its own, each with a time limit, all at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core.package import own_command

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULE = "launch.doctor.probes"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe found, or why it found nothing."""

    found: Any = None
    error: str = ""
    """The last line of its error output, or the signal that ended it; empty where it succeeded."""
    late: bool = False
    """Whether its time was up."""


class Child:
    """A function of probes.py in a process of its own, which begins at once."""

    def __init__(
        self, function: str, seconds: float, env: Mapping[str, str] | None = None, **arguments: Any
    ) -> None:
        self.seconds, self._began = seconds, time.monotonic()
        # Files, because nobody reads pipes while others answer.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  it ends with this object
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            own_command("call", f"{MODULE}:{function}", json.dumps(arguments)),
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )

    def answer(self) -> Answer:
        """Wait for its end, or until its time is up."""
        left = self.seconds - (time.monotonic() - self._began)
        try:
            code = self._process.wait(max(0.0, left))
        except subprocess.TimeoutExpired:
            return Answer(error=f"no answer within {self.seconds:g} s", late=True)
        finally:
            self.stop()
        if code < 0:
            return Answer(error=f"its process was ended by {signal.Signals(-code).name}")
        if code:
            return Answer(error=_last_line(self._text(self._err)))
        return Answer(json.loads(self._text(self._out).splitlines()[-1]))

    def stop(self) -> None:
        """Kill it with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @staticmethod
    def _text(stream: Any) -> str:
        stream.seek(0)
        return str(stream.read().decode(errors="replace"))


def _last_line(text: str) -> str:
    """The line that says what went wrong: the last one that does not continue another."""
    lines = [line for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line[:1].isalpha() and ": " in line]
    return (named or lines or ["it said nothing"])[-1].strip()[:300]
