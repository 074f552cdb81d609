"""Tests of engine/verification/compare_export.py: what another version writes is no other export."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from isobatch.engine.verification.compare_export import compare_folders

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("here", "differs"),
    [
        ({"transformers_version": "5.22.2", "hidden_size": 8}, False),
        ({"hidden_size": 8}, False),
        ({"transformers_version": "5.23.0", "hidden_size": 9}, True),
        (["hidden_size"], True),
    ],
)
def test_a_configuration_is_the_same_whatever_version_wrote_it(
    here: object, differs: bool, tmp_path: Path
) -> None:
    for name, content in (("final", {"transformers_version": "5.23.0", "hidden_size": 8}), ("fresh", here)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    found = compare_folders(tmp_path / "final", tmp_path / "fresh")
    assert (not found["identical"], found["differing"]) == (True, ["config.json"] if differs else [])
