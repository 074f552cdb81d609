"""Plan fields decided by one rule each: every function returns (value, reason)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal, cast

from isobatch.core.errors import UserError
from isobatch.core.flags import flags_of
from isobatch.core.measures import format_duration
from isobatch.core.plan import PRECISION_WORDS, Invariance, Plan, PlanOptions, Precision, size_of
from isobatch.core.recipe import Recipe
from isobatch.engine.machine.hardware import Hardware, gpu_remarks
from isobatch.engine.planning.calibration import GpuConstants
from isobatch.engine.planning.cost_model import PlanningCase, run_steps
from isobatch.engine.planning.memory_model import ExecutionChoices
from isobatch.models.base import ModelSize

DeviceKind = Literal["cpu", "cuda", "mps"]
AttentionKernel = Literal["sdpa", "eager", "flash"]
CompileMode = Literal["on", "off", "max-autotune", "reduce-overhead"]
PlanFields = dict[str, tuple[Any, str]]
"""Field of the plan -> (value, reason)."""
SHAPES = 8
"""Most padded lengths that CUDA graphs see: each is recorded anew."""
COMPILED_GRAPHS = 3
"""Of a block: for the first shape, another number of rows, and another length."""
TIMING_TAKES, TIMING_SAVES = 5, 0.02
"""Of timing products on the card, guessed: what it takes, in times of compiling, and its share of a step."""
AMX_PAYS = 1_000_000
"""Parameters from which bf16 in a CPU's matrix unit is clearly faster: below, 0.9 to 1.3 times fp32."""
STREAM_CACHE = "20gb"


def choose_device(hardware: Hardware, asked: PlanOptions) -> tuple[DeviceKind, str]:
    """The device that trains. Raises UserError where the one asked for is not there or not usable."""
    bad = next((gpu for gpu in hardware.gpus if not gpu.supported), None)
    if bad and asked.device in ("auto", "cuda"):
        lacks = f"this torch build has no kernels for it ({bad.capability}): install one that has"
        usable = ",".join(str(n) for n, gpu in enumerate(hardware.gpus) if gpu.supported)
        way = f"CUDA_VISIBLE_DEVICES={usable} leaves it out" if usable else "--device cpu trains without it"
        raise UserError(f"{bad.name}: {bad.why_unusable or lacks}; {way}")
    if asked.device == "auto":
        return hardware.kind, f"{hardware.source}: {hardware.describe()}"
    if asked.device not in ("cpu", hardware.kind):
        lack = "there is no NVIDIA GPU here" if asked.device == "cuda" else "this is not an Apple machine"
        raise UserError(f"--device {asked.device}: {lack}; leave the flag out to train on what there is")
    return asked.device, asked.why("device")


def choose_precision(
    hardware: Hardware, device: DeviceKind, model_size: ModelSize, asked: PlanOptions
) -> tuple[Precision, str]:
    """The number format of the arithmetic. Raises UserError where the device lacks the one asked for."""
    wanted = PRECISION_WORDS.get(asked.precision, asked.precision)
    if wanted == "auto":
        return _best_precision(hardware, device, model_size)
    lack = _why_no_arithmetic(hardware, device, wanted)
    if lack and asked.precision.endswith("-mixed"):
        return "fp32", f"{lack}, so this is fp32"
    if lack and (device, wanted) != ("cpu", "bf16"):
        others = "fp32 or bf16 on a CPU" if device == "cpu" else "fp16 or fp32"
        raise UserError(f"--precision {asked.precision}: {lack}; use {others}")
    slow = "; without AMX or AVX512_BF16 it is about 5 times slower than fp32" if lack else ""
    remarks = {"bf16": slow, "fp16": "; a loss scale guards against underflow", "fp32": "; TF32 stays off"}
    return cast("Precision", wanted), asked.why("precision") + remarks[wanted]


