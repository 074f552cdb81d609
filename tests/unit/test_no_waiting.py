"""A training step makes the host wait for nothing: operations that would wait for a GPU, counted.

Counted on a CPU by what reaches the dispatcher: reading a number, and operations whose result's size only the
device knows. Copies from ordinary memory also wait on a GPU, and a CPU does not show them: HostCopy and
device_copies.py make all small ones.
"""

from __future__ import annotations

import collections
import contextlib
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import isobatch
from isobatch.core.package import ROOT
from isobatch.engine.loading.device_copies import HostCopy
from isobatch.engine.strategies.replicated import ReplicatedStrategy
from isobatch.engine.train import loop
from isobatch.engine.train.hooks import Hooks
from isobatch.engine.train.state import Training
from isobatch.models import attention_functions
from isobatch.tests.unit.helpers import small_demos

READS = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal.")
SIZES = ("aten.nonzero.", "aten.masked_select", "aten._unique", "aten.unique")
INDEXES = ("aten.index.Tensor", "aten.index_put", "aten._index_put", "aten._unsafe_index")
FIRST = 3
"""Steps that are not counted: the first ones check the loss and find out what the model does."""


class Waits(TorchDispatchMode):
    """Counts the operations by place while `counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = False
        self.found: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        by_mask = name.startswith(INDEXES) and any(
            isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        if self.counting and (by_mask or name.startswith((*READS, *SIZES))):
            self.found[f"{name} at {_place()}"] += 1
        return func(*args, **(kwargs or {}))


def _place() -> str:
    ours = [f for f in traceback.extract_stack() if str(ROOT) in f.filename and ".venv" not in f.filename]
    inside = [f for f in ours if "test_no_waiting" not in f.filename]
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno}" if inside else "elsewhere"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Counts within steps and the reading of their metrics, and what is turned into lists there."""
    found = Waits()

    def counted(function: Any) -> Any:
        def call(first: Any, *arguments: Any) -> Any:
            loaded = [getattr(one, "loaded", one) for one in arguments]  # a batch, or a step's output
            steps = [one.work.step for one in loaded if hasattr(one, "work")]
            before, found.counting = found.counting, bool(steps) and steps[0] >= FIRST
            begins = found.counting and not before  # what runs beside these steps is not slowed
            try:
                with found if begins else contextlib.nullcontext():
                    return function(first, *arguments)
            finally:
                found.counting = before

        return call

    def uncounted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            before, found.counting = found.counting, False
            try:
                return function(*arguments)
            finally:
                found.counting = before

        return call

    to_list = torch.Tensor.tolist

    def listed(self: torch.Tensor) -> Any:
        if found.counting:
            found.found[f"tolist at {_place()}"] += 1
        return to_list(self)

    monkeypatch.setattr(loop, "train_step", counted(loop.train_step))
    monkeypatch.setattr(Hooks, "figures", counted(Hooks.figures))
    monkeypatch.setattr(HostCopy, "read", uncounted(HostCopy.read))
    # Of a task that changes its model, which reads what it decides by.
    monkeypatch.setattr(Training, "after_step", uncounted(Training.after_step))
    monkeypatch.setattr(attention_functions, "answers_late", lambda _: True)
    # Only on a CPU are gradients of embeddings sparse, which torch's own padding index filters by a mask.
    use_sparse = ReplicatedStrategy._use_sparse_gradients  # noqa: SLF001
    monkeypatch.setattr(ReplicatedStrategy, "_use_sparse_gradients", lambda own, _: use_sparse(own, False))
    monkeypatch.setattr(torch.Tensor, "tolist", listed)
    return found


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("causal-lm", {"dropout": 0.1}),
        pytest.param("dpo", {}, marks=pytest.mark.slow),
        ("classifier", {}),
        ("sequence-vae", {"hidden": 16, "monitor_every": 4}),
    ],
)
def test_a_step_waits_for_nothing(task: str, words: dict[str, Any], waits: Waits, tmp_path: Path) -> None:
    recipe = isobatch.Recipe(task, steps=8, **words)
    with small_demos(tmp_path / "cache"):
        isobatch.train(recipe, out=str(tmp_path / "runs"), quiet=True, device="cpu", processes=1)
    assert not waits.found, "\n".join(f"{n} {place}" for place, n in waits.found.items())
