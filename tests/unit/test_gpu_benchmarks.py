"""`make gpu` without a GPU: trials that end badly, what is resumed, and figures of traces and rows."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch._inductor import config as inductor
from torch.fx.experimental.proxy_tensor import make_fx

from isobatch.benchmarks import child_process
from isobatch.benchmarks.gpu import command, runner, runs
from isobatch.benchmarks.gpu.calibration import CEILINGS, calibration
from isobatch.benchmarks.gpu.profiler import STEP, trace_figures
from isobatch.benchmarks.gpu.roofline import Kernels, pretended_card
from isobatch.benchmarks.gpu.runner import GPU, Part, Results, Trial, run_part
from isobatch.core.facts import Facts
from isobatch.core.recipe import Recipe
from isobatch.engine.machine.hardware import parse_hardware
from isobatch.engine.model_setup.gpu_graphs import SumsWithinSamples
from isobatch.engine.planning.calibration import MEASURED, GpuConstants
from isobatch.engine.planning.cost_model import PlanningCase, step_seconds
from isobatch.engine.planning.memory_model import ExecutionChoices
from isobatch.models.causal_lm import model_sizes
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.benchmarks.report import Row

REAL_CALL = child_process.call


def part(*trials: Trial, seconds: int = 100) -> Part:
    return Part("some", lambda quick: trials, lambda rows: f"{len(rows)} rows", seconds)


def results(folder: Path) -> Results:
    return Results(folder / "found.json", {"device": "here"})


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places that were called; `bad` fails."""
    made: list[str] = []

    def call(place: str, *_: str, **__: Any) -> Row:
        made.append(place)
        if place == "bad":
            raise RuntimeError("bad failed with 1:\nTraceback\nValueError: no luck")
        return {"tokens/s": 5}

    monkeypatch.setattr(child_process, "call", call)
    return made


def test_a_trial_that_fails_ends_no_part(tmp_path: Path) -> None:
    trials = [Trial("a", "bad", needs=()), Trial("b", "good", needs=()), Trial("c", "good", needs=(GPU,))]
    rows = run_part("1", part(*trials), results(tmp_path), True, False, has_gpu=False)
    assert [row["outcome"] for row in rows] == ["failed", "done", "skipped"]
    assert rows[0]["why"] == "bad failed with 1: ValueError: no luck"
    assert rows[2]["why"] == "needs a GPU"
    assert command.summary(rows, part()) == {
        "done": "1/3",
        "failed": 1,
        "came to": "1 rows; a: bad failed with 1: ValueError: no luck; skipped: needs a GPU",
    }


def test_what_is_there_is_not_run_again(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `two` is added only it runs; where asked both do; a row of older code stays, and says so."""
    one, two = Trial("one", "good", needs=()), Trial("two", "good", needs=())
    run_part("1", part(one), results(tmp_path), False, False, True)
    rows = run_part("1", part(one, two), results(tmp_path), False, False, True)
    assert ([row["trial"] for row in rows], len(calls)) == (["one", "two"], 2)
    run_part("1", part(one, two), results(tmp_path), False, True, True)
    assert len(calls) == 4
    monkeypatch.setattr(runner, "code_hash", lambda: "other")
    three = Trial("three", "good", needs=())
    rows = run_part("1", part(one, two, three), results(tmp_path), False, False, True)
    assert (calls, [row.get("from") for row in rows]) == (["good"] * 5, ["older code", "older code", None])
    assert "2 rows of older code" in command.summary(rows, part())["came to"]


def test_a_part_has_its_time_once_however_often_it_is_called(tmp_path: Path, calls: list[str]) -> None:
    """What is left out then is run where all parts were through and time is left."""
    trials = [Trial("a", "good", needs=()), Trial("b", "good", needs=())]
    run_part("1", part(trials[0]), results(tmp_path), False, False, True)
    kept = results(tmp_path)
    kept.parts["1"][0]["seconds"] = 90
    rows = run_part("1", part(*trials, seconds=100), kept, False, False, True)
    assert [row["outcome"] for row in rows] == ["done", "not run"]
    rows = run_part("1", part(*trials, seconds=100), kept, False, False, True, capped=False)
    assert ([row["outcome"] for row in rows], len(calls)) == (["done", "done"], 2)


def test_a_trial_that_the_end_cuts_is_not_run_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grandchild has a session of its own, and its parent is gone before the trial is killed."""
    monkeypatch.setattr(child_process, "call", REAL_CALL)
    monkeypatch.setattr(runner, "LEAST_SECONDS", 0.0)
    start = (
        "import subprocess, time; subprocess.Popen(['sh', '-c', 'sleep 27.1828 &'], start_new_session=True)"
    )
    monkeypatch.setattr(child_process, "command", lambda *_: ["-c", f"{start}; time.sleep(60)"])
    rows = run_part("1", part(Trial("a", "slow", needs=()), seconds=3), results(tmp_path), False, False, True)
    assert [row["outcome"] for row in rows] == ["not run"]
    assert not [p for p in psutil.process_iter(["cmdline"]) if "27.1828" in (p.info["cmdline"] or [])]


def kernel(name: str, ts: float, dur: float, correlation: int) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def launched(ts: float, correlation: int) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "ts": ts, "dur": 1, "args": {"correlation": correlation}}


