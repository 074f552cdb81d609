"""Tests of engine/checkpointing/host_buffer.py: a file written with direct I/O is a safetensors file."""

from __future__ import annotations

import errno
import json
import os
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobatch.engine.checkpointing.host_buffer import SECTOR, HostBuffer

if TYPE_CHECKING:
    from pathlib import Path

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
KINDS += [torch.int8, torch.uint8, torch.bool]


def tensors(count: int) -> dict[str, torch.Tensor]:
    """Of every kind, of odd sizes; one is every other element of another."""
    made = {str(kind): (torch.arange(count + n) % 2).to(kind) for n, kind in enumerate(KINDS)}
    return {**made, "apart": torch.arange(2.0 * count)[::2]}


def check(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in expected.items())
    content = path.read_bytes()
    recorded = json.loads(path.with_suffix(".json").read_text())
    assert recorded == {"bytes": len(content), "crc32": zlib.crc32(content)}


def test_memory_is_used_again_for_larger_and_smaller_files(tmp_path: Path) -> None:
    image = HostBuffer()
    for number, count in enumerate((3, 5000, 7)):
        path = tmp_path / f"{number}.safetensors"
        image.write(path, image.fill(tensors(count)))
        check(path, tensors(count))
        assert path.stat().st_size % SECTOR


def test_the_layout_is_safetensors_own(tmp_path: Path) -> None:
    image, state = HostBuffer(), {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.int64)}
    image.write(tmp_path / "ours.safetensors", image.fill(state))
    save_file(state, tmp_path / "theirs.safetensors")
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


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
    image.write(tmp_path / "x.safetensors", image.fill(tensors(100)))
    check(tmp_path / "x.safetensors", tensors(100))


def test_other_errors_are_not_hidden(tmp_path: Path) -> None:
    image = HostBuffer()
    with pytest.raises(FileNotFoundError):
        image.write(tmp_path / "nowhere" / "x.safetensors", image.fill(tensors(1)))
