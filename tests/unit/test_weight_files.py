"""Weights of checkpoints, exports and folders of transformers, read and compared tensor by tensor."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.weight_files import WeightsDifference, compare_weight_files, open_weights
from isobatch.launch.forensics.diff import diff
from isobatch.launch.forensics.diff_text import weights_verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    draws = torch.Generator().manual_seed(0)
    made = {name: torch.randn(8, 4, generator=draws) for name in ("embed.weight", "inner.weight")}
    return {**made, "inner.bias": torch.randn(4, generator=draws), "steps": torch.tensor([10_000])}


def saved(folder: Path, content: Tensors, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(content, folder / name)
    return folder


def in_parts(folder: Path, content: Tensors) -> Path:
    """Two files and an index, as save_pretrained writes a large model."""
    names, parts = list(content), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for part, own in zip(parts, (names[:1], names[1:]), strict=True):
        saved(folder, {name: content[name] for name in own}, part)
    where = {name: parts[0] if name == names[0] else parts[1] for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def compared(tmp_path: Path, other: Tensors) -> WeightsDifference:
    one = open_weights(saved(tmp_path / "one", tensors()))
    return compare_weight_files(one, open_weights(saved(tmp_path / "other", other)))


WAYS: dict[str, Callable[[Path], Path]] = {
    "parts": lambda path: in_parts(path, tensors()),
    "a file": lambda path: saved(path, tensors(), "any.safetensors") / "any.safetensors",
    "wrapped": lambda path: saved(path, {f"module._orig_mod.{n}": v for n, v in tensors().items()}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_weights_are_the_same_however_they_lie(way: str, tmp_path: Path) -> None:
    other = open_weights(WAYS[way](tmp_path / "other"))
    found = compare_weight_files(open_weights(saved(tmp_path / "one", tensors())), other)
    assert (found.tensors, found.same, found.equal) == (4, 4, True)
    assert weights_verdict(found) == "the same bit for bit in all 4 tensors"


def test_one_changed_element_is_found_by_its_tensor(tmp_path: Path) -> None:
    other = tensors()
    other["inner.weight"][3, 2] += 0.1
    found = compared(tmp_path, other)
    assert (found.same, found.beyond, found.equal) == (3, ["inner.weight"], False)
    expected = 0.1 / float(tensors()["inner.weight"].norm())
    assert found.largest == [("inner.weight", pytest.approx(expected, rel=1e-5))]
    assert "most in inner.weight; of 4 tensors 3 are the same bit for bit" in weights_verdict(found)


def test_rounding_is_no_difference(tmp_path: Path) -> None:
    found = compared(tmp_path, {n: v * (1 + 2e-7) if n != "steps" else v for n, v in tensors().items()})
    assert found.equal
    assert found.same == 1
    assert weights_verdict(found).startswith("only rounding differs: by 2e-07 of")
    found = compared(tmp_path, {n: v.bfloat16() if n != "steps" else v for n, v in tensors().items()})
    assert found.equal
    assert 1e-4 < found.difference < found.rounding


def test_integers_do_not_round(tmp_path: Path) -> None:
    assert compared(tmp_path, {**tensors(), "steps": torch.tensor([10_001])}).beyond == ["steps"]


def test_a_nan_is_a_difference_unless_both_have_it(tmp_path: Path) -> None:
    other = tensors()
    other["inner.bias"][1] = math.nan
    found = compared(tmp_path, other)
    assert not found.equal
    assert found.largest[0] == ("inner.bias", math.inf)
    assert compare_weight_files(*[open_weights(tmp_path / "other")] * 2).equal


def test_a_tied_head_may_stand_under_either_name(tmp_path: Path) -> None:
    tied = {"head.weight" if n == "embed.weight" else n: v for n, v in tensors().items()}
    found = compared(tmp_path, tied)
    assert found.equal
    both = compared(tmp_path, {**tensors(), "head.weight": tensors()["embed.weight"]})
    assert both.equal
    assert both.tensors == 4


def test_what_one_side_lacks_or_has_in_another_shape_is_said(tmp_path: Path) -> None:
    other = {**tensors(), "new.bias": torch.ones(3), "inner.bias": torch.ones(5)}
    found = compared(tmp_path, other)
    assert (found.alone, found.shapes, found.equal) == (([], ["new.bias"]), ["inner.bias"], False)
    said = weights_verdict(found)
    assert said.startswith(
        "the weights are not the same: B alone has new.bias; another shape have inner.bias;"
    )


def test_the_command_compares_weights_where_one_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = saved(tmp_path / "one", tensors()), in_parts(tmp_path / "other", tensors())
    assert diff([str(one), str(other)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the same bit for bit in all 4 tensors"
    saved(tmp_path / "one", {**tensors(), "inner.bias": torch.zeros(4)})
    assert diff([str(one), str(other), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["weights"]["beyond"] == ["inner.bias"]


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "is no run, and holds no weights"), (b"x" * 100, "its weights cannot be read")],
)
def test_what_holds_no_weights_is_one_line(content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=says) as raised:
        diff([str(tmp_path), str(tmp_path)])
    assert "\n" not in str(raised.value)


def test_a_file_that_may_run_code_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    for place in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(UserError, match="is no safetensors file: others may run code when they are read"):
            open_weights(place)
