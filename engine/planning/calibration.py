"""What the planner rests on: constants, and what runs on this machine took beside what was predicted.

Constants are measured on CPUs and fitted to published figures for GPUs. A card that was measured has
constants of its own in MEASURED, the one place to fill: a benchmark's result file has them as a row of the
fields of `GpuConstants`. The history is a file of JSON lines per machine. Its figures are ratios of measured
to predicted, so that they hold for other runs of the same kind too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from isobatch.engine.machine.ceilings import Ceilings, ceilings_of, machine_key
from isobatch.engine.planning.memory_model import CONTEXT_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.core.plan import Plan
    from isobatch.engine.machine.hardware import Hardware

TYPICAL_CORE = Ceilings(
    matmul=(19e9, 35e9, 44e9, 47e9, 47e9),
    matmul_bf16=(45e9, 115e9, 180e9, 210e9, 220e9),
    bandwidth=18e9,
    cached_bandwidth=18e9,
    gelu=2.8e8,
    call_seconds=7e-6,
    recurrent_seconds=4e-4,
    adamw=9e8,
    waited=0.0,
)
"""Of a core, for machines that are only named (measured on two cores of an AMD EPYC with AVX512_BF16)."""
EMULATED_BF16 = 0.2
"""Of the fp32 rate, where a processor has no bf16 (measured)."""
CPU_MATMUL_SHARE = 0.85
"""Of the measured rate of products, which has its operands in the caches."""
CPU_TRAFFIC = 8.0
"""How often each byte that the backward pass needs is moved by operations that are no matrix products."""
HALF_CPU_TRAFFIC = 2.0
"""Traffic under autocast over that in fp32, on a CPU: casts cost more than narrow tensors save."""
ROUNDING = 3.0
"""Of a value that a layer rounds, forward and backward, over an element of GELU."""
SOFTMAX = 4.5
"""Of a logit, forward and backward, over an element of GELU."""
RECURRENT_PASSES = 3.0
"""How often a recurrent layer's weights are read for each token of a row, forward and backward."""
KEYED_DRAW = 10.0
"""A keyed draw for dropout, over an element of GELU."""
LAYER_CALLS, MODEL_CALLS, STEP_CALLS = 60.0, 150.0, 700.0
"""Operations of a layer, of the rest of a model, forward and backward, and of a step beside them."""
HOST_CORE_BANDWIDTH, HOST_BANDWIDTH = 5e9, 100e9
"""Bytes/s of a host's memory for a core, and at most: for an update of offloaded state (uncalibrated)."""
HOST_LINK = 12e9
"""Bytes/s between host and GPU over PCIe, layer by layer (uncalibrated; 16 lanes of PCIe 4: 32e9)."""
PAGEABLE_SHARE = 0.4
"""Of HOST_LINK, where a batch is copied from ordinary memory, and the GPU waits for it (uncalibrated)."""
WORKER_BATCH_SECONDS = 1.5e-3
"""To hand a micro-batch from a loader process to the training (measured: 0 to 3e-3)."""
GLOO_BANDWIDTH, GLOO_LATENCY, NCCL_LATENCY = 1e9, 2e-4, 2e-5
"""Bytes/s, seconds, seconds."""
HIDDEN = 0.6
"""Share of an overlapped exchange that runs beside the arithmetic as long as that lasts (uncalibrated)."""
MOBILE_SUSTAINED = 0.8
"""Share of its peak rate that a mobile GPU sustains when warm (uncalibrated)."""
RECURRENT_STEP_SECONDS = 5e-5
"""Forward and backward pass of one token of a recurrent layer on a GPU, however many rows (uncalibrated)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuConstants:
    """What training reaches on a GPU.

    The defaults are fitted to nanoGPT's 250 ms an iteration without and 135 ms with torch.compile on an A100
    (12 rows of 1,024 tokens, attention by separate kernels): `python -m benchmarks published`.
    """

    matmul_share: float = 0.6
    """Of the dense peak, in matrix products."""
    traffic: float = 8.0
    """How often each byte that the backward pass needs is moved by kernels that are no matrix products."""
    compiled_traffic: float = 3.5
    launch_seconds: float = 3e-3
    """Of a micro-batch: the host's work apart from the layers."""
    layer_launch_seconds: float = 1e-3
    """Of a layer's kernels, forward and backward (BERT: 10 to 20 ms in all)."""
    compiled_launch: float = 0.4
    """Share of the launches that is left in a compiled model."""
    compile_seconds: float = 20.0
    """To compile one shape, apart from the layers."""
    layer_compile_seconds: float = 2.0


PUBLISHED = GpuConstants()
MEASURED: dict[str, GpuConstants] = {}
"""Card of the GPU table (`h100`) -> constants measured on it."""


def gpu_constants(card: str | None) -> GpuConstants:
    """The constants of a card of the GPU table, or those fitted to published figures."""
    return MEASURED.get(card or "", PUBLISHED)


