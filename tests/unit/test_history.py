"""Tests of engine/machine/ceilings.py and engine/planning/calibration.py, which correct plans."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from isobatch.core.facts import Facts
from isobatch.core.plan import Plan, PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.machine import ceilings
from isobatch.engine.machine.ceilings import WIDTHS, Ceilings
from isobatch.engine.machine.core_wait import DISTURBED, CoreWait
from isobatch.engine.machine.hardware import Hardware
from isobatch.engine.planning import calibration
from isobatch.engine.planning.calibration import (
    MachineRecord,
    Measured,
    RunHistory,
    measured_run,
    typical_ceilings,
)
from isobatch.engine.planning.memory_model import CONTEXT_BYTES
from isobatch.engine.planning.planner import make_plan
from isobatch.models.base import ModelSize

HERE = Hardware(kind="cpu", cpus=2, ram_bytes=24 * 2**30, source="detected")
FACTS = Facts(fingerprint="x", folder="", samples={"train": 1000}, lengths=(32, 64, 128))
SIZE = ModelSize(
    parameters=10_000_000, trainable=10_000_000, layers=4, hidden=256, heads=4, intermediate=1024
)


def plan(record: MachineRecord | None = None, size: ModelSize = SIZE, **options: Any) -> Plan:
    recipe = Recipe(task="causal-lm", batch_size=16, max_length=128)
    return make_plan(recipe, FACTS, size, HERE, PlanOptions(**options), measured=record)


def row(**changes: Any) -> Measured:
    values = {"key": "a", "kind": "k", "size": 1e9, "memory": 1.2, "seconds": 0.8}
    return Measured(**(values | changes))


def test_ceilings_are_measured_once_and_read_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = dataclasses.replace(typical_ceilings(2), call_seconds=5e-6)
    calls: list[Hardware] = []

    def measure(hardware: Hardware) -> Ceilings:
        calls.append(hardware)
        return rates

    monkeypatch.setattr(ceilings, "measure", measure)
    assert ceilings.ceilings_of(HERE, tmp_path) == rates
    assert ceilings.ceilings_of(HERE, tmp_path) == rates
    assert len(calls) == 1
    assert ceilings.ceilings_of(dataclasses.replace(HERE, cpus=4), tmp_path) == rates, "other cores"
    assert len(calls) == 2
    assert ceilings.ceilings_of(dataclasses.replace(HERE, source="asked"), tmp_path) is None


def test_disturbed_rates_are_measured_again_later_and_the_best_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typical = typical_ceilings(2)
    slow = dataclasses.replace(typical, gelu=typical.gelu / 3, call_seconds=1.0, waited=0.4)
    mixed = dataclasses.replace(slow, gelu=2 * typical.gelu, adamw=1.0, waited=0.2)
    found = iter([slow, mixed, typical])
    monkeypatch.setattr(ceilings, "measure", lambda _: next(found))
    assert ceilings.ceilings_of(HERE, tmp_path) == slow
    assert ceilings.ceilings_of(HERE, tmp_path) == slow, "not at once"
    file = next(tmp_path.iterdir())

    def later() -> Ceilings | None:
        os.utime(file, (0, 0))
        return ceilings.ceilings_of(HERE, tmp_path)

    best = dataclasses.replace(slow, gelu=2 * typical.gelu, waited=0.2)
    assert later() == best
    assert later() == dataclasses.replace(typical, gelu=2 * typical.gelu)
    assert later() is not None, "kept from now on: there is no fourth measurement"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no such account")
def test_other_programs_are_noticed() -> None:
    """Threads that share one core wait for each other as they would for other programs."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        wait = CoreWait()
        threads = [threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 300_000))
                   for _ in range(2)]  # fmt: skip
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        share = wait.share()
        for thread in threads:
            thread.join()
    finally:
        os.sched_setaffinity(0, cores)
    assert share > DISTURBED


