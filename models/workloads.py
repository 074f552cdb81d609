"""The workloads there are: each package in models/ lists its own in `WORKLOADS`, and is found by that.

Only names stand in them: listing the workloads imports neither tasks nor data, and no heavy library.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple


class Workload(NamedTuple):
    """A workload's name, and what it does in a line."""

    name: str
    task: str
    """The class, as `module:Class` within the package."""
    summary: str
    place: int = 100
    """Where it stands in lists: the lowest first."""


def _packages() -> dict[str, object]:
    folders = sorted(file.parent.name for file in Path(__file__).parent.glob("*/__init__.py"))
    return {name: importlib.import_module(f"isobatch.models.{name}") for name in folders}


def list_workloads() -> dict[str, Workload]:
    """Name -> workload, whose task is `module:Class` within isobatch."""
    found = [
        one._replace(task=f"models.{name}.{one.task}")
        for name, package in _packages().items()
        for one in getattr(package, "WORKLOADS", ())
    ]
    return {one.name: one for one in sorted(found, key=lambda one: one.place)}


def list_chains() -> dict[str, tuple[str, ...]]:
    """Names of sequences of workloads that `auto` runs one after the other -> their stages."""
    return {
        name: stages for one in _packages().values() for name, stages in getattr(one, "CHAINS", {}).items()
    }
