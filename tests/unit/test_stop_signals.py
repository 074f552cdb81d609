"""Tests of engine/distributed/stop_signals.py: every way to ask for a stop sets the flag."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from isobatch.core.package import TRAIN_SCRIPT
from isobatch.engine.distributed.stop_signals import (
    SAVING,
    STOP_SIGNALS,
    StopFlag,
    TerminatedError,
    end_early_on_signals,
    signals_to_catch,
)
from isobatch.launch import cli

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_sets_the_flag_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopFlag() as stop:
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


def test_where_nobody_asks_for_the_flag_the_first_signal_interrupts() -> None:
    with StopFlag() as stop:
        stop.interrupts = True
        with pytest.raises(TerminatedError):
            signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        signal.raise_signal(signal.SIGTERM)  # what it ends is not disturbed again


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_before_training_is_one_line_and_75(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """While libraries are imported, which take an error of theirs for a missing library."""
    before = {n: signal.getsignal(n) for n in signals_to_catch()}

    def importing() -> int:
        try:
            os.kill(os.getpid(), number)
        except Exception:
            return 1
        return 0

    end_early_on_signals()
    try:
        assert cli.guarded(importing) == 75
        with StopFlag() as stop:  # training handles them itself
            os.kill(os.getpid(), number)
            assert stop.requested
        with pytest.raises(TerminatedError):
            os.kill(os.getpid(), number)
        with StopFlag(others_wait=True):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # a second one: other ranks wait for this one to leave
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert capsys.readouterr().err == "isobatch: stopped by a signal; what was saved before stands\n"


def test_ctrl_c_is_answered_at_once_and_once(capfd: pytest.CaptureFixture[str]) -> None:
    with StopFlag(answers=True):
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == SAVING.decode()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with StopFlag(answers=True):
        signal.raise_signal(signal.SIGTERM)
    with StopFlag():
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == ""


SIGNAL_AT_NUMPY = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGNAL)

sys.meta_path.insert(0, Finder())
sys.argv = [SCRIPT, "--task", "causal-lm"]
runpy.run_path(SCRIPT, run_name="__main__")
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_worker_that_still_imports_is_stopped_and_has_not_crashed(tmp_path: Path, name: str) -> None:
    """Slurm repeats a signal that a lost node has missed: it comes to the first worker started there."""
    code = SIGNAL_AT_NUMPY.replace("SIGNAL", name).replace("SCRIPT", repr(str(TRAIN_SCRIPT)))
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.splitlines()[-1] == "isobatch: stopped by a signal; what was saved before stands"
    assert "Traceback" not in ended.stderr
