"""What seeing into a step costs, against the plain step: `python -m benchmarks replay`.

In turns in one process: a plain step, one with the outputs of all modules recorded as `replay` does it, and
one with each sample's loss computed alone as well.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from isobatch.benchmarks.sessions import make_session
from isobatch.engine.forensics.observed_step import observe_loaded
from isobatch.engine.verification.windows import Window

TASKS = ("causal-lm", "classifier", "recommender", "sequence-vae")
LARGE = {"model": "gpt2-124m", "batch_size": 8, "max_length": 256}
"""A model whose step is work, unlike those of the demos."""
KINDS = ("plain", "modules", "samples")


def measure(quick: bool) -> list[dict[str, Any]]:
    """Rows per task: milliseconds of a plain step, and how many times as long the others take."""
    rows = [_measured(task, 9 if quick else 30) for task in TASKS]
    return rows if quick else [*rows, {**_measured("causal-lm", 12, **LARGE), "task": LARGE["model"]}]


def _measured(name: str, steps: int, **values: Any) -> dict[str, Any]:
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with make_session(name, {"steps": steps, **values}) as session:
        (schedule, *_) = session.schedules
        with session.phase(schedule) as active:
            for number, loaded in enumerate(active.batches(0, steps)):
                kind, began = KINDS[number % len(KINDS)], time.perf_counter()
                if kind == "plain":
                    active.step(loaded).loss_and_norm()
                else:
                    window = Window("", schedule.name, 0, number + 1)
                    observe_loaded(session, active, loaded, window, None, alone=kind == "samples")
                taken[kind].append(time.perf_counter() - began)
    plain, modules, samples = (statistics.median(taken[kind][1:]) for kind in KINDS)
    return {
        "task": name,
        "plain_ms": round(1e3 * plain, 1),
        "modules_ratio": round(modules / plain, 2),
        "samples_ratio": round(samples / plain, 2),
    }
