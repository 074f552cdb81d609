"""Tests of models/fused_kernels.py: without a compiler the same numbers come unfused, and a line says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from isobatch.models import fused_kernels

if TYPE_CHECKING:
    from pathlib import Path


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_no_compiler_falls_back_to_the_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """has_triton() says yes where there is no C compiler; the first compilation then fails."""
    monkeypatch.setattr(fused_kernels, "has_triton", lambda _: True)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (str(tmp_path / "no-compiler"),))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch.compiler.reset()
    function = fused_kernels.fused_on_gpu(doubled)
    for size in (3, 5):
        assert torch.equal(function(torch.ones(size)), torch.full((size,), 2.0))
    assert "cannot compile here" in (said := fused_kernels.take_failure())
    assert "\n" not in said
    assert not fused_kernels.take_failure()  # said once


def test_an_error_of_the_arguments_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_kernels, "has_triton", lambda _: True)
    function = fused_kernels.fused_on_gpu(torch.mm)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        function(torch.ones(2, 3), torch.ones(2, 3))
    assert not fused_kernels.take_failure()


def test_a_cpu_is_never_asked_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", pytest.fail)
    assert fused_kernels.fused_on_gpu(doubled)(torch.ones(1)) == 2
