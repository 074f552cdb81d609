"""Tests of models/causal_lm/softmax_kernel.py without a GPU: interpreted, and compiled for a card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import itertools, torch
from isobatch.models.causal_lm import softmax_kernel
from isobatch.models.causal_lm.chunked_cross_entropy import _errors_in_place

softmax_kernel.BLOCK = 128
draw = torch.Generator().manual_seed(0)
formats = (torch.float32, torch.bfloat16)
for rows, width, logits_in, errors_in in itertools.product((1, 5), (64, 128, 300), formats, formats):
    logits = (torch.randn(rows, width, generator=draw) * 9).to(logits_in)
    logits[:, width - 7 :] = float("-inf")  # columns that only fill up the vocabulary
    targets = torch.randint(width - 7, (rows, 1), generator=draw)
    whole = _errors_in_place(logits.float(), targets, torch.float32)
    nll, errors = softmax_kernel.softmax_errors(logits, targets, errors_in)
    assert errors.dtype == errors_in and nll.dtype == torch.float32
    assert (errors is logits) == (logits_in == errors_in)
    assert torch.allclose(nll, whole[0], rtol=1e-6), (nll, whole[0])
    assert torch.allclose(errors.float(), whole[1], atol=1e-6, rtol=0 if errors_in == formats[0] else 2**-7)
    assert not errors[:, width - 7 :].any()
print("all right")
"""


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from isobatch.models.causal_lm.softmax_kernel import BLOCK, WARPS, _one_row

for logits in ("*bf16", "*fp32"):
    types = {"logits": logits, "targets": "*i64", "losses": "*fp32", "errors": "*bf16", "width": "i32"}
    source = ASTSource(_one_row, {**types, "BLOCK": "constexpr"}, {"BLOCK": BLOCK})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    assert made.asm["ptx"].count("createpolicy.fractional.L2::evict_last") == 1
print("all right")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux")
@pytest.mark.parametrize(("program", "interpret"), [(PROGRAM, "1"), (COMPILE, "0")])
def test_the_kernel_computes_what_the_passes_do(program: str, interpret: str, tmp_path: Path) -> None:
    """Over widths below, at and beyond a block, and every pair of number formats; and compiles for a card,
    anew, as Triton keeps what it compiled: its loads ask the card's cache to keep what is read again.
    """
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.stdout == "all right\n", ran.stderr
