"""The console of a run: lines and the progress of training for the user, and the same lines in log.txt; and
what a command answers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE
from isobatch.core.measures import CONTROL, format_bytes, format_duration, printable
from isobatch.core.terminal.status import doing, on_terminal

LINE_MARK = "\x1eisobatch\x1e"
"""Marks the lines of a child process that `auto` shows to the user."""


class Console:
    """Lines on standard error and in log.txt (`log`), from the main process; a bar on a terminal.

    `mark` is put before each line on standard error.
    """

    def __init__(self, log: Path | None, quiet: bool = False, mark: str = "") -> None:
        self.quiet, self.mark = quiet, mark
        self.stream = log.open("a", encoding="utf-8", buffering=1) if log else None

    def say(self, text: str, always: bool = False) -> None:
        """Write a line to log.txt and, unless quiet, to standard error. `always`: even if quiet."""
        text = printable(text)
        if self.stream:
            self.stream.write(text + "\n")
        if self.quiet and not always:
            return
        with contextlib.suppress(OSError):  # standard error may be closed; training goes on
            print(self.mark + text.replace("\n", f"\n{self.mark}"), file=sys.stderr, flush=True)

    def show_step(self, row: dict[str, Any], total: int, seconds_left: float, writes: bool) -> None:
        """Show a step on a terminal's bar. `writes`: also as a line, in log.txt where there is a bar."""
        figures = _figures(row, seconds_left)
        if on_terminal():
            doing(row["phase"], row["step"], total, figures)
        else:  # these lines say it
            doing()
        if writes:
            line = "  ".join((f"{row['phase']} {row['step']}/{total}", *figures))
            if not on_terminal():
                self.say(line)
            elif self.stream:
                self.stream.write(line + "\n")


def _figures(row: dict[str, Any], seconds_left: float) -> tuple[str, ...]:
    """The figures of a step, the most important one first."""
    wait = row["data_seconds"] / max(1e-9, row["step_seconds"])
    rate = row.get("tokens_per_second", 0.0)
    # Samples of length 1, such as pairs of ids, have as many tokens as samples.
    unit = "samples" if rate == row.get("samples_per_second") else "tokens"
    return (
        f"loss {row['loss']:.4f}",
        f"{format_duration(seconds_left)} left",
        f"{rate:,.0f} {unit}/s",
        f"lr {row['lr']:.2e}",
        *([f"MFU {row['mfu']:.1%}"] if "mfu" in row else []),
        format_bytes(row["memory_bytes"]),
        f"data wait {wait:.0%}",
    )


def format_metrics(metrics: Mapping[str, Any], form: str) -> str:
    """Metrics as `name value` in one line; floats are formatted by `form`, such as .4f."""
    words = [
        f"{name} {value:{form}}" if isinstance(value, float) else f"{name} {value}"
        for name, value in metrics.items()
        if isinstance(value, float | int | str)
    ]
    return "  ".join(words)


def print_lines(*lines: object, quiet: bool = False) -> None:
    """Print lines for the user on standard error, unless --quiet."""
    for line in () if quiet else lines:
        print(printable(line), file=sys.stderr)


def print_answer(found: Any, text: str, as_json: bool) -> int:
    """Print what a command found: one JSON object, or its text for a person. Returns the exit code."""
    in_ascii = str(sys.stdout.encoding).lower() != "utf-8"  # JSON has no \xe9, as it would print é
    told = atomic_files.json_text(found, ensure_ascii=in_ascii) if as_json else printable(text)
    print(CONTROL.sub(lambda sign: f"\\u{ord(sign[0]):04x}", told))
    return DONE
