"""Tests of launch/commands/describe.py: every flag of every task, chain and command."""

from __future__ import annotations

import json
from typing import Any

import pytest

from isobatch.core.errors import UserError
from isobatch.launch.cli import ALIASES, COMMANDS, find_command
from isobatch.launch.commands.describe import describe


def described(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert describe([name, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_command_with_flags_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        rows = described(name, capsys)["flags"][name]
        assert rows
        assert all(row["help"] for row in rows), name
    assert "describe TASK" in described("tune", capsys)["notes"][0]


def test_old_words_for_commands_stay() -> None:
    for word, command in ALIASES.items():
        name, rest = find_command([word, "x"])
        assert " ".join([name, *rest]) == f"{command} x"
    assert find_command(["submit", "--nodes", "2", "--to=k8s"]) == ("submit --to k8s", ["--nodes", "2"])
    for group in ("vae", "submit"):
        with pytest.raises(UserError, match="give one of"):
            find_command([group, "runs/a"])


def test_a_chain_names_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert "describe pruning" in described("compress", capsys)["notes"][0]


def test_presets_are_named_with_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    notes = described("recommender", capsys)["notes"]
    assert any(note.startswith("--preset ids: ") and "text off" in note for note in notes)
