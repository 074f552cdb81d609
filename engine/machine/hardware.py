"""Hardware records, and the parser of `--hardware 4x8xh100`. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import groupby
from typing import Literal

from isobatch.core.errors import UserError
from isobatch.core.measures import format_bytes
from isobatch.core.plan import size_of
from isobatch.engine.machine.gpu_table import MACHINES, Gpu, named_model, squeezed

Kind = Literal["cuda", "mps", "cpu"]
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A machine, or several equal ones; every figure is per node."""

    kind: Kind
    gpus: tuple[Gpu, ...] = ()
    nodes: int = 1
    cpus: int
    """Cores this process may use."""
    ram_bytes: int
    """Memory this process may use."""
    node_bandwidth: float = 1.25e8
    """Bytes/s between nodes."""
    is_network_assumed: bool = True
    """Whether that is the card's usual network, and nobody's word."""
    is_ram_assumed: bool = False
    """Whether that is what machines with this card usually have."""
    cpu_bf16: bool = False
    """Native bf16 arithmetic: AMX or AVX512_BF16."""
    cpu_amx: bool = False
    """A matrix unit for bf16 (AMX)."""
    wsl: bool = False
    """Windows Subsystem for Linux."""
    source: Literal["detected", "asked"] = "asked"

    @property
    def devices(self) -> int:
        """Accelerators over all nodes; a node without any counts as one device."""
        return self.nodes * max(1, len(self.gpus))

    @property
    def network(self) -> str:
        """The network between nodes, in words."""
        return f"{self.node_bandwidth * 8 / 1e9:.0f} Gb/s{' assumed' * self.is_network_assumed} between nodes"

    @property
    def gpu(self) -> Gpu:
        """The GPU with the least memory: what fits on it fits on all."""
        assert self.gpus, "a machine without GPUs was asked for one"
        return min(self.gpus, key=lambda gpu: gpu.memory_bytes)

    def describe(self) -> str:
        """The machine in one phrase, for messages."""
        if not self.gpus:
            return f"{self.cpus} CPU cores, {format_bytes(self.ram_bytes)} RAM"
        per_node = f"{len(self.gpus)} x {self.gpu.name}" if len(self.gpus) > 1 else self.gpu.name
        where = f"{self.nodes} nodes of {per_node}" if self.nodes > 1 else per_node
        return f"{where} ({format_bytes(self.gpu.memory_bytes)} each)"


TAKEN_BYTES = 10**9
"""Of a GPU's memory, which a driver and a screen may take."""


def gpu_remarks(hardware: Hardware) -> list[tuple[str, str, str]]:
    """What makes detected GPUs slower or smaller than their names say: (which, what happens, what helps)."""
    if hardware.kind != "cuda" or hardware.source != "detected":
        return []
    gpus = {str(number): gpu for number, gpu in enumerate(hardware.gpus) if gpu.supported}
    found: dict[tuple[str, str], list[str]] = {}
    for number, gpu in gpus.items():
        for remark in _remarks(gpu):
            found.setdefault(remark, []).append(number)
    lines = [(f"GPU {', '.join(numbers)}", *remark) for remark, numbers in found.items()]
    kinds = sorted({f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in gpus.values()})
    if len(kinds) > 1:
        pace = f"{' and '.join(kinds)} differ: each gets what fits the smallest, at the pace of the slowest"
        lines.append(("GPUs", pace, "CUDA_VISIBLE_DEVICES=0 trains on the first alone"))
    return lines


def _remarks(gpu: Gpu) -> Iterator[tuple[str, str]]:
    if not gpu.native_bf16:
        instead = "fp16 with a loss scale" if gpu.compute_capability >= (7, 0) else "fp32"
        yield f"{gpu.name} has no bf16 ({gpu.capability}): it takes {instead}", "--precision fp32 is exact"
    if gpu.card is None:
        what = "is a MIG slice" if " MIG " in gpu.name else "is in no table of mine"
        yield f"{gpu.name} {what}: times are a cautious guess", "isobatch profile RUN measures them"
    if gpu.taken_bytes > TAKEN_BYTES:
        text = f"other programs take {format_bytes(gpu.taken_bytes)} of {format_bytes(gpu.memory_bytes)}"
        then = "a plan counts all, and what runs out of memory goes on in smaller micro-batches"
        clear = max(0, gpu.memory_bytes - gpu.taken_bytes) * 9 // 10**7
        yield f"{text}: {then}", f"end them (nvidia-smi), or --memory-limit {clear}MB keeps clear of them"
    if not gpu.has_triton:
        yield "torch has no Triton: nothing is compiled, so layers take more kernels", "pip install triton"


