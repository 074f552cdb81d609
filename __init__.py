"""isobatch: the recipe decides what is learnt, the plan decides how fast.

    import isobatch

    recipe = isobatch.Recipe(task="classifier", data="reviews/")
    run = isobatch.train(recipe)
    print(run.metrics)

A workload of your own is a subclass of `isobatch.Task`; names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

_PLACES = re.findall(
    r"^from (\S+) import (\w+)", Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"), re.MULTILINE
)
_MODULE_OF = {name: module for module, name in _PLACES}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'isobatch' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