def _why_no_arithmetic(hardware: Hardware, device: DeviceKind, precision: str) -> str:
    """What a device lacks to compute in half precision at speed; empty where nothing."""
    if device == "cpu" and precision == "fp16":
        return "fp16 needs a GPU"
    if device == "cpu" and precision == "bf16" and not hardware.cpu_bf16:
        return "this processor has no arithmetic for bf16 (AMX or AVX512_BF16)"
    if device == "cuda" and precision == "bf16" and not hardware.gpu.native_bf16:
        return f"{hardware.gpu.name} only emulates it ({hardware.gpu.capability}, it takes 8.0)"
    return ""


def _best_precision(hardware: Hardware, device: DeviceKind, model_size: ModelSize) -> tuple[Precision, str]:
    if device == "mps":
        return "fp32", "exact: half precision on Apple GPUs saves memory but hardly time"
    if device == "cpu" and hardware.cpu_amx and model_size.rounds:
        return "fp32", "exact: in bf16, another cut of the batch would round to other levels"
    if device == "cpu" and hardware.cpu_amx and model_size.parameters < AMX_PAYS:
        return "fp32", "exact: for so small a model bf16 is no faster, even with a matrix unit (AMX)"
    if device == "cpu" and hardware.cpu_amx:
        return "bf16", "the processor has a matrix unit for it (AMX); --precision fp32 is exact and slower"
    if device == "cpu":
        none = ": this processor has no fast half precision"
        faster = "; --precision bf16 would be about twice as fast here (AVX512_BF16) and less exact"
        return "fp32", f"exact{faster if hardware.cpu_bf16 else none}"
    gpu = hardware.gpu
    if gpu.native_bf16:
        stay = "trained weights, gradients and moments stay fp32"
        return "bf16", f"{gpu.name} has it natively ({gpu.capability}); {stay}"
    if gpu.compute_capability >= (7, 0):
        return "fp16", f"{gpu.name} has tensor cores for fp16 but not for bf16 ({gpu.capability})"
    return "fp32", f"{gpu.name} has no tensor cores ({gpu.capability})"


def choose_attention(
    hardware: Hardware, device: DeviceKind, precision: str, asked: PlanOptions
) -> tuple[AttentionKernel, str]:
    """The attention kernel. Raises UserError where flash attention cannot run."""
    if asked.attention == "auto":
        return "sdpa", "torch's fused kernel: no length-squared matrix is kept"
    if asked.attention == "flash" and not _has_flash(hardware, device, precision):
        needs = "needs an NVIDIA GPU of compute capability 8.0 and bf16 or fp16"
        raise UserError(f"--attention flash: {needs}; use sdpa here")
    return asked.attention, asked.why("attention")


def _has_flash(hardware: Hardware, device: DeviceKind, precision: str) -> bool:
    return device == "cuda" and precision != "fp32" and hardware.gpu.native_bf16


def choose_pack(case: PlanningCase) -> tuple[bool, str]:
    """Whether to pack samples. Raises UserError where packing was asked for and cannot run."""
    if case.asked.pack != "on":
        offer = "; --pack on lays samples end to end, without any" if case.model_size.packs else ""
        return False, f"samples are cut by length, so little is padding{offer}"
    if not case.model_size.packs:
        raise UserError("--pack on: this model's attention cannot be told where a sample ends: leave it out")
    if case.asked.compile not in ("auto", "off"):
        raise UserError(f"--pack on: rows change their length, so --compile {case.asked.compile} never ends")
    if case.device == "cpu":
        return True, f"{case.asked.why('pack')}; attention alone is padded, as CPUs have no kernel for it"
    if not _has_flash(case.hardware, case.device, case.precision):
        raise UserError("--pack on: needs an NVIDIA GPU of compute capability 8.0 and bf16 or fp16, or a CPU")
    return True, case.asked.why("pack")