SIZE = r"(\d+(?:\.\d+)?[gt]b)"
EXAMPLES = ("rtx4080-laptop", "8xh100", "4x8xa100-80gb", "rtx3080:12gb", "cpu:2x24gb", "mps:16gb")
MOST_NODES, MOST_GPUS, MOST_CORES = 10_000, 72, 4096
"""The largest machines that are believed: nodes, GPUs of one node (an NVL72), cores."""


def parse_hardware(text: str) -> Hardware:
    """The machine that `--hardware` names: [NODESx][GPUSx]CARD[:MEMORYgb[:RAMgb]][@NETWORKgbit], with the
    memory of a card and the RAM and network of a node; cpu:CORESxRAMgb; mps or mps:RAMgb.

    Raises UserError.
    """
    word = text.strip().lower()
    if match := re.fullmatch(r"cpu:(\d+)x" + SIZE, word):
        return Hardware(kind="cpu", cpus=_count(text, match[1], MOST_CORES), ram_bytes=_bytes(match[2]))
    if match := re.fullmatch(rf"mps(?::{SIZE})?", word):
        return apple_machine(_bytes(match[1] or "16gb"), cpus=8)
    sizes = rf"(?::{SIZE})?(?::{SIZE})?(?:@(\d+(?:\.\d+)?) ?(?:gb?(?:it|ps|/s)?)?)?"
    match = re.fullmatch(rf"(?:(\d+) ?x ?)?(?:(\d+) ?x ?)?(.*?){sizes}", word, re.DOTALL)
    assert match is not None, "every word matches"
    first, second, name, memory, ram, network = match.groups()
    if (card := named_model(name)) is None:
        raise UserError(_unknown(text, name))
    model = MACHINES[card]
    nodes = _count(text, first if second else "1", MOST_NODES)
    gpus = _count(text, second or first or "1", MOST_GPUS)
    gpu = replace(model.gpu, memory_bytes=_bytes(memory)) if memory else model.gpu
    return Hardware(
        kind="cuda",
        gpus=(gpu,) * gpus,
        nodes=nodes,
        cpus=model.cpus * gpus,
        ram_bytes=_bytes(ram) if ram else model.ram_gib * gpus * GIB,
        node_bandwidth=float(network) * 1e9 / 8 if network else model.node_bandwidth,
        is_network_assumed=network is None,
        is_ram_assumed=ram is None,
    )


def _bytes(size: str) -> int:
    """A card's 24gb are 24 GiB."""
    return int(size_of(size.replace("b", "ib")))


def apple_machine(ram_bytes: int, cpus: int, source: Literal["detected", "asked"] = "asked") -> Hardware:
    """An Apple machine: the GPU shares the RAM and may use about three quarters of it (rates: a base M2)."""
    gpu = Gpu(
        name="Apple GPU",
        memory_bytes=ram_bytes * 3 // 4,
        compute_capability=(0, 0),
        peak_flops={"fp32": 3.6e12, "fp16": 3.6e12, "bf16": None},
        memory_bandwidth=100e9,
    )
    return Hardware(kind="mps", gpus=(gpu,), cpus=cpus, ram_bytes=ram_bytes, source=source)


def _count(text: str, digits: str, most: int) -> int:
    if not 1 <= int(digits) <= most:
        raise UserError(f"--hardware {text}: {int(digits):,} is no count of a machine's parts: 1 to {most:,}")
    return int(digits)


def _unknown(text: str, name: str) -> str:
    """The error for a name that is no row of the table: rows that begin with it, near ones, or all, with the
    memory of each card.
    """
    count = text.strip().lower().partition(name)[0] if name else ""
    if (glued := re.fullmatch(r"(\d+)([a-z].*)|(.+)[x:](\d+)", name)) and named_model(glued[2] or glued[3]):
        count, name = f"{count}{glued[1] or glued[4]}x", glued[2] or glued[3]
    plain = squeezed(name)
    offers = [row for row in MACHINES if plain and squeezed(row).startswith(plain)]
    if offers := offers or get_close_matches(name, MACHINES, n=3, cutoff=0.7):
        said = " | ".join(f"{count}{row} ({_card_gigabytes(row)} GB)" for row in offers)
        return f"--hardware {text}: did you mean {said}? It is [nodes x] GPUs x card, as in 4x8xh100"
    return f"--hardware {text}: is no machine that I know; {'; '.join(known_machines())}"


def known_machines() -> list[str]:
    """How machines are written, and the names of all cards by their memory."""
    by_size = sorted(MACHINES, key=_card_gigabytes)
    known = [f"{size} GB: {', '.join(rows)}" for size, rows in groupby(by_size, _card_gigabytes)]
    examples = f"write {', '.join(EXAMPLES)} ..., :12gb for a card's memory, @100gbit for a network of nodes"
    return [examples, *known]


def _card_gigabytes(row: str) -> int:
    return round(MACHINES[row].gpu.memory_bytes / GIB)
