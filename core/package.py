"""This package's folder and cache, and the command line that starts this copy of it in another process."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import os
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
"""The folder of the package: a clone, or `isobatch` in site-packages."""
TRAIN_SCRIPT = ROOT / "launch" / "train.py"
"""The script that accelerate and torchrun start in every process."""

LAUNCHER_SCRIPT = ROOT / "launch" / "launcher.py"
"""The script that runs accelerate's launcher, or torchrun on a Slurm node."""


CACHE = "ISOBATCH_CACHE"
"""Environment variable with the folder of prepared data."""


def cache_folder() -> Path:
    """Where prepared data is kept, as a whole path: $ISOBATCH_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE) or Path(base) / "isobatch").expanduser().absolute()


def load(place: str) -> Any:
    """What stands at `module:name` within isobatch; imports the module."""
    return pkgutil.resolve_name(f"isobatch.{place}")


def table_beside(file: str, name: str = "") -> dict[str, Any]:
    """The table of a TOML file beside a module: `name`.toml, or the one that is called like the module."""
    module = Path(file)
    return tomllib.loads(module.with_name(f"{name or module.stem}.toml").read_text(encoding="utf-8"))


def traits_beside(file: str, kind: type[T]) -> dict[str, T]:
    """Name -> traits, by the table beside a module; a row may be `like` one above it and say what differs."""
    found: dict[str, Any] = {}
    for name, row in table_beside(file).items():
        other = found.get(row.pop("like", ""))
        found[name] = dataclasses.replace(other, **row) if other else kind(**row)
    return found


def own_command(*words: str) -> list[str]:
    """The command line that runs this copy of isobatch with `words`, from any folder.

    `-P` keeps the working directory off sys.path, so that a user's files there cannot hide modules.
    """
    if _is_found_by_name():
        return [sys.executable, "-P", "-m", "isobatch", *words]
    return [sys.executable, "-P", str(ROOT / "__main__.py"), *words]


def _is_found_by_name() -> bool:
    """Whether `import isobatch` in a new interpreter finds this copy."""
    # The child starts with -P: it has no script's folder and no working directory on its path.
    paths = sys.path if sys.flags.safe_path else sys.path[1:]
    for finder in sys.meta_path:
        spec = finder.find_spec("isobatch", paths if finder is importlib.machinery.PathFinder else None)
        if spec is not None:
            return spec.origin is not None and Path(spec.origin).resolve().parent == ROOT
    return False


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
