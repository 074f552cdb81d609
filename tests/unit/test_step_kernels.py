"""What a step of each workload asks of a device: to change tests/unit/step_kernels.csv is a decision.

Counted on a CPU in a second step, of one micro-batch under bf16 autocast: operations that compute (`forward`,
`backward`, `optimizer`), those of the passes that give tables of fp32, and those for whose answer a host
would wait. What is one kernel on a GPU (models/fused_kernels.py) is several here.
"""

from __future__ import annotations

import contextlib
import csv
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.utils._python_dispatch import TorchDispatchMode

from isobatch.benchmarks.gpu.roofline import FREE, WAITS, tensors_in
from isobatch.benchmarks.quality.strategies import builder_of
from isobatch.engine.train.hooks import Hooks
from isobatch.engine.train.loop import run_phase
from isobatch.models import attention_functions
from isobatch.tests.paths import ROOT
from isobatch.tests.tiny_models import build
from isobatch.tests.unit.helpers import small_demos

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TABLE = ROOT / "tests" / "unit" / "step_kernels.csv"
WANTED = {row.pop("workload"): row for row in csv.DictReader(TABLE.read_text().splitlines())}
FLAGS: dict[str, dict[str, Any]] = {
    "causal-lm": {"model": "gpt2"},
    "dpo": {"model": "gpt2"},
    "kto": {"model": "gpt2"},
    "qat": {"model": "bert"},
    "recommender": {"preset": "sequence"},
    "sequence-vae": {},
}


class Kernels(TorchDispatchMode):
    """Counts by the part of the step that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.name = "host"

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        before, self.name = self.name, name
        yield
        self.name = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = func.__name__.partition(".")[0], func(*args, **(kwargs or {}))
        self.counts["waits"] += name in WAITS
        if name not in FREE:
            self.counts[self.name] += 1
            wide = any(t.dtype == torch.float32 and t.ndim > 1 for t in tensors_in(out))
            self.counts["fp32"] += wide and self.name in ("forward", "backward")
        return out


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    build(str(folder))
    AcceleratorState._reset_state()  # noqa: SLF001  a process has one, and other tests' is in fp32
    with small_demos(folder / "cache"):
        yield folder
    AcceleratorState._reset_state()  # noqa: SLF001


@pytest.mark.parametrize("workload", FLAGS)
def test_a_step_asks_no_more_of_a_device(
    workload: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_functions, "answers_late", lambda _: True)  # as on a GPU
    flags = {"steps": [3], "batch_size": 4, **FLAGS[workload]}
    if "model" in flags:
        flags["model"] = str(models / flags["model"])
    builder = builder_of(
        workload, flags, {}, precision="bf16", micro_batch_samples=4, micro_batch_tokens=10**6
    )
    kernels = Kernels()
    with builder, builder.phase(builder.schedules[0]) as state:
        run_phase(state, Hooks(), 0, 1)
        state.world.recorder.part = kernels.part
        with kernels:
            run_phase(state, Hooks(), 1, 2)
    assert {name: str(kernels.counts[name]) for name in WANTED[workload]} == WANTED[workload]
