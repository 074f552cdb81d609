"""The console: progress lines and a progress bar for the user, and the same lines in log.txt."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes, format_duration, now, printable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LINE_MARK = "\x1eisobatch\x1e"
"""Marks the lines of a child process that `auto` shows to the user."""
_SECONDS_BETWEEN_LINES = 5.0


class Console:
    """Lines on standard error and in log.txt (`log`), from the main process; a progress bar on a terminal.

    `mark` is put before each line on standard error.
    """

    def __init__(self, log: Path | None, quiet: bool = False, mark: str = "") -> None:
        self.quiet, self.mark = quiet, mark
        self.stream = log.open("a", encoding="utf-8", buffering=1) if log else None
        self.bar: Any = None
        self._last = -1e9

    def say(self, text: str, always: bool = False) -> None:
        """Write a line to log.txt and, unless quiet, to standard error. `always`: even if quiet."""
        text = printable(text)
        if self.stream:
            self.stream.write(text + "\n")
        if self.quiet and not always:
            return
        with contextlib.suppress(OSError):  # standard error may be closed; training goes on
            self._show(text)

    def _show(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        else:
            print(self.mark + text.replace("\n", f"\n{self.mark}"), file=sys.stderr, flush=True)

    def start_phase(self, phase: str, start: int, total: int) -> None:
        """Begin a phase at step `start` of `total`; a terminal gets a progress bar."""
        if sys.stderr.isatty() and not self.quiet:
            from tqdm import tqdm

            self.bar = tqdm(
                total=total, initial=start, desc=phase, unit="step", dynamic_ncols=True, file=sys.stderr
            )

    def show_step(self, row: dict[str, Any], total: int, seconds_left: float) -> None:
        """Show a logged step: at every step on a bar, every few seconds as a line."""
        figures = _figures(row)
        if self.bar is not None:
            self.bar.set_postfix_str(figures, refresh=False)
            with contextlib.suppress(OSError):
                self.bar.update(row["step"] - self.bar.n)
        if now() - self._last >= _SECONDS_BETWEEN_LINES or row["step"] == total:
            self._last = now()
            line = f"{row['phase']} {row['step']}/{total}  {figures}  ETA {format_duration(seconds_left)}"
            if self.bar is None:
                self.say(line)
            elif self.stream:
                self.stream.write(line + "\n")

    def end_phase(self) -> None:
        """Close the progress bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _figures(row: dict[str, Any]) -> str:
    wait = row["data_seconds"] / max(1e-9, row["step_seconds"])
    rate = row.get("tokens_per_second", 0.0)
    unit = (
        "samples" if rate == row.get("samples_per_second") else "tokens"
    )  # samples of length 1, such as pairs of ids
    used = f"  MFU {row['mfu']:.1%}" if "mfu" in row else ""
    return (
        f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  {rate:,.0f} {unit}/s{used}"
        f"  {format_bytes(row['memory_bytes'])}  data wait {wait:.0%}"
    )


def format_metrics(metrics: Mapping[str, Any], form: str) -> str:
    """Metrics as `name value` in one line; floats are formatted by `form`, such as .4f."""
    words = [
        f"{name} {value:{form}}" if isinstance(value, float) else f"{name} {value}"
        for name, value in metrics.items()
        if isinstance(value, float | int | str)
    ]
    return "  ".join(words)
