"""Part 8, the suite: the files of tests/gpu by pytest, a row for each; that of memory is in part 5."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from isobatch.benchmarks.gpu.runner import COMMAND_LINE, Part, Trial
from isobatch.core.package import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.benchmarks.report import Row

NEEDS = (*COMMAND_LINE, "pytest", "hypothesis")
MEMORY = "test_memory.py"
NONE_RAN = 5
"""How pytest ends where all of a file was skipped."""
AT_ONCE = 5
"""Tests on one GPU at a time, where pytest-xdist is there: most of their time is a process that starts."""


def trials(quick: bool) -> Sequence[Trial]:
    """Without a GPU every test skips, and `--quick` takes no more time there."""
    files = sorted(f.name for f in (ROOT / "tests" / "gpu").glob("test_*.py") if f.name != MEMORY)
    if quick:
        return [Trial("all files", "gpu.suite:run", ("",), 60, NEEDS)]
    return [Trial(file, "gpu.suite:run", (file,), 300, NEEDS) for file in files]


def headline(rows: Sequence[Row]) -> str:
    return f"{sum(row['passed'] for row in rows)} passed, {sum(row['skipped'] for row in rows)} skipped"


PART = Part("tests/gpu", trials, headline, 170)


def run(file: str) -> Row:
    """How many tests of a file passed. Raises RuntimeError with the lines of those that failed."""
    words = [sys.executable, "-m", "pytest", "-rfE", "-p", "no:cacheprovider"]
    words += ["-n", str(AT_ONCE)] if importlib.util.find_spec("xdist") and file else []
    words.append(str(ROOT / "tests" / "gpu" / file))
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode not in (0, NONE_RAN):
        failed = re.findall(r"^(?:FAILED|ERROR) .*", ended.stdout, re.MULTILINE)
        raise RuntimeError(
            "\n".join(failed) or f"pytest ended with {ended.returncode}: {ended.stdout[-1500:]}"
        )
    said = ended.stdout.strip().rpartition("\n")[2]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|skipped)", said)}
    return {"passed": 0, "skipped": 0, **counts}
