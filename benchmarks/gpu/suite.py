"""Part 8, the suite: the files of tests/gpu by pytest, a row for each; that of memory is in part 5."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.benchmarks.gpu.runner import COMMAND_LINE, Part, Trial
from isobatch.core.package import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.benchmarks.report import Row

NEEDS = (*COMMAND_LINE, "pytest", "hypothesis")
MEMORY = "test_memory.py"
AT_ONCE = 3
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
    """How many tests of a file passed. Raises RuntimeError with the names of those that failed."""
    with tempfile.TemporaryDirectory() as place:
        found = Path(place) / "found.xml"
        words = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "gpu" / file)]
        words += ["-n", str(AT_ONCE)] if importlib.util.find_spec("xdist") and file else []
        ended = subprocess.run(
            [*words, f"--junitxml={found}", "-p", "no:cacheprovider", "--basetemp", f"{place}/tests"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
            capture_output=True,
            text=True,
            check=False,
        )
        if not found.exists():
            raise RuntimeError(f"pytest ended with {ended.returncode}: {ended.stdout[-1500:]}")
        return figures(ElementTree.parse(found).getroot())


def figures(suites: ElementTree.Element) -> Row:
    """Counts from pytest's XML, and why tests were skipped. Raises RuntimeError where one failed."""
    cases = list(suites.iter("testcase"))
    failed = {
        case.get("name"): (found[0].get("message") or "").partition("\n")[0]
        for case in cases
        if (found := [*case.iter("failure"), *case.iter("error")])
    }
    reasons = [skip.get("message") or "" for case in cases for skip in case.iter("skipped")]
    if failed:
        first = next(iter(failed))
        raise RuntimeError(
            f"{len(failed)} of {len(cases)} failed: {', '.join(map(str, failed))}\n{failed[first]}"
        )
    why = sorted({re.sub(r"\s+", " ", reason) for reason in reasons})
    passed = len(cases) - len(reasons)
    return {"passed": passed, "skipped": len(reasons), "because": "; ".join(why) or "-"}
