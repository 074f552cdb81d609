"""Stop signals: a signal only sets a flag, on which the ranks agree between two steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""SIGHUP: the terminal was closed."""


def signals_to_catch() -> list[signal.Signals]:
    """The stop signals, but not SIGHUP where it is ignored, as nohup does for what it starts.

    The others are caught in any case: launchers ignore them, and pass that on to their workers.
    """
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not deaf]


class TerminatedError(KeyboardInterrupt):
    """A stop signal came before training or after it: no library takes it for an error of its own."""


def end_early_on_signals() -> None:
    """Until training handles stop signals itself, one ends the process by a TerminatedError."""

    def end(number: int, _: FrameType | None) -> None:
        raise TerminatedError(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        for number in signals_to_catch():
            if number != signal.SIGINT:  # Python's own handler interrupts
                signal.signal(number, end)


SAVING = b"isobatch: stopping within a few steps, then saving; press Ctrl-C again to stop at once\n"


class StopFlag:
    """A flag set by a stop signal in its `with` block; a second SIGINT interrupts at once."""

    def __init__(self, catch_signals: bool = True, others_wait: bool = False, answers: bool = False) -> None:
        self.catch_signals = catch_signals
        """False in another program's process, whose signal handlers must not be replaced."""
        self.others_wait = others_wait
        """Whether other ranks wait for this process to leave: a signal after the block then does not end it,
        except SIGINT. Schedulers and launchers both pass a signal on, so that a rank may get it twice."""
        self.answers = answers
        """Whether Ctrl-C is answered on standard error before the step has ended."""
        self.requested = self.interrupts = False
        """Whether a signal came; whether one raises TerminatedError, where nobody asks for the flag."""
        self.reason = "asked to stop by a signal"
        self.cause = ""
        self._previous_handlers: dict[int, Any] = {}

    def _handle_signal(self, number: int, _: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.answers and number == signal.SIGINT:
            # A stream may be in the middle of a line of its own: it must not be entered again.
            os.write(2, (b"\r\x1b[K" if os.isatty(2) else b"") + SAVING)
        self.requested, interrupts, self.interrupts = True, self.interrupts, False
        if interrupts:
            raise TerminatedError(signal.Signals(number).name)

    def request(self, reason: str, cause: str = "lost") -> None:
        """Ask for a stop without a signal, by default because another process is lost."""
        if not self.requested:
            self.requested, self.reason, self.cause = True, reason, cause

    def __enter__(self) -> StopFlag:
        # Python lets only the main thread set handlers: a run in another thread catches no signals.
        if self.catch_signals and threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                number: signal.signal(number, self._handle_signal) for number in signals_to_catch()
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            ignored = self.others_wait and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ignored else handler)
