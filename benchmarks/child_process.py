"""Calls a benchmark's function in a process of its own, so that its memory or process group is its alone."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from isobatch.core.package import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

WORD = "call"
"""What stands before the function's place on the command line of `python -m benchmarks`."""


def command(place: str, *words: str) -> list[str]:
    """The words after `python` that call `place`, such as `speed.engine:contend`, with `words`."""
    return [str(ROOT / "benchmarks" / "__main__.py"), WORD, place, *words]


def call(
    place: str, *words: str, environment: Mapping[str, str] | None = None, timeout: float | None = None
) -> Any:
    """What the function returned in the child process.

    Raises RuntimeError with the end of the child's stderr if it failed, or took more than `timeout` seconds:
    then it is killed, and all that it started.
    """
    # Files, not pipes: a grandchild that outlives the child would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        words = ("-P", *command(place, *words))
        child = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=out, stderr=err)
        try:
            ended = f"failed with {code}" if (code := child.wait(timeout)) else ""
        except subprocess.TimeoutExpired:
            ended = f"took more than {timeout:.0f} s"
        finally:
            if child.poll() is None:
                kill_tree(child.pid)
                child.wait()
        out.seek(0)
        err.seek(0)
        if ended:
            raise RuntimeError(f"{place} {ended}:\n{err.read()[-3000:]}")
        return json.loads(out.read().splitlines()[-1])


def kill_tree(number: int) -> None:
    """Kill a process and all that it started, in sessions of their own, too."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(number)
        end(*parent.children(recursive=True), parent)


def end(*processes: Any) -> None:
    """Kill them, and wait until they are gone with the memory that they held."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def answer(place: str, words: list[str]) -> int:
    """In the child process: call the function and print what it returns as one line of JSON."""
    module, _, name = place.partition(":")
    function = getattr(importlib.import_module(f"isobatch.benchmarks.{module}"), name)
    print(json.dumps(function(*words)))
    return 0
