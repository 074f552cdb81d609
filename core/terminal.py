"""The terminal: what this command is doing now, the lines of a run, and what a command answers.

    doing("measuring this machine")
    doing("train", 120, 308, ("loss 2.3141", "1:02 left"))

A terminal shows the status in its last line, which is rewritten in place and cleared before anything else is
printed. A pipe or a file gets a line every ten seconds of what is counted. A child process of `auto` sends it
to its parent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from isobatch.core import atomic_files
from isobatch.core.errors import DONE
from isobatch.core.measures import CONTROL, aligned, format_bytes, format_duration, now, printable, wrapped

STATUS_MARK = "\x1eisobatch-status\x1e"
"""Marks the lines in which a child process says what it is doing."""
RELAY_VARIABLE = "ISOBATCH_RELAY_STATUS"
"""Set for child processes whose parent shows their status on a terminal."""
LINE_MARK = "\x1eisobatch\x1e"
"""Marks the lines of a child process that `auto` shows to the user."""
SAID_AFTER_SECONDS = 10.0
PIPE_COLUMNS = 100
"""Characters of a line where no terminal limits them."""
_PERIOD_SECONDS = 0.2
_BAR_CELLS = 20
_CLEAR = "\r\x1b[K"


@dataclass(frozen=True, slots=True)
class Activity:
    """What a command is doing: a text; where there is a count, `done` of `total`; and figures of it."""

    text: str = ""
    done: int = 0
    total: int = 0
    figures: tuple[str, ...] = ()
    """The most important one first: those for which the line has no room are left out."""


def format_activity(activity: Activity, width: int, encoding: str = "utf-8") -> str:
    """The status line of an activity, in at most `width` characters."""
    if not activity.total:
        return f"{activity.text} ..."[:width]
    full = round(_BAR_CELLS * min(1.0, activity.done / activity.total))
    done, rest = ("\u2501", "\u2500") if encoding.lower().startswith("utf") else ("=", "-")
    line = f"{activity.text} {done * full}{rest * (_BAR_CELLS - full)} {activity.done:,}/{activity.total:,}"
    for figure in activity.figures:
        if len(line) + 2 + len(figure) > width:
            break
        line += f"  {figure}"
    return line[:width]


def columns(stream: TextIO | None = None) -> int:
    """Characters of a line of a stream, by default of standard output."""
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else PIPE_COLUMNS


def on_screen(text: str, stream: TextIO | None = None) -> str:
    """Text within the width of a terminal; whole in a pipe or a file, where programs read lines."""
    return wrapped(text, columns(stream)) if (stream or sys.stdout).isatty() else text


def rendered(module: str, name: str, /, **shown: Any) -> str:
    """The text that NAME.jinja, beside the module of this file, makes of what is shown: values, functions."""
    is_page, template = name.endswith(".html"), Path(module).with_name(f"{name}.jinja")
    page = compiled(template, autoescape=is_page, trim_blocks=not is_page)
    return printable(page.render(**shown)).rstrip("\n")


@functools.lru_cache
def compiled(template: Path, **how: Any) -> Any:
    """A template as code, which takes longer to make than to fill in."""
    from jinja2 import Environment, StrictUndefined

    return Environment(undefined=StrictUndefined, **how).from_string(template.read_text(encoding="utf-8"))


def table(rows: Sequence[Sequence[str]], width: int = 0) -> str:
    """Rows as lines for standard output with their columns below each other: within `width`, by default that
    of a terminal, and whole in a pipe.
    """
    return "\n".join(aligned(rows, width or (columns() if sys.stdout.isatty() else 0)))


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone; the work goes on
        stream.write(text)
        stream.flush()


class _Stream:
    """A text stream of a terminal that has the status line cleared before it is written to."""

    def __init__(self, stream: TextIO, display: _TerminalLine) -> None:
        self.stream, self.display = stream, display

    def write(self, text: str) -> int:
        self.display.put("")
        self.display.inside_a_line = not text.endswith("\n") if text else self.display.inside_a_line
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _TerminalLine:
    """The last line of the terminal that standard error is."""

    def __init__(self) -> None:
        self.inside_a_line = False
        """Whether somebody has begun a line and not ended it: then nothing may be put behind it."""
        self.streams = sys.stdout, sys.stderr
        self._shown = ""
        if sys.stdout.isatty():
            sys.stdout = _Stream(sys.stdout, self)
        sys.stderr = _Stream(sys.stderr, self)

    def show(self, activity: Activity) -> None:
        width, encoding = shutil.get_terminal_size().columns - 1, self.streams[1].encoding
        if not self.inside_a_line:
            self.put(printable(format_activity(activity, width, encoding)) if activity.text else "")

    def put(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            _write(self.streams[1], _CLEAR + text)


class _Relay:
    """Lines for the parent process, which shows them."""

    def show(self, activity: Activity) -> None:
        _write(sys.stderr, f"{STATUS_MARK}{json.dumps(asdict(activity))}\n")


class _Lines:
    """A line on standard error every ten seconds of what has a count."""

    def __init__(self, mark: str) -> None:
        self.mark, self._text, self._since = mark, "", now()

    def show(self, activity: Activity) -> None:
        if activity.text != self._text:
            self._text, self._since = activity.text, now()
        if activity.total and now() - self._since >= SAID_AFTER_SECONDS:
            self._since = now()
            figures = (f"{activity.done:,}/{activity.total:,}", *activity.figures)
            _write(sys.stderr, printable(f"{self.mark}{activity.text}: {', '.join(figures)}\n"))


class _Status:
    """What this process is doing, and what shows it."""

    activity, shown_at = Activity(), 0.0
    display: _TerminalLine | _Relay | _Lines | None = None


_status = _Status()


def start_status(mark: str = "") -> None:
    """Begin to show what this process does; `mark` is put before each line that is no terminal's."""
    if _status.display is None:
        is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        is_child = RELAY_VARIABLE in os.environ and mark
        _status.display = _Relay() if is_child else _TerminalLine() if is_terminal else _Lines(mark)


