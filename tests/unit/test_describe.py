"""Tests of launch/commands/describe.py: every flag of every task, chain and command."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from isobatch.core.errors import UserError
from isobatch.engine.registry import CHAINS, TASKS, workload
from isobatch.launch.cli import ALIASES, COMMANDS, GROUPS, find_command, show_help
from isobatch.launch.commands.completion import candidates
from isobatch.launch.commands.describe import describe, usual_flags
from isobatch.tests.paths import ROOT


def described(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert describe([name, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_command_with_flags_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        rows = described(name, capsys)["flags"][name]
        assert rows or name == "completion"
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
    assert "describe pruning" in " ".join(described("compress", capsys)["notes"])


def test_presets_are_named_with_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    notes = described("recommender", capsys)["notes"]
    assert any(note.startswith("--preset ids: ") and "text off" in note for note in notes)


def test_every_command_stands_in_the_help_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_help([]) == 0
    first = capsys.readouterr().out
    shown = [name for name in COMMANDS if f"  {name:<19}" in first]
    assert 10 <= len(shown) <= 14
    for group in GROUPS:
        if f"\n{group}\n" not in first:
            assert f"  help {group} " in first
            assert show_help([group]) == 0
            page = capsys.readouterr().out
            shown += [name for name in COMMANDS if f"  {name:<19}" in page]
    assert sorted(shown) == sorted(COMMANDS)


@pytest.mark.parametrize(
    ("topic", "shown"),
    [
        ("auto", "  --dry-run  "),
        ("auto --task causal-lm", "  --adapter  "),
        ("train", "isobatch auto: "),
        ("causal-lm", "  --adapter  "),
        ("compress", "the chain compress"),
        ("submit", "  submit --to k8s"),
        ("runs", "  runs logs "),
        ("runs logs", "  --follow  "),
    ],
)
def test_help_of_a_word(topic: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_help([*topic.split(), "--help"]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("task", [*TASKS, str(ROOT / "tests" / "tasks" / "failing.py") + ":Line"])
def test_a_task_shows_the_flags_that_people_set(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {row["flag"]: row for rows in described(task, capsys)["flags"].values() for row in rows}
    usual = usual_flags(workload(task))
    assert set(usual) <= set(whole)
    assert len(usual) < 25
    assert describe([task]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^  (--\S+)", text, re.M) == [flag for flag in whole if flag in usual]
    assert f"{len(usual)} of {len(whole)} flags" in text
    assert max(map(len, text.splitlines())) <= 100
    assert describe([task, "--all"]) == 0
    assert re.findall(r"^  (--\S+)", capsys.readouterr().out, re.M) == list(whole)


@pytest.mark.parametrize(
    ("typed", "begun", "fits"),
    [
        ("", "", {"auto", "runs", "submit"}),
        ("runs", "", {"logs", "rm"}),
        ("submit --to", "", {"slurm", "local"}),
        ("help", "", {"auto", "causal-lm", *GROUPS}),
        ("auto --task", "", {*TASKS, *CHAINS}),
        ("auto --quiet", "--", {"--dry-run", "--lr"}),
        ("auto --task causal-lm", "--", {"--adapter", "--processes", "--name"}),
        ("plan --task causal-lm --adapter", "", {"none", "qlora"}),
        ("plan --task causal-lm --precision", "b", {"bf16"}),
        ("sft", "--", {"--adapter"}),
        ("runs logs", "--", {"--follow"}),
        ("completion", "", {"bash", "zsh", "fish"}),
        ("chat", "", set()),
        ("auto --data", "", set()),
    ],
)
def test_tab_completes_from_the_tables(typed: str, begun: str, fits: set[str]) -> None:
    found = candidates(typed.split(), begun)
    assert fits <= set(found)
    assert bool(found) == bool(fits)
