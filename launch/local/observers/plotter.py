"""Draws a run's figures in a process of its own, also while the run trains."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from isobatch.core.package import own_command
from isobatch.engine import consent

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder

LOWEST_PRIORITY = 19


class Plotter:
    """Starts `isobatch report RUN --png`; at most one at a time. `draws`: whether this rank does."""

    def __init__(self, run: RunFolder, draws: bool) -> None:
        self.run, self.draws = run, draws
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Draw in the background, at the lowest priority, unless that is still going on."""
        if self.draws and (self._process is None or self._process.poll() is not None):
            self._process = self._spawn(("nice", "-n", str(LOWEST_PRIORITY)))

    def finish(self) -> None:
        """Draw what there is at the end, and wait for it."""
        if self._process is not None:
            self._process.wait()
        if self.draws:
            self._spawn(()).wait()

    def _spawn(self, before: tuple[str, ...]) -> subprocess.Popen[bytes]:
        words = [*before, *own_command("report", str(self.run.folder), "--png")]
        silent = subprocess.DEVNULL
        environment = {**os.environ, **consent.environment()}
        return subprocess.Popen(words, env=environment, stdin=silent, stdout=silent, stderr=silent)
