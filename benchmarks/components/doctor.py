"""What `doctor` takes on this machine, whether it raises a false alarm, and which planted faults it finds.

    python -m benchmarks doctor

The faults are those of the tests; each is planted and looked for by a test of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time

from isobatch.benchmarks.report import Row, middle
from isobatch.core.package import ROOT, own_command

TESTS = ("tests/unit/test_doctor.py", "tests/unit/test_doctor_run.py")


def measure(quick: bool) -> list[Row]:
    """The healthy machine's time and alarms, then the faults by file."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [_look(folder) for _ in range(1 if quick else 3)]
    machine: Row = {
        "what": "this machine",
        "seconds": round(middle(runs, "seconds"), 1),
        "slowest": round(max(float(row["seconds"]) for row in runs), 1),
        "checks": runs[0]["checks"],
        "alarms": sum(int(row["alarms"]) for row in runs),
    }
    return [machine, *(_faults(path) for path in TESTS)]


def _look(folder: str) -> Row:
    began = time.perf_counter()
    done = subprocess.run(
        own_command("doctor", "--json"), cwd=folder, capture_output=True, text=True, check=False
    )
    checks = json.loads(done.stdout)["checks"]
    return {
        "seconds": time.perf_counter() - began,
        "checks": len(checks),
        "alarms": sum(check["state"] != "ok" for check in checks),
    }


def _faults(path: str) -> Row:
    words = [sys.executable, "-m", "pytest", "-q", "--no-header", "-rA", "-m", "not slow", path]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    results = [
        line.split(" ", 1)[0] for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))
    ]
    return {"what": path, "tests": len(results), "not found": results.count("FAILED")}
