"""The workloads there are: each package in models/ lists its own in `WORKLOADS`, and is found by that.

Only names stand in them: listing the workloads imports neither tasks nor data, and no heavy library.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple


class Workload(NamedTuple):
    """A workload's name, its classes as `module:Class` within isobatch, and what it does in a line."""

    name: str
    task: str
    data: str
    summary: str
    streamed: str = ""
    """The data class for data that stays in a store, where there is one."""
    place: int = 100
    """Where it stands in lists: the lowest first."""


def _packages() -> list[object]:
    folders = sorted(file.parent.name for file in Path(__file__).parent.glob("*/__init__.py"))
    return [importlib.import_module(f"isobatch.models.{name}") for name in folders]


def list_workloads() -> dict[str, Workload]:
    """Name -> workload."""
    found = [one for package in _packages() for one in getattr(package, "WORKLOADS", ())]
    return {one.name: one for one in sorted(found, key=lambda one: one.place)}


def list_chains() -> dict[str, tuple[str, ...]]:
    """Names of sequences of workloads that `auto` runs one after the other -> their stages."""
    return {name: stages for one in _packages() for name, stages in getattr(one, "CHAINS", {}).items()}
