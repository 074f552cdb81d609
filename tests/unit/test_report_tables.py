"""The tables of a report as text."""

import pytest

from isobatch.launch.report.tables import differences_table, metric_line, text_table

ROWS = [["model", "accuracy", "speed"], ["a long name", "0.91", "2.00x"], ["b", "0.9", "baseline of torch"]]


@pytest.mark.parametrize(("width", "columns"), [(5, 1), (20, 1), (21, 2), (39, 2), (40, 3), (200, 3)])
def test_a_table_keeps_within_the_terminal_by_leaving_out_its_last_columns(width: int, columns: int) -> None:
    lines = text_table(ROWS, width).splitlines()
    assert lines[0].split() == ROWS[0][:columns]
    assert columns == 1 or max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("bits_per_byte", 1.23456, "bits per byte: 1.235"),
        ("file_bytes", 17364192, "file: 17 MB"),
        ("accuracy_ci95", [0.811686, 0.881655], "accuracy, 95 % interval: 0.8117 to 0.8817"),
        ("accuracy_ci95", [0.8], "accuracy ci95: 0.8"),
        ("heads_left", [8, 10], "heads left: 8, 10"),
    ],
)
def test_a_metric_is_a_line_in_words(name: str, value: object, line: str) -> None:
    assert metric_line(name, value) == line


def test_a_field_of_one_task_alone_is_no_difference() -> None:
    one = {"run": "a", "recipe": {"task": "x", "lr": 0.1, "seed": 0, "model": "/home/me/models/base"}}
    two = {
        "run": "b",
        "recipe": {"task": "y", "lr": 0.2, "seed": 0, "bits": 4, "model": "/home/me/big"},
    }
    assert differences_table([one, two]) == [
        ["recipe", "a", "b"], ["task", "x", "y"], ["lr", "0.1", "0.2"], ["model", "models/base", "me/big"]
    ]  # fmt: skip
