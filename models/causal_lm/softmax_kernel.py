"""Softmax minus one-hot of a head's logits as one Triton kernel, which reads and writes a card's memory once.

It reads a row twice, the second time from the card's cache. Sums are in fp32 whatever the logits are in: the
running maximum and sum of Milakov & Gimelshein 2018.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 32
"""Columns that a program of the kernel holds at a time, and its warps: two programs fill a multiprocessor, so
that an H100 has 264 rows at work. Of 50,304 logits in 16 bits these are 27 MB, and its cache has 50."""


def softmax_errors(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(n, V) logits, (n, 1) targets -> sum of -log p in fp32, and (n, V) softmax - one-hot in `dtype`.

    The errors take the place of logits that are in `dtype`.
    """
    losses = torch.empty(len(logits), device=logits.device)
    errors = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    _one_row[(len(logits),)](logits, targets, losses, errors, logits.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return losses.sum(), errors


@triton.jit  # which compiles no function whose annotations name anything but Triton's own
def _one_row(logits, targets, losses, errors, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * width
    errors += row * width
    of_target = tl.load(logits + target).to(tl.float32)
    most, total = float("-inf"), 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, columns < width, float("-inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        larger = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(x - larger), 0)
        most = larger
    log_sum = most + tl.log(total)
    tl.store(losses + row, log_sum - of_target)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, columns < width, float("-inf"), eviction_policy="evict_first")
        x = x.to(tl.float32)
        error = tl.exp(x - log_sum) - (columns == target).to(tl.float32)
        tl.store(errors + columns, error.to(errors.dtype.element_ty), mask=columns < width)
