"""The status: what a command is doing, on a terminal, through a parent process, and in a file."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys

import pytest

from isobatch.core import terminal
from isobatch.core.terminal import Activity, Console, format_activity

FIGURES = ("loss 2.3141", "1:02 left", "12,345 tokens/s", "lr 1.00e-03", "542 MB", "data wait 0%")
START = "import sys; from isobatch.core.terminal import doing, start_status, stopped_status\n"


@pytest.mark.parametrize("width", [40, 79, 120, 199])
def test_a_line_keeps_within_the_terminal_and_its_first_figures_stay(width: int) -> None:
    line = format_activity(Activity("train", 120, 308, FIGURES), width)
    assert len(line) <= width
    kept = [figure for figure in FIGURES if figure in line]
    assert kept == list(FIGURES[: len(kept)])
    assert len(kept) == {40: 0, 79: 3, 120: 6, 199: 6}[width]


def test_a_bar_is_as_full_as_the_work() -> None:
    bars = [format_activity(Activity("x", done, 10), 79, "ascii") for done in (0, 5, 10, 12)]
    assert [bar.count("=") for bar in bars] == [0, 10, 20, 20]


def in_a_terminal(program: str) -> tuple[list[str], str]:
    """The states that a terminal's last line went through, and the text that stays on it."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", START + program],
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(slave)
    text = b""
    while select.select([master], [], [], 20)[0]:
        try:
            block = os.read(master, 65536)
        except OSError:  # the last process has closed it
            break
        if not block:
            break
        text += block
    os.close(master)
    assert child.wait() == 0
    rows = text.decode().split("\r\n")
    shown = [part for row in rows for part in row.split("\r\x1b[K")]
    return shown, "\n".join(re.sub(r".*\r\x1b\[K", "", row) for row in rows)


def test_on_a_terminal_the_line_leaves_nothing_behind() -> None:
    shown, left = in_a_terminal(
        "start_status()\n"
        "with stopped_status():\n"
        "    doing('slow')\n"
        "    print('an answer'); print('a note', file=sys.stderr)\n"
        "    print('begun', end='', flush=True); doing('more'); print(', ended')\n"
    )
    assert "slow ..." in shown
    assert left == "an answer\na note\nbegun, ended\n"


def test_a_child_process_relays_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    relay = terminal._Relay()  # noqa: SLF001
    relay.show(Activity("train", 3, 9, ("loss 1",)))
    (line,) = written.getvalue().removesuffix("\n").split("\n")
    assert json.loads(line.removeprefix(terminal.STATUS_MARK))["done"] == 3
    terminal.show_status_of_child(line)
    try:
        assert terminal._status.activity == Activity("train", 3, 9, ("loss 1",))  # noqa: SLF001
    finally:
        terminal.doing()


def test_steps_are_lines_where_no_terminal_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"phase": "train", "step": 9, "loss": 1.5, "lr": 1e-3, "data_seconds": 0.0, "step_seconds": 1.0}
    Console(None).show_step({**row, "memory_bytes": 5_000_000}, 9, 0.0, writes=True)
    assert capsys.readouterr().err.startswith("train 9/9  loss 1.5000  0:00 left  ")
    terminal.doing()


def test_in_a_pipe_what_is_counted_is_said_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(terminal, "now", lambda: clock[0])
    lines = terminal._Lines("[isobatch] ")  # noqa: SLF001
    for second in range(25):
        clock[0] = 100.0 + second
        activity = Activity("tokenizing train", second, 40, ("0:20 left",))
        lines.show(activity)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"[isobatch] tokenizing train: {n}/40, 0:20 left" for n in (10, 20)]