def choose_compile(case: PlanningCase, eager: float, compiled: float | None) -> tuple[CompileMode, str]:
    """Whether to torch.compile the model: where the time it saves in the run is more than it takes.

    `eager`, `compiled`: seconds of a step without and with it; None where the strategy cannot be compiled.
    """
    if compiled is None:
        return "off", "the strategy gathers weights inside of blocks, which the compiler cannot follow"
    if case.asked.pack == "on" and case.asked.compile == "auto":
        return "off", "packed rows have another length each time, and each would be compiled anew"
    if case.device == "cuda" and not case.hardware.gpu.has_triton:
        return "off", "torch has no Triton here to make kernels with: pip install triton"
    if case.asked.compile != "auto":
        return case.asked.compile, case.asked.why("compile")
    if case.device != "cuda":
        return "off", "compiling costs more than it saves on this kind of device"
    if case.hardware.gpu.compute_capability < (7, 0):
        return "off", "torch's compiler needs compute capability 7.0"
    if case.precision == "fp32":
        return "off", "fp32 was asked for, and compiled kernels round differently"
    steps, lengths = run_steps(case.recipe, case.facts), {case.padded(n) for n in case.facts.lengths}
    saved, spent = (eager - compiled) * steps, compile_seconds(case.constants, lengths, "on")
    saves = format_duration(max(0.0, saved))
    what = f"compiling takes about {format_duration(spent)} and saves {saves} of this run"
    if saved <= spent:
        return "off", what
    timing = compile_seconds(case.constants, lengths, "max-autotune") - spent
    if timing < TIMING_SAVES * compiled * steps:
        return (
            "max-autotune",
            f"{what}; choosing products' kernels takes about {format_duration(timing)} more",
        )
    return "on", what


def compile_seconds(constants: GpuConstants, lengths: Collection[int], mode: CompileMode) -> float:
    """Seconds to compile the forward and backward pass of a block, whose graphs serve all blocks, for data of
    these padded lengths.
    """
    if mode == "off":
        return 0.0
    graphs = min(COMPILED_GRAPHS, 1 + len(lengths))
    return graphs * constants.compile_seconds * (TIMING_TAKES if mode == "max-autotune" else 1)


def choose_padding(case: PlanningCase) -> tuple[int, str]:
    """The multiple that lengths are padded to; CUDA graphs see at most about SHAPES lengths."""
    cores = case.device == "cuda" and case.precision != "fp32"
    base = 8 if cores else 1
    if case.asked.compile == "reduce-overhead":
        multiple = max(base, math.ceil(case.facts.longest / SHAPES / base) * base)
        return multiple, f"about {SHAPES} different lengths at most, as CUDA graphs are recorded for each"
    if cores:
        return base, "tensor cores want multiples of 8 in half precision"
    return base, "no alignment helps here, so nothing is padded beyond the longest of a micro-batch"


