"""Tests of engine/checkpointing/host_buffer.py: what is written with direct I/O is a safetensors file."""

from __future__ import annotations

import errno
import hashlib
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file

from isobatch.engine.checkpointing.host_buffer import HostBuffer
from isobatch.engine.checkpointing.layout import SECTOR, make_layout
from isobatch.engine.checkpointing.portable_state import tensor_entry

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
KINDS += [torch.int8, torch.uint8, torch.bool]


def tensors(count: int) -> dict[str, torch.Tensor]:
    """Of every kind, of odd sizes; one is every other element of another."""
    made = {str(kind): (torch.arange(count + n) % 2).to(kind) for n, kind in enumerate(KINDS)}
    return {**made, "apart": torch.arange(2.0 * count)[::2]}


def fill(image: HostBuffer, state: dict[str, torch.Tensor]) -> int:
    """A file of one rank in the buffer; returns its size."""
    parts = sorted(state.items(), key=lambda part: -part[1].element_size())
    rows = [[number, 0, t.numel()] for number, (_, t) in enumerate(parts)]
    entries = {name: tensor_entry(t) for name, t in parts}
    layout = make_layout(entries, [(0, np.array(rows))])
    size = image.fill([t for _, t in parts], layout.header(0))
    assert size == layout.sizes[0]
    return size


def write(image: HostBuffer, path: Path, size: int) -> None:
    sums = image.write(path, 0, size, size)
    content = path.read_bytes()
    assert sums == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def check(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = {key[:-2]: t for key, t in load_file(path).items() if not key.startswith("filling@")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in expected.items())


def test_memory_is_used_again_for_larger_and_smaller_files(tmp_path: Path) -> None:
    image = HostBuffer()
    for number, count in enumerate((3, 5000, 7)):
        path = tmp_path / f"{number}.safetensors"
        write(image, path, fill(image, tensors(count)))
        check(path, tensors(count))
        assert path.stat().st_size % SECTOR == 0


def test_ranks_write_their_parts_of_a_file_in_any_order_over_what_a_killed_save_left(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"x" * 5 * SECTOR)
    for number in (2, 0, 1):
        image = HostBuffer()
        size = image.fill([torch.full((SECTOR // 4 - number,), float(number))])
        image.write(path, number * SECTOR, size, 3 * SECTOR)
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(3, -1)
    assert [row.unique().tolist() for row in content] == [[0], [0, 1], [0, 2]]  # zeros fill a sector


def test_a_file_system_that_wants_the_page_cache_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    image = HostBuffer()
    write(image, tmp_path / "x.safetensors", fill(image, tensors(100)))
    check(tmp_path / "x.safetensors", tensors(100))


class FakeGpu:
    """torch.cuda's events and page locks: what each of them does is written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: int = 0) -> None:
        self.log: list[str] = []
        self.locked: dict[int, int] = {}
        self.refuses = refuses
        for name in ("Event", "current_stream", "cudart"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def current_stream(self, _: Any) -> Any:
        return SimpleNamespace(name="training")

    def Event(self) -> Any:
        number = sum(line.startswith("record") for line in self.log)
        return SimpleNamespace(
            number=number,
            record=lambda stream: self.log.append(f"record {number} on {stream.name}"),
            synchronize=lambda: self.log.append(f"the host waits for event {number}"),
        )

    def cudart(self) -> Any:
        def register(address: int, size: int, _: int) -> int:
            self.locked |= {} if self.refuses else {address: size}
            return self.refuses

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=self.locked.pop)


def test_a_gpus_tensors_are_copied_behind_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    image = HostBuffer(torch.device("cuda"))
    for count in (7, 100):
        size = fill(image, tensors(count))
    write(image, tmp_path / "x.safetensors", size)
    assert gpu.log == [f"record {n} on training" for n in (0, 1)] + ["the host waits for event 1"]
    check(tmp_path / "x.safetensors", tensors(100))
    assert len(gpu.locked) == 1
    assert sum(gpu.locked.values()) >= size
    del image
    assert not gpu.locked


def test_memory_that_may_not_be_locked_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(monkeypatch, refuses=2)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: gpu.log.append("a kernel that takes the error"))
    image = HostBuffer(torch.device("cuda"))
    for count in (1000, 7, 5000):
        write(image, tmp_path / "x.safetensors", fill(image, tensors(count)))
        check(tmp_path / "x.safetensors", tensors(count))
    assert gpu.log.count("a kernel that takes the error") == 2