@contextlib.contextmanager
def stopped_status() -> Iterator[None]:
    """At the end of the block nothing is shown any more."""
    try:
        yield
    finally:
        if _status.display is not None:
            _status.display.show(Activity())
        if isinstance(_status.display, _TerminalLine):
            sys.stdout, sys.stderr = _status.display.streams
        _status.display, _status.activity = None, Activity()


def doing(text: str = "", done: int = 0, total: int = 0, figures: tuple[str, ...] = ()) -> None:
    """Say what this process is doing from now on; without a text, nothing that a person waits for."""
    is_due = text != _status.activity.text or now() - _status.shown_at >= _PERIOD_SECONDS
    _status.activity = Activity(text, done, total, figures)
    if is_due and _status.display is not None:
        _status.shown_at = now()
        _status.display.show(_status.activity)


def show_status_of_child(line: str) -> None:
    """Do as a child process says in a line with STATUS_MARK."""
    found = json.loads(line.removeprefix(STATUS_MARK))
    doing(**{**found, "figures": tuple(found["figures"])})


def on_terminal() -> bool:
    """Whether a person sees the status in one line: here, or in the parent process."""
    return isinstance(_status.display, _TerminalLine | _Relay)


SECONDS_BETWEEN_LINES = 5.0
"""Steps and evaluations that come sooner are in files alone."""


class Console:
    """Lines on standard error and in log.txt (`log`), from the main process; a bar on a terminal.

    `mark` is put before each line on standard error.
    """

    def __init__(self, log: Path | None, quiet: bool = False, mark: str = "") -> None:
        self.quiet, self.mark = quiet, mark
        self.stream = log.open("a", encoding="utf-8", buffering=1) if log else None

    def say(self, text: str, always: bool = False, shown: bool = True) -> None:
        """Write a line to log.txt and, where `shown`, to standard error: unless quiet, or `always`."""
        text = printable(text)
        if self.stream:
            self.stream.write(text + "\n")
        if not shown or (self.quiet and not always):
            return
        if not self.mark:  # else the parent process shows it
            text = on_screen(text, sys.stderr)
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
            self.say(line, shown=not on_terminal())


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


def format_metrics(metrics: Mapping[str, Any], form: str, between: str = "  ") -> str:
    """Metrics as `name value`, in one line unless `between` parts them; floats are formatted by `form`, such
    as .4f.
    """
    words = [
        f"{name} {value:{form}}" if isinstance(value, float) else f"{name} {value}"
        for name, value in metrics.items()
        if isinstance(value, float | int | str)
    ]
    return between.join(words)


def print_lines(*lines: object, quiet: bool = False) -> None:
    """Print lines for the user on standard error, unless --quiet."""
    for line in () if quiet else lines:
        print(on_screen(printable(line), sys.stderr), file=sys.stderr)


def fitted(text: str) -> str:
    """A text for a person with its long lines broken: at 80 columns on a terminal, and never beyond its own
    width; in a pipe at 100. A line in two columns goes on in the second.
    """
    width = min(80, columns()) if sys.stdout.isatty() else PIPE_COLUMNS
    lines = []
    for line in text.splitlines():
        column = next(re.finditer(r" *(?:\S+(?: \S+)* {2,})?", line)).end()
        indent = " " * (column if column < width // 2 else 4)
        lines += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def print_answer(found: Any, text: str, as_json: bool) -> int:
    """Print what a command found: one JSON object, or its text for a person. Returns the exit code."""
    in_ascii = str(sys.stdout.encoding).lower() != "utf-8"  # JSON has no \xe9, as it would print é
    told = atomic_files.json_text(found, ensure_ascii=in_ascii) if as_json else printable(text)
    print(CONTROL.sub(lambda sign: f"\\u{ord(sign[0]):04x}", told))
    return DONE