def choose_loading(case: PlanningCase, processes: int) -> PlanFields:
    """The loader's fields, and the compute threads: the cores of a node divided by its processes."""
    thread = "data is memory-mapped and gathered by one vectorised fetch in a thread, which beats workers"
    ready = "one micro-batch in use and one ready hide the loading"
    kept = "as tokens; what is still there is not read again"
    cpus, local, asked = case.hardware.cpus, case.local(processes), case.asked
    fields: PlanFields = {
        "workers": (0, thread) if asked.workers is None else (asked.workers, asked.why("workers")),
        "prefetch": (2, ready) if asked.prefetch is None else (asked.prefetch, asked.why("prefetch")),
        "pin_memory": _choose_pin_memory(case),
        "threads": (max(1, cpus // local), f"{cpus} cores for {local} processes on a node"),
    }
    if case.facts.is_streamed:
        why = asked.why("stream_cache") if asked.stream_cache else kept
        fields["stream_cache_bytes"] = (int(size_of(asked.stream_cache or STREAM_CACHE)), why)
    return fields


def _choose_pin_memory(case: PlanningCase) -> tuple[bool, str]:
    """Whether batches are copied from page-locked memory."""
    if case.device != "cuda":
        return False, "only copies to an NVIDIA GPU gain from it, so it stays off"
    if case.asked.pin_memory != "auto":
        return case.asked.pin_memory == "on", case.asked.why("pin_memory")
    if case.hardware.wsl:
        return False, "page-locked memory is scarce under WSL"
    return True, "copies to the GPU overlap with its work"


def choose_reduction(
    case: PlanningCase, choices: ExecutionChoices, graphs: bool = False
) -> tuple[Literal["overlapped", "explicit"], str]:
    """When gradients are reduced over processes: during the last backward pass, or once after it.

    `graphs`: the model runs as CUDA graphs (--compile reduce-overhead).
    """
    if choices.processes == 1:
        return "explicit", "one process has nothing to exchange"
    if graphs:
        return "explicit", "CUDA graphs and DDP's hooks exclude each other"
    if case.device != "cuda":
        slower = "on CPUs transport would take the cores from the arithmetic"
        return "explicit", f"{slower}; once after the last is as fast"
    if choices.traits.overlaps_reduction:
        running = "gradients cross processes while the last backward pass still runs"
        after = "" if choices.traits.shards else "; after it where a parameter has none, or a sparse one"
        return "overlapped", running + after
    return "explicit", "partitioned gradients are reduced once, after the last micro-batch"


def choose_invariance(
    recipe: Recipe, precision: str, compiled: bool, foreign: bool, rounds: bool
) -> tuple[Invariance, str]:
    """How exactly another plan of this recipe learns the same. `foreign`: the model draws torch's own noise,
    which the first step finds out; `rounds`: it rounds activations or weights to levels.

    What differs most is stated: other random draws differ far more than other rounding.
    """
    if recipe.noise == "native" or foreign:
        asks = "the recipe asks for torch's own noise"
        source = asks if recipe.noise == "native" else "the model draws its own noise"
        return "noise", f"{source}: another cut gives other draws of the same distribution"
    if precision != "fp32":
        return "precision", f"{precision} rounds differently from fp32, and so does another cut in it"
    if compiled:
        return "precision", "compiled kernels round differently"
    if rounds:
        moves = "the order of float sums moves a value to the next at times"
        return "rounding", f"fp32, rounded to levels: {moves}"
    return "exact", "fp32 without compiled kernels: only the order of float sums depends on this plan"


def fixed_loader_settings(plan: Plan) -> dict[str, tuple[bool, str]]:
    """Loader settings that follow from the plan and are no choice: name -> (whether it is so, why)."""
    loads = f"the {plan.workers} loader processes live" if plan.workers else "one loading thread lives"
    padded = "samples are padded to the longest of their micro-batch, up to a multiple of pad_multiple"
    packed = "samples are packed end to end, so batches are not padded"
    return {
        "persistent_workers": (True, f"{loads} as long as a phase, through all its epochs"),
        "dynamic_padding": (not plan.pack, packed if plan.pack else padded),
    }


PLANNED_AS = {"micro_batch": "micro_batch_samples"}
"""Options whose field in the plan has another name."""


def remarks_on_plan(asked: PlanOptions, plan: Plan, hardware: Hardware) -> list[str]:
    """Lines for the user: options that the plan does not follow, and what is odd about GPUs that train."""
    remarks = gpu_remarks(hardware) if plan.device == "cuda" else []
    return [*unmet_wishes(asked, plan), *(f"{which}: {text}; {way}" for which, text, way in remarks)]


def unmet_wishes(asked: PlanOptions, plan: Plan) -> list[str]:
    """A line for each option that the plan does not follow, with the plan's reason."""
    lines = []
    for name, flag in flags_of(PlanOptions).items():
        wish, field = getattr(asked, name), PLANNED_AS.get(name, name)
        if wish == flag.default or field not in plan.reasons:
            continue
        value = getattr(plan, field)
        wanted = wish == "on" if isinstance(value, bool) else PRECISION_WORDS.get(wish, wish)
        if wanted != value:
            preset = asked.preset_options.get(name)
            who = f"the preset {preset}, " if preset else ""
            lines.append(f"{who}{flag.spelling} {wish}: {plan.reasons[field]}")
    return lines
