"""Medians, tables, and result files with the machine they were measured on; for all benchmarks."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import re
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from isobatch.core.package import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Row = dict[str, Any]
"""One line of a table; rows of one measurement may have different columns."""
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("torch", "transformers", "accelerate", "numpy")


def interleaved(contenders: Mapping[str, Callable[[], Row]], repeats: int) -> dict[str, list[Row]]:
    """Run every contender in turn, `repeats` times, so that other load on the machine affects all alike."""
    found: dict[str, list[Row]] = {name: [] for name in contenders}
    for number in range(repeats):
        for name, run in contenders.items():
            print(f"round {number + 1} of {repeats}: {name}", file=sys.stderr)
            found[name].append(run())
    return found


def middle(rows: Sequence[Row], column: str) -> float:
    return float(median(row[column] for row in rows))


def paired_ratio(ours: Sequence[Row], theirs: Sequence[Row], column: str) -> float:
    """Median over the rounds of ours / theirs: figures of one round were taken under the same load."""
    return float(median(a[column] / b[column] for a, b in zip(ours, theirs, strict=True)))


def table(rows: Sequence[Row]) -> str:
    """Aligned text; a new header wherever the columns change."""
    lines: list[str] = []
    for _, same in itertools.groupby(rows, key=list):
        group = [*same]
        cells = [[*group[0]], *([_cell(v) for v in row.values()] for row in group)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        lines.append("")
        for line in cells:
            lines.append("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(name: str, rows: Sequence[Row]) -> str:
    """Write the rows to results/NAME-MACHINE.json; returns the path within the repository."""
    found = machine()
    file = result_file(name, found["device"])
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps({"machine": found, "rows": list(rows)}, indent=1) + "\n")
    return str(file.relative_to(ROOT))


def result_file(name: str, device: str) -> Path:
    """Where the results of a benchmark on a device of this name are."""
    return RESULTS / f"{name}-{_slug(device)}.json"


def machine() -> dict[str, Any]:
    """Hardware, library versions, date and load; no host name."""
    return {
        "device": _gpu() or _processor(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "load_average": [round(v, 2) for v in os.getloadavg()],
    }


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    return named[1].strip() if named else platform.processor() or platform.machine()


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
