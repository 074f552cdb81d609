"""`doctor` on a GPU: the probes that need one, and no false alarm."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from isobatch.launch.doctor import devices, network, software
from isobatch.launch.doctor.children import Child
from isobatch.tests.gpu.helpers import gpu_only

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = gpu_only
SECONDS = 180.0


def test_every_gpu_computes_rightly() -> None:
    found = Child("arithmetic", SECONDS).answer()
    assert devices.check_torch(found).state == "ok"
    assert len(found.found["gpus"]) == torch.cuda.device_count()
    assert all("error" not in gpu for gpu in found.found["gpus"]), found


def test_nccl_sums() -> None:
    found = Child("all_reduce", SECONDS, backend="nccl", processes=torch.cuda.device_count()).answer()
    assert network.check_all_reduce("nccl", found).state == "ok", found


def test_a_kernel_is_compiled() -> None:
    assert software.check_compile(Child("compiled", SECONDS).answer()).state == "ok"


def test_nothing_is_broken_on_this_machine(cli: Any, tmp_path: Path) -> None:
    answer = cli("doctor", "--json", folder=tmp_path)
    checks = json.loads(answer.out)["checks"]
    assert [check for check in checks if check["state"] == "broken"] == []
