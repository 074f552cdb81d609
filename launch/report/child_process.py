"""Calls a function in a new process and reads its result as JSON: `isobatch call TARGET ARGUMENTS`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from isobatch.core.package import load, own_command


def call_in_child(target: str, seconds: float | None = None, /, **arguments: Any) -> Any:
    """The result of isobatch's `module:function`, called in a new process; all values are JSON.

    Raises RuntimeError with the end of its error output where the process fails, and
    subprocess.TimeoutExpired where it takes longer.
    """
    words = own_command("call", target, json.dumps(arguments))
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=seconds)
    if ended.returncode:
        raise RuntimeError(f"{target} in a child ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def call(words: Sequence[str]) -> int:
    """Usage: call MODULE:FUNCTION JSON, in a process that `report` or `doctor` starts."""
    target, arguments = words
    print(json.dumps(load(target)(**json.loads(arguments))))
    return 0