@pytest.mark.parametrize("text", ["", "{}", '{"matmul": [1], "matmul_bf16": [1]}', "[1, 2]", "null"])
def test_a_damaged_file_is_measured_anew(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = typical_ceilings(2)
    monkeypatch.setattr(ceilings, "measure", lambda _: rates)
    ceilings.ceilings_of(HERE, tmp_path)
    file = next(tmp_path.iterdir())
    file.write_text(text)
    assert ceilings.ceilings_of(HERE, tmp_path) == rates


def test_rates_between_the_measured_widths() -> None:
    rates = dataclasses.replace(typical_ceilings(1), matmul=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert [rates.matmul_rate(width) for width in WIDTHS] == [1, 2, 3, 4, 5]
    assert rates.matmul_rate(8) == 1
    assert rates.matmul_rate(9999) == 5
    assert 2 < rates.matmul_rate(180) < 3


@pytest.mark.slow
def test_the_real_ceilings_of_this_machine() -> None:
    """Plausible ones: within a factor of 30 of a typical core's, whatever else runs here."""
    found, typical = ceilings.measure(HERE), typical_ceilings(2)
    for name in ("bandwidth", "cached_bandwidth", "gelu", "adamw"):
        assert 1 / 30 < getattr(found, name) / getattr(typical, name) < 30, name


def test_the_same_run_counts_before_its_kind_and_the_newest_before_the_others() -> None:
    found = RunHistory(
        (
            row(memory=1.5),
            row(),
            row(key="b", memory=3.0),
        )
    )
    assert found.correction("a", "k", 1e9).memory == 1.2
    assert "the same run" in found.correction("a", "k", 1e9).basis
    assert found.correction("c", "k", 1e9).memory == pytest.approx((1.2 + 3.0) / 2)
    assert "2 runs of this kind" in found.correction("c", "k", 1e9).basis
    assert found.correction("c", "other", 1e9) == calibration.Correction()


def test_of_a_kind_the_nearest_in_size_count() -> None:
    small = [row(key=f"s{i}", size=1e6, memory=2.0) for i in range(9)]
    large = [row(key=f"l{i}", size=1e9, memory=1.1) for i in range(5)]
    found = RunHistory((*small, *large))
    assert found.correction("new", "k", 2e9).memory == 1.1
    assert found.correction("new", "k", 1e5).memory == 2.0


def test_a_file_keeps_runs_and_leaves_out_what_cannot_be_true(tmp_path: Path) -> None:
    file = tmp_path / "new" / "history.jsonl"
    calibration.append(file, row())
    calibration.append(file, row(seconds=50.0))
    with file.open("a") as lines:
        lines.write('{"key": 1}\nnot json\n{"key":"a","kind":"k","size":-1,"memory":1,"seconds":1}\n')
    assert RunHistory.read(file).rows == (row(),)
    assert RunHistory.read(tmp_path / "none").rows == ()


def test_what_a_run_took_becomes_the_next_prediction() -> None:
    """Also where the first plan was corrected already: factors multiply the uncorrected prediction."""
    first = plan()
    peak = round(CONTEXT_BYTES["cpu"] + 1.3 * (first.predicted_peak_memory_bytes - CONTEXT_BYTES["cpu"]))
    seconds = 0.5 * first.predicted_step_seconds
    ran = measured_run(first, peak, seconds)
    assert ran is not None
    assert (ran.memory, ran.seconds) == (pytest.approx(1.3), pytest.approx(0.5))
    second = plan(MachineRecord(history=RunHistory((ran,))))
    assert second.predicted_peak_memory_bytes == pytest.approx(peak, rel=1e-6)
    assert second.predicted_step_seconds == pytest.approx(seconds)
    assert "the same run" in second.reasons["predicted_step_seconds"]
    again = measured_run(second, peak, seconds)
    assert again is not None
    assert (again.memory, again.seconds) == (pytest.approx(1.3), pytest.approx(0.5))
    other = plan(MachineRecord(history=RunHistory((ran,))), dataclasses.replace(SIZE, hidden=512))
    assert "of this kind" in other.reasons["predicted_step_seconds"]


def test_steps_that_other_programs_disturbed_correct_no_time() -> None:
    first = plan(MachineRecord(history=RunHistory((row(key="b", kind=plan().correction["kind"]),))))
    ran = measured_run(first, 2 * first.predicted_peak_memory_bytes, None)
    assert ran is not None
    assert ran.seconds == pytest.approx(first.correction["seconds"])
    slow = MachineRecord(ceilings=dataclasses.replace(typical_ceilings(2), waited=0.3))
    disturbed = measured_run(plan(slow), 10**9, 100.0)
    assert disturbed is not None
    assert disturbed.seconds == pytest.approx(1.0)
    assert "other programs held 30%" in plan(slow).reasons["predicted_step_seconds"]


def test_a_run_that_took_more_memory_than_predicted_gets_a_smaller_micro_batch() -> None:
    limit = f"{1.4 * plan().predicted_peak_memory_bytes / 1e9}GB"
    first = plan(memory_limit=limit, micro_batch=16)
    ran = measured_run(first, round(1.45 * first.predicted_peak_memory_bytes), first.predicted_step_seconds)
    assert ran is not None
    second = plan(MachineRecord(history=RunHistory((ran,))), memory_limit=limit, micro_batch=16)
    assert second.micro_batch_tokens < first.micro_batch_tokens
    assert second.predicted_peak_memory_bytes <= float(limit[:-2]) * 1e9


def test_a_machine_that_is_only_named_has_no_record(tmp_path: Path) -> None:
    assert calibration.machine_record(dataclasses.replace(HERE, source="asked"), tmp_path) == MachineRecord()
    assert list(tmp_path.iterdir()) == []
