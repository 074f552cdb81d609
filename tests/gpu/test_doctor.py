"""`doctor` on a GPU: the probes that need one, and no false alarm."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch

from isobatch.launch.doctor import devices, machine
from isobatch.launch.doctor.probes import Child, Probe
from isobatch.tests.gpu.helpers import gpu_only

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = gpu_only
SECONDS = 180.0


def probes() -> list[Probe]:
    count = torch.cuda.device_count()
    nccl = dataclasses.replace(machine.NCCL, arguments={"backend": "nccl", "processes": count})
    return [machine.COMPILE, nccl, *map(devices.gpu_probe, range(count))]


def test_every_gpu_computes_compiles_and_sums() -> None:
    for probe in probes():
        check = Child(dataclasses.replace(probe, seconds=SECONDS, patient=True)).check()
        assert check.state == "ok", check


def test_nothing_is_broken_on_this_machine(cli: Any, tmp_path: Path) -> None:
    answer = cli("doctor", "--json", folder=tmp_path)
    checks = json.loads(answer.out)["checks"]
    assert [check for check in checks if check["state"] == "broken"] == []
