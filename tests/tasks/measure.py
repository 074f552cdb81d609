"""Run a recipe's steps in this world and leave the losses, the samples and the first gradient on disk.

Started by torchrun, or in place for one process:  measure.py SETTINGS.json
SETTINGS: {"task", "flags": {...}, "plan": {...}, "steps", "out"}
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

runpy.run_path(str(Path(__file__).resolve().parents[2] / "launch" / "_root.py"))


def reduced(strategy: Any) -> Any:
    """The whole reduced gradient, flat, and no update."""
    import torch

    if hasattr(strategy, "reduce"):
        strategy.reduce()
        found = [p.grad for _, p in strategy.trained() if p.grad is not None]
        strategy.optimizer.zero_grad()
    else:
        from deepspeed.utils import safe_get_full_grad

        found = [safe_get_full_grad(p).clone() for p in strategy.unwrapped.parameters()]
    return torch.cat([g.flatten() for g in found])


def measure(settings: dict[str, Any]) -> None:
    """One rank's part; rank 0 writes."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    from isobatch.core.plan import PlanOptions
    from isobatch.engine.distributed.communicator import Communicator, rank_and_world_size
    from isobatch.engine.loading.prepare import prepare
    from isobatch.engine.machine import hardware
    from isobatch.engine.planning.planner import make_plan
    from isobatch.engine.registry import workload
    from isobatch.engine.training.session import Session

    world_size = rank_and_world_size(os.environ)[1]
    chosen = workload(settings["task"])
    recipe, _ = chosen.complete(settings.get("flags", {}))
    task, data = chosen.make(recipe)
    facts = prepare(data)
    machine = hardware.parse_hardware("cpu:2x24gb")
    plan = make_plan(
        recipe, facts, task.model_size(facts), machine, PlanOptions(device="cpu"), world=world_size
    )
    world = Communicator(dataclasses.replace(plan, threads=1, **settings.get("plan", {})), hang_timeout=120)
    session = Session(recipe, facts, world.plan, world)
    losses, samples, micros = [], [], []
    with session:
        schedule = session.schedules[0]
        with session.phase(schedule) as active:
            active.stepper.backward(next(iter(active.batches(0, 1))))
            gradient = reduced(active.strategy)
        with session.phase(schedule) as active:
            for loaded in active.batches(0, settings["steps"]):
                losses.append(active.step(loaded).loss_and_norm()[0])
                samples.append(loaded.work.samples.tolist())
                micros.append([len(m.positions) for m in loaded.work.micro_batches])
    everyone = world.all_gather_objects(micros)
    if world.is_main:
        torch.save(gradient, settings["out"] + ".pt")
        report = {"losses": losses, "samples": samples, "micros": everyone}
        Path(settings["out"]).write_text(json.dumps(report))
    world.barrier()
    world.close()
    world.exit_process(0)


if __name__ == "__main__":
    measure(json.loads(Path(sys.argv[1]).read_text()))
