"""Lines and tables that keep within a width, and commands to type next that are such."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from isobatch.core.flags import flags_of
from isobatch.core.measures import aligned, wrapped
from isobatch.engine.registry import TASKS, workload
from isobatch.launch.cli import COMMANDS, find_command
from isobatch.launch.commands.auto import next_lines
from isobatch.launch.local.arguments import known_flags, parse_request
from isobatch.launch.predicting import tables
from isobatch.models.base import Task
from isobatch.tests.paths import ROOT

WORDS = "one fairly long remark about a run, and/with/a/path/that/is/longer/than/any/column/may/be"
ROWS = [["name", "value", "why"], *([f"row {i}", str(7**i), WORDS[: 9 * i]] for i in range(10))]


@pytest.mark.parametrize("width", [10, 21, 40, 80, 100])
@pytest.mark.parametrize("columns", [1, 3, 9])
def test_a_table_keeps_within_a_width_and_loses_nothing(width: int, columns: int) -> None:
    rows = [(row * 3)[:columns] for row in ROWS]
    lines = aligned(rows, width)
    assert max(map(len, lines)) <= width
    said = "".join("".join(lines).split())
    for row in rows:
        for cell in row:
            assert all(said.count(letter) >= cell.count(letter) for letter in set(cell) - {" "})
    assert aligned(rows, 10_000) == aligned(rows)
    assert len(aligned(rows)) == len(rows)


def test_a_figure_stays_with_its_name_where_a_line_is_broken() -> None:
    line = "runs/a: done, test: " + "  ".join(f"metric_{i} {i / 7:.4f}" for i in range(20))
    told = wrapped(line, 80).splitlines()
    assert max(map(len, told)) <= 80
    assert all(len(part.split()) % 2 == 0 for part in told[1:])
    assert " ".join(part.strip() for part in told).split() == line.split()


@pytest.mark.parametrize("task", [*TASKS, ""])
def test_the_commands_after_a_run_have_names_and_flags_that_there_are(task: str) -> None:
    commands = (workload(task).task if task else Task).follow_ups
    assert len(commands) == 3
    for command in commands:
        name, words = find_command(
            shlex.split(command.format(run="runs/a", by=" --by ease", live="--from runs/a"))
        )
        flags = {*flags_of(COMMANDS[name].options)} | ({"task", "from"} if name == "auto" else set())
        if name == "auto":
            flags |= known_flags(words[1])
        asked = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
        assert asked <= flags, command
        assert "runs/a" in words
        options = dict(itertools.pairwise(words))
        assert options.get("--out", ".csv").endswith(tables.OUT_ENDINGS)
        assert "--to" not in options or options["--to"] in workload(task).task.exports


AS_MANY, NONE = " --patience 0 --steps 21", " --patience 0 --steps 0"


@pytest.mark.parametrize(
    ("preset", "best", "patience", "more"),
    [
        *(("ids", None, 10, f"--like runs/a{AS_MANY}"), ("sequence", "model", 10, f"--like runs/a{AS_MANY}")),
        *(("ids", "model", 0, "--like runs/a"), ("ids", "ease", 10, f"--from runs/a{NONE}")),
        *(("ids", "0.3 ease + 0.7 als", 0, f"--from runs/a{NONE}"), ("classics", "ease", 0, "--from runs/a")),
        *(
            ("ids", "0.3 model + 0.7 als", 10, f"--from runs/a{AS_MANY}"),
            ("classics", None, 0, "--from runs/a"),
        ),
        *(("ids", "night", 0, "--from runs/a"), ("classics", "night", 0, "--from runs/a")),
    ],
)
def test_a_network_that_ranks_the_lists_learns_anew_to_go_live(
    preset: str, best: str | None, patience: int, more: str
) -> None:
    """As long as was best. Else the baselines keep their settings, and it goes on where a blend has it."""
    recipe = parse_request(["--task", "recommender", "--preset", preset], "auto").recipe
    live = {"run": "runs/b", "checkpoint": "ids-9", "digest": ""} if best == "night" else None
    asked = dataclasses.replace(recipe, patience=patience, starts_from=live)
    blend = {"best_on_validation": "blend", "blend_of": best} if "+" in str(best) else None
    metrics = blend or ({} if best in (None, "night") else {"best_on_validation": best})
    kept = {"exported": "ids-21", "summary": lambda: {"metrics": metrics}}
    run = SimpleNamespace(recipe=asked, folder=Path("runs/a"), **kept)
    assert next_lines(run)[-1] == f"  isobatch auto --task recommender {more} --split none --data demo"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("preset", "chosen", "ends", "by"),
    [
        ("sequence", "ease", (-0.01, 0.03), " --by ease"),
        ("sequence", "model", (0.01, 0.03), " --by ease"),
        ("sequence", None, (0.01, 0.03), " --by ease"),
        ("sequence", "model", (-0.01, 0.03), ""),
        ("classics", "ease", (0.01, 0.03), ""),
    ],
)
def test_the_lists_of_a_network_that_lost_are_offered_by_what_ranks_better(
    preset: str, chosen: str | None, ends: tuple[float, float], by: str
) -> None:
    recipe = parse_request(["--task", "recommender", "--preset", preset], "auto").recipe
    metrics = {"full_ease_ndcg@10": 0.32, "full_ease_ndcg@10_difference_ci95": [*ends]}
    metrics |= {"full_ndcg@10": 0.3, "held_out_users": 800} | (
        {"best_on_validation": chosen} if chosen else {}
    )
    kept = {"exported": "", "summary": lambda: {"metrics": metrics}}
    told = next_lines(SimpleNamespace(recipe=recipe, folder=Path("runs/a"), **kept))  # type: ignore[arg-type]
    assert told[:2] == [f"  isobatch serve runs/a{by}", f"  isobatch recommend runs/a{by} --out lists.csv"]


def test_a_path_is_whole_where_a_line_is_broken() -> None:
    path = "/scratch/groups/nlp/" + "a-long-name/" * 9
    assert path in wrapped(f"there is no file {path}: give one", 40).splitlines()[1]


def test_what_commands_say_keeps_to_the_terminal() -> None:
    """By `print_lines`: within the width of a terminal, and whole lines in a pipe."""
    own = {"launch/local/run_setup.py", "launch/commands/chat.py"}  # samples and answers
    for file in sorted((ROOT / "launch").rglob("*.py")):
        if str(file.relative_to(ROOT)) not in own:
            assert "file=sys.stderr" not in file.read_text(encoding="utf-8"), file
