"""`plan` answers for every machine of the table, without a network and without a GPU, in seconds."""

from __future__ import annotations

import json
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from isobatch.core.package import own_command
from isobatch.tests.integration.helpers import RAGGED, command, launch

if TYPE_CHECKING:
    from pathlib import Path

MACHINES = [
    *("rtx4080-laptop", "rtx4080", "t4", "v100", "a100-40gb", "a100-80gb", "h100", "h200"),
    *("8xh100", "4x8xa100-80gb", "cpu:2x24gb"),
]
OFFLINE = subprocess.run(["unshare", "-rn", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_without_a_network(machine: str, tmp_path: Path) -> None:
    words = [
        "plan",
        "--task",
        "causal-lm",
        "--model",
        "gpt2-124m",
        "--batch-size",
        "48",
        "--max-length",
        "512",
    ]
    words = [
        *own_command(*words),
        "--hardware",
        machine,
        "--assume-length",
        "512",
        "--json",
    ]
    began = time.monotonic()
    done = command([*(["unshare", "-rn"] if OFFLINE else []), *words], cwd=tmp_path, HF_HOME=str(tmp_path))
    assert time.monotonic() - began < 5
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["global_batch"] == 48
    plan = answer["plan"]
    assert {k for k in plan if k != "reasons"} <= set(answer["reasons"])
    assert all(len(r) > 10 for r in answer["reasons"].values())
    assert plan["micro_batch_samples"] <= 48
    assert plan["device"] == ("cpu" if machine.startswith("cpu") else "cuda")


def test_scale_batch_is_a_new_recipe(tmp_path: Path) -> None:
    words = ["plan", "--task", RAGGED, "--json"]
    one = json.loads(launch(*words, cwd=tmp_path).stdout)["recipe"]
    other = json.loads(launch(*words, "--scale-batch", "4", "--lr-rule", "sqrt", cwd=tmp_path).stdout)[
        "recipe"
    ]
    assert other["batch_size"] == 4 * one["batch_size"]
    assert other["lr"] == pytest.approx(2 * one["lr"])
    assert other["scaled_from"] == {"batch_size": one["batch_size"], "lr": one["lr"], "rule": "sqrt"}
    assert other["hash"] != one["hash"]


def test_plan_says_why(tmp_path: Path) -> None:
    sheet = launch("plan", "--task", RAGGED, "--hardware", "8xh100", cwd=tmp_path).stdout
    assert "of 8" in sheet
    assert "uncalibrated" in sheet


def test_plan_says_why_the_loader_is_as_it_is(tmp_path: Path) -> None:
    words = ["--workers", "4", "--persistent-workers", "--use_dynamic_padding", "--prefetch_factor", "3"]
    done = launch("plan", "--task", RAGGED, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if len(line.split()) > 2}
    settings = ("workers", "prefetch", "pin_memory", "persistent_workers", "dynamic_padding")
    assert [rows[name][0] for name in settings] == ["4", "3", "off", "on", "on"]
    assert all(len(rows[name]) > 3 for name in settings)
    for word in ("--persistent-workers", "--use-dynamic-padding"):
        assert f"{word} has no effect: it is always so here" in done.stderr
    as_json = json.loads(launch("plan", "--task", RAGGED, "--json", cwd=tmp_path).stdout)
    assert as_json["loader"]["dynamic_padding"]["value"] is True
