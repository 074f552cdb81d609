"""What the modules of a model computed in a step, by sample: activations and their gradients.

Of each output two numbers a sample: its norm, and its product with fixed random signs. The product moves with
the output's direction too, by about the norm of the change, so that two outputs of one norm are told apart.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNS_SEED = 20
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True, eq=False)
class ModuleOutput:
    """One output of a module over the global batch, or its gradient."""

    module: str
    """Its name in the model; `NAME#2` where it is called a second time."""
    direction: str
    """FORWARD, or BACKWARD for the gradient."""
    norms: np.ndarray
    """(n,) fp64: of each sample of the global batch; one in all where rows are not samples."""
    products: np.ndarray
    """(n,) fp64: with the signs."""

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.norms).all())


class ModuleRecorder:
    """Hooks on all modules of a model while a step runs; `bind` says which samples a micro-batch has."""

    def __init__(self, samples: int, rows_per_sample: int = 1) -> None:
        """`samples` of the global batch."""
        self.samples, self.rows_per_sample = samples, rows_per_sample
        self._places: np.ndarray | None = None
        self._seen: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
        """(name, direction) -> (places, figures (2, rows)) of each micro-batch."""
        self._calls: dict[str, int] = {}
        self._signs: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Record what the model's modules compute within."""
        modules = [(name, module) for name, module in model.named_modules() if name]
        handles = [m.register_forward_hook(partial(self._record_output, name)) for name, m in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def bind(self, places: np.ndarray | None) -> None:
        """The places in the global batch of the next forward pass; None: it is not recorded."""
        self._places, self._calls = places, {}

    def outputs(self, direction: str) -> list[ModuleOutput]:
        """All outputs, in the order in which they were first computed."""
        return [self._joined(*key) for key in self._seen if key[1] == direction]

    def _record_output(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensor = _first_tensor(output)
        if tensor is None or self._places is None:
            return
        self._calls[name] = call = self._calls.get(name, 0) + 1
        key = name if call == 1 else f"{name}#{call}"
        self._add(key, FORWARD, self._places, tensor.detach())
        if tensor.requires_grad:
            tensor.register_hook(partial(self._add, key, BACKWARD, self._places))

    def _add(self, name: str, direction: str, places: np.ndarray, tensor: Tensor) -> None:
        by_sample = tensor.ndim > 0 and tensor.shape[0] == len(places) * self.rows_per_sample
        rows = tensor.detach().reshape(len(places) if by_sample and len(places) else 1, -1).float()
        figures = torch.stack([torch.linalg.vector_norm(rows, dim=1), rows @ self._signs_like(rows)])
        known = places if by_sample else np.zeros(0, np.int64)
        self._seen.setdefault((name, direction), []).append((known, figures.double().cpu().numpy()))

    def _signs_like(self, rows: Tensor) -> Tensor:
        """(width,) of +1 and -1, always the same for a width."""
        width = rows.shape[1]
        if width not in self._signs:
            generator = torch.Generator().manual_seed(SIGNS_SEED)
            signs = torch.randint(0, 2, (width,), generator=generator, dtype=torch.int8)
            self._signs[width] = (2 * signs - 1).to(rows.device, torch.float32)
        return self._signs[width]

    def _joined(self, name: str, direction: str) -> ModuleOutput:
        seen = self._seen[name, direction]
        places = np.concatenate([places for places, _ in seen])
        figures = np.concatenate([figures for _, figures in seen], axis=1)
        if len(places) == figures.shape[1] == self.samples:
            ordered = np.zeros((2, self.samples))
            ordered[:, places] = figures
            return ModuleOutput(name, direction, *ordered)
        norm = np.sqrt(np.square(figures[0]).sum(keepdims=True))
        return ModuleOutput(name, direction, norm, figures[1].sum(keepdims=True))


def _first_tensor(output: Any) -> Tensor | None:
    """The first tensor of floats in what a module returns."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.numel() else None
    if isinstance(output, dict):
        output = list(output.values())
    if not isinstance(output, tuple | list):
        return None
    return next((t for t in map(_first_tensor, output) if t is not None), None)
