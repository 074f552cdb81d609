"""Tests of engine/machine/ceilings.py: the measured rates that plans rest on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from isobatch.engine.machine import ceilings
from isobatch.engine.machine.ceilings import WIDTHS, Ceilings
from isobatch.engine.machine.hardware import Hardware
from isobatch.engine.planning.calibration import typical_ceilings

if TYPE_CHECKING:
    from pathlib import Path

HERE = Hardware(kind="cpu", cpus=2, ram_bytes=24 * 2**30, source="detected")


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
    again = ceilings.ceilings_of(HERE, tmp_path)
    assert again is not None
    assert [again.matmul_rate(w) for w in WIDTHS] == [rates.matmul_rate(w) for w in WIDTHS]
    assert (again.gelu, again.call_seconds) == (rates.gelu, rates.call_seconds)
    assert len(calls) == 1
    assert ceilings.ceilings_of(dataclasses.replace(HERE, cpus=4), tmp_path) == rates, "other cores"
    assert len(calls) == 2
    assert ceilings.ceilings_of(dataclasses.replace(HERE, source="asked"), tmp_path) is None


@pytest.mark.parametrize("text", ["", "{}", '{"matmul": [1]}', "[1, 2]", "null"])
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
