"""What the log of a million steps costs: to write, to cut when a run resumes, to audit, to draw, to compare.

`python -m benchmarks long-log`. The run is no training: its rows follow from a recipe, with real seals.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TASK = "causal-lm"
SCRIPT = """
import resource, runpy, sys, time
runpy.run_path(sys.argv[1])
from isobatch.benchmarks.components import long_log
began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
long_log.PARTS[sys.argv[2]](long_log.Path(sys.argv[3]))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(time.process_time() - began, grown / 1024)
"""


def measure(quick: bool) -> list[dict[str, Any]]:
    """Rows per part: processor seconds, and MB that the process grew by."""
    steps, root = 20_000 if quick else 1_000_000, Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as name:
        os.environ["ISOBATCH_CACHE"] = f"{name}/cache"
        folder = Path(name) / "run"
        began = time.process_time()
        _write(folder, steps)
        rows = [{"part": "write", "steps": steps, "cpu_s": round(time.process_time() - began, 2), "mb": 0}]
        for part in PARTS:
            command = [sys.executable, "-c", SCRIPT, str(root / "launch" / "_root.py"), part, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
            seconds, grown = map(float, done.stdout.split())
            rows.append({"part": part, "steps": steps, "cpu_s": round(seconds, 2), "mb": round(grown)})
    return rows


def _write(folder: Path, steps: int) -> None:
    """The records of a run of so many steps, with a ledger."""
    from isobatch.engine.loading.prepare import prepare
    from isobatch.engine.loading.sampler import extend_chain, make_sampler
    from isobatch.engine.optimization.schedule import learning_rate, phase_schedules
    from isobatch.engine.registry import workload
    from isobatch.engine.runs.metrics_log import MetricsLog
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.runs.run_options import RunOptions

    chosen = workload(TASK)
    recipe, _ = chosen.complete({"steps": steps, "eval_every": str(steps // 10)})
    task, data = chosen.make(recipe)
    facts = prepare(data)
    run = RunFolder.create(folder, recipe, facts, RunOptions())
    sampler = make_sampler(recipe, data.open(Path(facts.folder), "train"), task.cohort)
    (schedule,) = phase_schedules(recipe, task.phases(), sampler.steps_per_epoch)
    log = MetricsLog(run, writes=True, ledger=True)
    log.begin(["train"])
    chain, seen = "", 0
    for number, batch in zip(range(steps), sampler.batches(), strict=False):
        chain, seen = extend_chain(chain, batch), seen + len(batch)
        rate = learning_rate(recipe, schedule.lr, number, schedule.steps, schedule.steps_per_epoch)
        row = {
            "phase": "train",
            "step": number + 1,
            "epoch": round((number + 1) / 306, 6),
            "loss": 3.0,
            "lr": rate,
            "grad_norm": 1.0,
        }
        row |= {"samples": seen, "tokens": 30 * seen, "step_seconds": 0.123456, "data_seconds": 0.00012}
        row |= {"samples_per_second": 194.4, "tokens_per_second": 5832.1, "padding": 0.0321}
        log.log_step({**row, "chain": chain, "memory_bytes": 4_000_000_000}, batch)
        if (number + 1) % (steps // 10) == 0:
            if number + 1 < steps:
                log.log_metrics({"phase": "train", "step": number + 1, "split": "valid", "loss": 3.0})
            log.seal("train", number + 1)


def _resume(folder: Path) -> None:
    """Find the last seal and cut there, as a resumed run does."""
    from isobatch.engine.runs.log_reader import last_row_before
    from isobatch.engine.runs.metrics_log import SEAL, MetricsLog
    from isobatch.engine.runs.run_folder import RunFolder

    run = RunFolder(folder)
    size, ledger = run.metrics.stat().st_size, run.samples.stat().st_size
    row = last_row_before(run.metrics, size)
    assert row is not None
    log = MetricsLog(run, writes=True, ledger=True)
    log.resume({SEAL: row[SEAL], "metrics": size, "ledger": ledger}, ["train"], "train", row["step"])


def _audit(folder: Path) -> None:
    """The records of verify, the ledger among them."""
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.audit import audit_records

    assert audit_records(RunFolder(folder)).problems == []


def _report(folder: Path) -> None:
    """The curves of the report."""
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.launch.report.records import read_records

    records = read_records(RunFolder(folder), None)
    assert len(records["training"]["step"]) > 300


def _runs(folder: Path) -> None:
    """The list of runs."""
    from isobatch.engine.runs.run_folder import list_runs

    assert [run.status() for run in list_runs(folder.parent)] == ["unfinished"]


def _diff(folder: Path) -> None:
    """`diff --level step` of the run and one whose loss parts in the last step."""
    from isobatch.engine.forensics.compare_logs import EXACT_FLOOR, compare_logs
    from isobatch.engine.runs.step_rows import step_rows

    log = folder / "metrics.jsonl"
    one, other = list(step_rows(log)), list(step_rows(log))
    other[-1] = dataclasses.replace(other[-1], loss=other[-1].loss + 0.01)
    assert compare_logs(one, other, EXACT_FLOOR, EXACT_FLOOR).step == len(one)


PARTS = {"resume": _resume, "records of verify": _audit, "report": _report, "runs": _runs, "diff": _diff}
