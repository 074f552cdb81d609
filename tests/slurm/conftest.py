"""The cluster, up for the session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from isobatch.tests.slurm import nodes
from isobatch.tests.slurm.nodes import Cluster, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def _up() -> Iterator[Cluster]:
    if not nodes.available():
        pytest.skip("needs root and Debian's packages slurm-wlm and munge")
    with nodes.up() as cluster:
        yield cluster


@pytest.fixture
def cluster(_up: Cluster) -> Iterator[Cluster]:
    """With both nodes up, and no job left behind."""
    yield _up
    _up.start_missing_daemons()
    _up.ask("scancel", "--full", "--user=root")
    _up.ask("scontrol", "update", "nodename=n[1-2]", "state=resume")
    wait_for(lambda: not _up.ask("squeue", "-h"), 40)
    wait_for(lambda: _up.ask("sinfo", "-h", "-N", "-p", "debug", "-o", "%t").split() == ["idle", "idle"], 20)