def typical_ceilings(cores: int) -> Ceilings:
    """Ceilings of a processor that was not measured: those of a typical core times their number."""
    core = TYPICAL_CORE
    rates = {
        "matmul": tuple(cores * rate for rate in core.matmul),
        "matmul_bf16": tuple(cores * rate for rate in core.matmul_bf16),
        **{name: cores * getattr(core, name) for name in ("bandwidth", "cached_bandwidth", "gelu", "adamw")},
    }
    return dataclasses.replace(core, **rates)


KEPT = 500
"""Newest rows that are read."""
NEIGHBOURS = 5
"""Runs of a kind whose ratios count: those of the nearest size."""
LARGEST_RATIO = 4.0
"""A ratio beyond it tells of a disturbed run, not of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run's measured figures over the uncorrected predictions."""

    key: str
    """Names the recipe's shape and the plan: equal keys take equal memory and time."""
    kind: str
    """Names the kind of run: task, device, precision, strategy."""
    size: float
    """Predicted bytes of the run beside the process itself."""
    memory: float
    """Measured over predicted bytes, both beside the process itself."""
    seconds: float
    """Measured over predicted seconds of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Factors for a prediction, and the runs that they come from."""

    memory: float = 1.0
    seconds: float = 1.0
    basis: str = ""
    """Why; empty where nothing like it has run here."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The measured runs of one machine, oldest first."""

    rows: tuple[Measured, ...] = ()

    @classmethod
    def read(cls, file: Path) -> RunHistory:
        """The rows of a file; none where there is no file, and without those that cannot be read."""
        try:
            lines = file.read_text(errors="replace").splitlines()[-KEPT:]
        except OSError:
            return cls()
        return cls(tuple(row for line in lines if (row := _parse(line)) is not None))

    def correction(self, key: str, kind: str, size: float) -> Correction:
        """The newest run of this key; else the median of the runs of this kind that are nearest in size."""
        if same := [row for row in self.rows if row.key == key]:
            newest = same[-1]
            return Correction(
                memory=newest.memory, seconds=newest.seconds, basis="corrected by the same run here before"
            )
        alike = {row.key: row for row in self.rows if row.kind == kind}.values()
        near = sorted(alike, key=lambda row: abs(math.log(max(row.size, 1.0) / max(size, 1.0))))[:NEIGHBOURS]
        if not near:
            return Correction()
        runs = "a run" if len(near) == 1 else f"{len(near)} runs"
        return Correction(
            memory=median(row.memory for row in near),
            seconds=median(row.seconds for row in near),
            basis=f"corrected by {runs} of this kind here",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRecord:
    """What was measured on a machine."""

    ceilings: Ceilings | None = None
    history: RunHistory = field(default_factory=RunHistory)


def machine_record(hardware: Hardware, folder: Path) -> MachineRecord:
    """What `folder` holds of this machine; its ceilings are measured if they are not there.

    Of a machine that is only named nothing was measured.
    """
    if hardware.source != "detected":
        return MachineRecord()
    history = RunHistory.read(history_file(folder, hardware))
    return MachineRecord(ceilings=ceilings_of(hardware, folder), history=history)


def history_file(folder: Path, hardware: Hardware) -> Path:
    """Where the runs of this machine are kept."""
    return folder / f"history-{machine_key(hardware)}.jsonl"


def append(file: Path, row: Measured) -> None:
    """Add a run, unless its figures are no plausible ones. A folder that cannot be written is left alone."""
    ratios = (row.memory, row.seconds)
    if all(1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO for ratio in ratios):
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                lines.write(json.dumps(dataclasses.asdict(row)) + "\n")


def _parse(line: str) -> Measured | None:
    try:
        values: dict[str, Any] = json.loads(line)
        row = Measured(**values)
        numbers = (row.size, row.memory, row.seconds)
        return row if all(math.isfinite(n) and n > 0 for n in numbers) else None
    except (ValueError, TypeError):
        return None


def measured_run(plan: Plan, peak: int, seconds: float | None) -> Measured | None:
    """The row of a run for the history: its peak bytes and the median seconds of its steps, if they count.

    None where the plan was made without a key, or where the figures are below what the process itself takes.
    Where other programs disturbed the steps, or the rates that predicted them, the old ratio stays.
    """
    if not plan.correction:
        return None
    process = CONTEXT_BYTES[plan.device]
    corrected = (plan.predicted_peak_memory_bytes - process) / plan.correction["memory"]
    predicted = plan.predicted_step_seconds / plan.correction["seconds"]
    if min(corrected, predicted, peak - process) <= 0:
        return None
    if seconds is None or plan.correction.get("disturbed"):
        seconds = plan.predicted_step_seconds
    return Measured(
        key=plan.correction["key"],
        kind=plan.correction["kind"],
        size=plan.correction["size"],
        memory=(peak - process) / corrected,
        seconds=seconds / predicted,
    )
