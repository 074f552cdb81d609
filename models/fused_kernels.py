"""Functions that torch fuses into one kernel on a GPU, and that run unfused where it cannot compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_failures: list[str] = []


def take_failure() -> str:
    """Why functions run unfused in this process, once, for the user; empty where none has failed."""
    return _failures.pop() if _failures else ""


class fused_on_gpu:
    """`formula` as one kernel on CUDA tensors: torch compiles it, or it `is_kernel` already, in Triton.

    `unfused` computes the same where there is no compiler. Inside a compiled model the formula becomes part
    of the model's own kernels.
    """

    def __init__(
        self, formula: Callable[..., Any], unfused: Callable[..., Any] | None = None, is_kernel: bool = False
    ) -> None:
        self.formula, self.unfused, self.is_kernel = formula, unfused or formula, is_kernel
        self._chosen: Callable[..., Any] | None = None

    def __call__(self, first: torch.Tensor, *others: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.formula(first, *others)
        if self._chosen is None and has_triton(first.device):
            self._chosen = self.formula if self.is_kernel else torch.compile(self.formula, dynamic=True)
        if self._chosen is None or self._chosen is self.unfused:
            return self.unfused(first, *others)
        try:
            return self._chosen(first, *others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers fail in many ways: none installed, no Python.h, a full disk
            found = self.unfused(first, *others)  # an error of the arguments is raised again here
            self._chosen = self.unfused
            reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)[:200]
            _failures[:] = [f"torch cannot compile here, so some steps are slower: {reason}"]
            return found


def has_triton(device: torch.device) -> bool:
    """Whether torch can make kernels for this device, as far as is known without trying."""
    from torch.utils._triton import has_triton as installed

    return device.type == "cuda" and installed()
