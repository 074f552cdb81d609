"""The status: what this command is doing now, said from the first second on.

    doing("measuring this machine")
    doing("train", 120, 308, ("loss 2.3141", "1:02 left"))

A terminal shows it in its last line, which is rewritten in place and cleared before anything else is printed.
A pipe or a file gets a line for what lasts long. A child process of `auto` sends it to its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from isobatch.core.measures import format_duration, now, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

STATUS_MARK = "\x1eisobatch-status\x1e"
"""Marks the lines in which a child process says what it is doing."""
RELAY_VARIABLE = "ISOBATCH_RELAY_STATUS"
"""Set for child processes whose parent shows their status on a terminal."""
SHOWN_AFTER_SECONDS = 1.0
SAID_AFTER_SECONDS = 10.0
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


def format_activity(activity: Activity, seconds: float, width: int, encoding: str = "utf-8") -> str:
    """The status line of an activity that began `seconds` ago, in at most `width` characters."""
    if not activity.total:
        return f"{activity.text} ... {format_duration(seconds)}"[:width]
    full = round(_BAR_CELLS * min(1.0, activity.done / activity.total))
    done, rest = ("\u2501", "\u2500") if encoding.lower().startswith("utf") else ("=", "-")
    line = f"{activity.text} {done * full}{rest * (_BAR_CELLS - full)} {activity.done:,}/{activity.total:,}"
    for figure in activity.figures:
        if len(line) + 2 + len(figure) > width:
            break
        line += f"  {figure}"
    return line[:width]


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone; the work goes on
        stream.write(text)
        stream.flush()


class _Stream:
    """A text stream of a terminal that has the status line cleared before it is written to."""

    def __init__(self, stream: TextIO, display: _TerminalLine) -> None:
        self.stream, self.display = stream, display

    def write(self, text: str) -> int:
        with self.display.lock:
            self.display.put("")
            self.display.inside_a_line = not text.endswith("\n") if text else self.display.inside_a_line
            return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _TerminalLine:
    """The last line of the terminal that standard error is, from the second second on."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inside_a_line = False
        """Whether somebody has begun a line and not ended it: then nothing may be put behind it."""
        self.streams = sys.stdout, sys.stderr
        self._shown, self._since = "", now()
        if sys.stdout.isatty():
            sys.stdout = _Stream(sys.stdout, self)
        sys.stderr = _Stream(sys.stderr, self)

    def tick(self, activity: Activity, began: float) -> None:
        """Called a few times a second, with what goes on since `began`."""
        with self.lock:
            if not activity.text:
                self.put("")
            elif not self.inside_a_line and now() - self._since >= SHOWN_AFTER_SECONDS:
                width, encoding = shutil.get_terminal_size().columns - 1, self.streams[1].encoding
                self.put(printable(format_activity(activity, now() - began, width, encoding)))

    def put(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            _write(self.streams[1], _CLEAR + text)

    def close(self) -> None:
        self.put("")
        sys.stdout, sys.stderr = self.streams


class _Relay:
    """Lines for the parent process, which shows them."""

    def __init__(self) -> None:
        self._sent: Activity | None = None

    def tick(self, activity: Activity, _: float) -> None:
        if activity != self._sent:
            self._sent = activity
            _write(sys.stderr, f"{STATUS_MARK}{json.dumps(asdict(activity))}\n")

    def close(self) -> None:
        self.tick(Activity(), 0.0)


class _Lines:
    """A line on standard error for what takes ten seconds, and for what has a count every ten seconds."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._said, self._said_at = "", 0.0

    def tick(self, activity: Activity, began: float) -> None:
        text, is_new = activity.text, activity.text != self._said
        if (
            not text
            or now() - max(began, self._said_at) < SAID_AFTER_SECONDS
            or not (activity.total or is_new)
        ):
            return
        self._said, self._said_at = text, now()
        count = f": {', '.join((f'{activity.done:,}/{activity.total:,}', *activity.figures))}"
        _write(sys.stderr, printable(f"{self.mark}{text}{count if activity.total else ' ...'}\n"))

    def close(self) -> None:
        pass


class _Status:
    """The activity of this process, and a thread that shows it."""

    def __init__(self) -> None:
        self.activity, self.began = Activity(), now()
        self.display: _TerminalLine | _Relay | _Lines | None = None
        self._stopped, self._thread = threading.Event(), threading.Thread()

    def change(self, activity: Activity) -> None:
        if activity.text != self.activity.text:
            self.began = now()
        self.activity = activity

    def start(self, mark: str) -> None:
        if self.display is not None:
            return
        if RELAY_VARIABLE in os.environ and mark:
            self.display = _Relay()
        elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self.display = _TerminalLine()
        else:
            self.display = _Lines(mark)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self.display, self._stopped), daemon=True)
        self._thread.start()

    def _run(self, display: _TerminalLine | _Relay | _Lines, stopped: threading.Event) -> None:
        while not stopped.wait(_PERIOD_SECONDS):
            display.tick(self.activity, self.began)

    def stop(self) -> None:
        if self.display is not None:
            self._stopped.set()
            self._thread.join(timeout=1)
            self.display.close()
            self.display = None
        self.activity = Activity()


_status = _Status()


def start_status(mark: str = "") -> None:
    """Begin to show what this process does; `mark` is put before each line that is no terminal's."""
    _status.start(mark)


@contextlib.contextmanager
def stopped_status() -> Iterator[None]:
    """At the end of the block nothing is shown any more."""
    try:
        yield
    finally:
        _status.stop()


def doing(text: str = "", done: int = 0, total: int = 0, figures: tuple[str, ...] = ()) -> None:
    """Say what this process is doing from now on; without a text, nothing that a person waits for."""
    _status.change(Activity(text, done, total, figures))


def show_status_of_child(line: str) -> None:
    """Do as a child process says in a line with STATUS_MARK."""
    found = json.loads(line.removeprefix(STATUS_MARK))
    doing(**{**found, "figures": tuple(found["figures"])})


def on_terminal() -> bool:
    """Whether a person sees the status in one line: here, or in the parent process."""
    return isinstance(_status.display, _TerminalLine | _Relay)


def _after_fork() -> None:
    """A forked child has no thread that shows anything, and a copy of a lock that may be held for ever."""
    if isinstance(_status.display, _TerminalLine):
        sys.stdout, sys.stderr = _status.display.streams
    _status.display = None


os.register_at_fork(after_in_child=_after_fork)