def test_a_trace_tells_kernel_share_and_idle() -> None:
    """Two steps, launched at 0 to 10 and 10 to 20 us. Work: 100-140, 140-160 | 200-240, 230-260.

    Busy 130 us of kernels that cover 120 of the 160 us, 40 of them between the steps.
    """
    steps = [{"cat": "user_annotation", "name": STEP, "ts": ts, "dur": 9.0} for ts in (0.0, 10.0)]
    work = [
        kernel("void flash_fwd_kernel<float, 3>(x)", 100, 40, 1),
        kernel("gemm", 140, 20, 2),
        kernel("void flash_bwd_kernel<int>(y)", 200, 40, 3),
        kernel("gemm", 230, 30, 4),
    ]
    calls = [launched(1, 1), launched(2, 2), launched(11, 3), launched(12, 4)]
    assert trace_figures([*steps, *calls, *reversed(work)]) == {
        "attention": "flash_fwd_kernel",
        "its share": round(80 / 130, 3),
        "idle": 0.25,
        "idle between steps ms": 0.04,
        "kernels a step": 2,
        "longest kernel": "gemm",
    }


def test_constants_come_from_the_rows_that_were_measured() -> None:
    """Rows as the planner predicts them for given constants give these constants back."""
    given = GpuConstants(matmul_share=0.7, traffic=6.0, compiled_traffic=2.5, compiled_launch=0.3)
    size = model_sizes.size_from_config(model_sizes.PRESETS["gpt2-124m"].config(50257, 1024))
    assert size is not None
    card = parse_hardware("h100")
    facts = Facts(fingerprint="", folder="", samples={"train": 32}, lengths=(1024,) * 9)

    def tokens_per_second(compiled: bool) -> float:
        recipe = Recipe(task="causal-lm", batch_size=32, max_length=1024)
        case = PlanningCase(
            recipe=recipe,
            facts=facts,
            model_size=size,
            hardware=card,
            device="cuda",
            precision="bf16",
            attention="sdpa",
            compile=compiled,
        )
        choices = ExecutionChoices(device="cuda", precision="bf16")
        return 32 * 1024 / step_seconds(case, choices, 32, 32 * 1024)

    def row(trial: str, **figures: Any) -> Row:
        return {"trial": trial, "outcome": "done", **figures}

    MEASURED["h100"] = given
    try:
        speeds = [tokens_per_second(compiled) for compiled in (False, True)]
    finally:
        del MEASURED["h100"]
    peak, bandwidth = card.gpu.peak_flops["bf16"], card.gpu.memory_bandwidth
    launch = 1e3 * (given.launch_seconds + 12 * given.layer_launch_seconds)
    rows = [
        row(CEILINGS, **{"matmul TFLOP/s": 0.7 * peak / 1e12}),
        row("launches, compile off", **{"micro-batch ms": launch}),
        row("launches, compile on", **{"micro-batch ms": 0.3 * launch}),
        row("gpt2-124m, 8 rows", **{"reserved GB": 4.0, "predicted GB": 5.0}),
        row("gpt2-124m, 32 rows", **{"reserved GB": 13.0, "predicted GB": 11.0, "tokens/s": speeds[0]}),
        row("gpt2-124m, 32 rows, --compile on", **{"tokens/s": speeds[1]}),
    ]
    found = calibration(rows, peak, bandwidth)
    assert found.pop("activations") == 1.5  # 9 GB more in place of 6
    for name, value in found.items():
        assert value == pytest.approx(getattr(given, name), rel=0.02), name
    assert {"matmul_share", "traffic", "compiled_traffic", "compiled_launch"} <= set(found)
    assert calibration([], peak, bandwidth) == {}


def test_energy_is_what_the_counted_steps_took(tmp_path: Path) -> None:
    """Two steps after the first ten, of 100 and 300 W: 400 tokens in 2 s are 200 a second and one a joule."""
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step_seconds": 1.0, "tokens_per_second": 200.0, "power_watts": watts}) + "\n"
            for watts in [5000.0] * runs.WARM + [100.0, 300.0]
        )
    )
    run: Any = SimpleNamespace(metrics=tmp_path / "metrics.jsonl")
    assert runs.speed(run) == {"tokens/s": 200, "MFU": "-", "W": 200, "tokens/J": 1.0}
    assert runs.energy(200.0, []) == {}


def test_a_card_sums_in_the_kernel_that_makes_what_is_summed() -> None:
    """Inductor's kernels for three (16, 256, 512) in fp32, side by side: each is read and written once, and
    all are read again where a sum over rows is not rewritten. A product of (4096, 1536) by (1536, 2) follows.
    """

    def compute(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.cat(parts[:3], 2).view(-1, 1536)
        return rows @ parts[3], rows.sum(0, keepdim=True)

    def moved(rewrite: SumsWithinSamples | None) -> float:
        kernels = Kernels()
        parts = [torch.empty(16, 256, 512) for _ in range(3)]
        graph = make_fx(compute)(*parts, torch.empty(1536, 2))
        with pretended_card(kernels), inductor.patch(post_grad_custom_pre_pass=rewrite):
            kernels.add_graph(graph, 3)
        assert kernels.rows.pop(("forward", "mm"))[:2] == [3, 3.0 * 2 * 4096 * 1536 * 2]
        return sum(row[2] for row in kernels.rows.values()) / 3

    whole = 16 * 256 * 1536 * 4
    assert 2 * whole < moved(SumsWithinSamples()) < 2.01 * whole
    assert 3 * whole < moved(None) < 3.02 * whole


def test_the_lock_names_every_wheel_that_a_borrowed_machine_gets() -> None:
    text = (ROOT / "benchmarks" / "gpu" / "wheels.sh").read_text().replace("\\\n", " ")
    (names,) = re.findall(r"^for name in (.+); do$", text, re.MULTILINE)
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    wanted = {name.replace("_", "-") for name in [*names.split(), "deepspeed"]}
    assert wanted - {name.replace("_", "-") for name in pinned} == set()
    assert "triton" not in pinned, "torch pins its own, where it is not built for CPUs"
