"""Run a recipe's steps in this world and leave the losses, the samples and the first gradient on disk.

Started by torchrun, or in place for one process:  measure.py SETTINGS.json
SETTINGS: {"task", "flags": {...}, "plan": {...}, "steps", "out"}
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

runpy.run_path(str(Path(__file__).resolve().parents[2] / "launch" / "_root.py"))


def measure(settings: dict[str, Any]) -> None:
    """One rank's part; rank 0 writes."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    from isobatch.benchmarks.quality.strategies import builder_of, first_gradient
    from isobatch.engine.train.hooks import Hooks, Seen
    from isobatch.engine.train.loop import run_phase

    flags, plan = (settings.get(name, {}) for name in ("flags", "plan"))
    builder, seen = builder_of(settings["task"], flags, {}, **plan), Seen()
    world = builder.state.world
    with builder:
        schedule = builder.schedules[0]
        with builder.phase(schedule) as state:
            gradient = first_gradient(state)
        with builder.phase(schedule) as state:
            run_phase(state, Hooks([seen]), 0, settings["steps"])
    done = [figures.output.loaded.work for figures in seen.figures]
    everyone = world.all_gather_objects([[len(m.positions) for m in work.micro_batches] for work in done])
    if world.is_main:
        torch.save(gradient, settings["out"] + ".pt")
        samples = [work.samples.tolist() for work in done]
        report = {"losses": [figures.loss for figures in seen.figures], "samples": samples}
        report["micros"] = everyone
        Path(settings["out"]).write_text(json.dumps(report))
    world.barrier()
    world.close()
    world.exit_process(0)


if __name__ == "__main__":
    measure(json.loads(Path(sys.argv[1]).read_text()))
