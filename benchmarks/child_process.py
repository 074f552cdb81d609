"""Calls a benchmark's function in a process of its own, so that its memory or process group is its alone."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from isobatch.core.package import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

WORD = "call"
"""What stands before the function's place on the command line of `python -m benchmarks`."""


def command(place: str, *words: str) -> list[str]:
    """The words after `python` that call `place`, such as `quality.texts:scheme`, with `words`."""
    return [str(ROOT / "benchmarks" / "__main__.py"), WORD, place, *words]


def call(place: str, *words: str, environment: Mapping[str, str] | None = None) -> Any:
    """What the function returned in the child process.

    Raises RuntimeError with the end of the child's stderr if it failed.
    """
    ended = subprocess.run(
        [sys.executable, "-P", *command(place, *words)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{place} failed:\n{ended.stderr[-3000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def answer(place: str, words: list[str]) -> int:
    """In the child process: call the function and print what it returns as one line of JSON."""
    module, _, name = place.partition(":")
    function = getattr(importlib.import_module(f"isobatch.benchmarks.{module}"), name)
    print(json.dumps(function(*words)))
    return 0
