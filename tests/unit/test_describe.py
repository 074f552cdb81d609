"""Tests of launch/commands/describe.py: every flag of every task, chain and command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from isobatch.engine.machine.gpu_table import MACHINES
from isobatch.launch.cli import COMMANDS
from isobatch.launch.commands.describe import COMMAND_OPTIONS, describe

if TYPE_CHECKING:
    import pytest


def described(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert describe([name, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_command_with_flags_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"resume"} == COMMANDS.keys() - COMMAND_OPTIONS.keys(), "its flags are those of a run"
    for name in COMMAND_OPTIONS:
        rows = described(name, capsys)["flags"][name]
        assert rows
        assert all(row["help"] for row in rows), name
    assert "describe TASK" in described("tune", capsys)["notes"][0]


def test_a_chain_has_the_flags_of_all_stages_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = described("compress", capsys)["flags"]
    flags = [row["flag"] for rows in found.values() for row in rows]
    assert len(set(flags)) == len(flags)
    assert {"--text-column", "--sparsity", "--bits", "--batch-size", "--processes"} <= set(flags)


def test_presets_are_named_with_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    notes = described("recommender", capsys)["notes"]
    assert any(note.startswith("--preset ids: ") and "text off" in note for note in notes)


def test_machines_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert described("hardware", capsys).keys() == MACHINES.keys()
    describe(["hardware"])
    assert "8xNAME" in capsys.readouterr().out
