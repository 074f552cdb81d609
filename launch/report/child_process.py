"""A function called alone in a process of its own, which answers in JSON: `isobatch call PLACE VALUES`."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Sequence
from typing import Any

from isobatch.core.package import own_command


def call_in_child(place: str, **values: Any) -> Any:
    """What `module:function` of isobatch returns for these values, from a process of its own."""
    words = own_command("call", place, json.dumps(values))
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{place} in a child ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def call(words: Sequence[str]) -> int:
    """Usage: call MODULE:FUNCTION JSON, in a process that `report` starts."""
    place, values = words
    module, _, function = place.partition(":")
    found = getattr(importlib.import_module(f"isobatch.{module}"), function)(**json.loads(values))
    print(json.dumps(found))
    return 0
