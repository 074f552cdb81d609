"""`plan` answers for machines of the table, without a network and without a GPU, in seconds."""

from __future__ import annotations

import json
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from isobatch.core.package import own_command
from isobatch.engine.registry import TASKS
from isobatch.tests.integration.helpers import RAGGED, command, launch, succeed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Offline = Callable[..., subprocess.CompletedProcess[str]]

MACHINES = ["4x8xa100-80gb", "cpu:2x24gb"]
OFFLINE = subprocess.run(["unshare", "-rn", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_of_the_table_without_a_network(machine: str, tmp_path: Path) -> None:
    words = ["--model", "gpt2-124m", "--batch-size", "48", "--max-length", "512", "--assume-length", "512"]
    words = own_command("plan", "--task", "causal-lm", *words, "--hardware", machine, "--json")
    began = time.monotonic()
    done = command([*(["unshare", "-rn"] if OFFLINE else []), *words], cwd=tmp_path, HF_HOME=str(tmp_path))
    assert time.monotonic() - began < 5
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["global_batch"] == 48
    plan = answer["plan"]
    # Training measures the rounding; only data in a store has a cache.
    assert plan.keys() - {"reasons", "rounding", "copies", "stream_cache_bytes"} <= answer["reasons"].keys()
    assert all(len(r) > 10 for r in answer["reasons"].values())
    assert plan["micro_batch_samples"] <= 48
    assert plan["device"] == ("cpu" if machine.startswith("cpu") else "cuda")


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_planned_by_an_assumed_length(task: str, tmp_path: Path) -> None:
    done = succeed(
        "plan", "--task", task, "--assume-length", "64", "--hardware", "t4", "--json", cwd=tmp_path
    )
    assert json.loads(done.stdout)["plan"]["micro_batch_samples"] > 0


def test_plan_says_why_the_loader_is_as_it_is(tmp_path: Path) -> None:
    words = ["--workers", "4", "--persistent-workers", "--use_dynamic_padding", "--prefetch_factor", "3"]
    done = succeed("plan", "--task", RAGGED, *words, "--why", cwd=tmp_path)
    told = [line.split() for line in done.stdout.splitlines() if len(line.split()) > 2 and line[0] != " "]
    rows = {name: rest for name, *rest in told}
    settings = ("workers", "prefetch", "pin_memory", "persistent_workers", "dynamic_padding")
    assert [rows[name][0] for name in settings] == ["4", "3", "off", "on", "on"]
    assert all(len(rows[name]) > 3 for name in settings)
    for word in ("--persistent-workers", "--use-dynamic-padding"):
        assert f"{word} has no effect: it is always so here" in done.stderr
    as_json = json.loads(launch("plan", "--task", RAGGED, "--json", cwd=tmp_path).stdout)
    assert as_json["loader"]["dynamic_padding"]["value"] is True


LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
LLAMA |= {"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096}


def assumed(model: str, *more: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Planned where no hub can be reached and none of its files is here, by a command that needs no torch."""
    words = ["plan", "--task", "causal-lm", "--model", model, "--assume-length", "512", "--json", *more]
    return command(own_command(*words), cwd, HF_HOME=str(cwd / "hub"), HF_HUB_OFFLINE="1")


def test_a_config_alone_is_planned_for_with_its_own_vocabulary(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    models = (str(folder), "Llama-2-7b-hf")
    found = [assumed(model, "--hardware", "8xh100", cwd=tmp_path) for model in models]
    assert [done.returncode for done in found] == [0, 0], found[0].stderr + found[1].stderr
    one, other = (json.loads(done.stdout)["plan"] for done in found)
    assert one["strategy"] == "zero3"
    assert one == other


def test_a_name_alone_is_enough_for_adapters(tmp_path: Path) -> None:
    done = assumed("Qwen2.5-0.5B", "--adapter", "lora", "--hardware", "rtx4090", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lora of rank 8 on 24 q_proj, 24 v_proj" in json.loads(done.stdout)["reasons"]["strategy"]


GPT2 = ("plan", "--task", "causal-lm", "--model", "gpt2-124m", "--assume-length", "256", "--batch-size", "8")


def test_machines_side_by_side(tmp_path: Path) -> None:
    names = "rtx4080-laptop,8xa100-80gb,4x8xh100,t4,cpu:2x24gb"
    began = time.monotonic()
    prices = "t4=1,h100=3,a100-80gb=2,rtx4080-laptop=1"
    words = ["--compare", names, "--price", prices, "--deadline", "2h", "--json"]
    done = launch(*GPT2, *words, cwd=tmp_path)
    assert time.monotonic() - began < 10
    found = json.loads(done.stdout)["machines"]
    assert ",".join(row["name"] for row in found["rows"]) == names
    priced = [row for row in found["rows"] if row["cost"] and row["meets_deadline"]]
    cheapest = min(priced, key=lambda row: row["cost"])
    assert found["cheapest"] == cheapest["name"]
    assert found["rows"][4]["meets_deadline"] is False
