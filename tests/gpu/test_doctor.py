"""`doctor` on a GPU: the probes that need one, and no false alarm."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from isobatch.core.package import own_command
from isobatch.engine.machine.detect import detect
from isobatch.launch.doctor import machine, probes
from isobatch.tests.gpu.helpers import gpu_only
from isobatch.tests.integration.helpers import command

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

pytestmark = gpu_only


def test_every_gpu_computes_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SECONDS", 180.0)
    for check in map(probes.try_out, machine.probes_for(detect())):
        assert check.state == "ok", check


def test_nothing_is_broken_on_this_machine(tmp_path: Path) -> None:
    checks = json.loads(command(own_command("doctor", "--json"), tmp_path).stdout)["checks"]
    assert [check for check in checks if check["state"] == "broken"] == []
