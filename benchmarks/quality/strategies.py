"""Equal losses under every strategy and world size, also after a resume: `python -m benchmarks strategies`.

Worlds of 1, 2, 3 and 4 gloo processes (4: as meshes, `hsdp:COPIES`), a 2-layer GPT-2 on ragged sequences,
dropout on, uneven micro-batches. Each world is one launch: it trains under all its strategies, or continues
every checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from isobatch.benchmarks import child_process
from isobatch.core.package import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.core.plan import Precision
    from isobatch.engine.train.build import Builder
    from isobatch.engine.train.state import Training

TASK = f"{ROOT}/tests/tasks/ragged.py:RaggedLM"
SHARDED = ("zero1", "zero2", "zero3", "fsdp2", "fsdp2-offload")
MESHES = ("hsdp:1", "hsdp:2", "hsdp:4")
"""Of four processes: 1 x 4, 2 x 2, 4 x 1."""
QUICK = "STRATEGIES_QUICK"


def lengths() -> tuple[int, int, int]:
    """Steps in all, before the checkpoint, and after a resume."""
    return (12, 6, 3) if os.environ.get(QUICK) else (50, 20, 10)


def strategies(world: int) -> tuple[str, ...]:
    """Without ZeRO-1 if quick: its gradients take the way of ZeRO-2's."""
    sharded = SHARDED[1:] if os.environ.get(QUICK) else SHARDED
    return {1: ("single",), 4: MESHES}.get(world, ("ddp", *sharded, f"hsdp:{world}"))


def measure(quick: bool) -> list[dict[str, Any]]:
    """Rows of parity (losses, first gradients) and of every resume."""
    worlds = (1, 2) if quick else (1, 2, 3, 4)
    os.environ[QUICK] = "1" if quick else ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for world in worlds[:-1]:
            launch(world, folder, "train")
        launch(worlds[-1], folder, "train+resume")
        for world in worlds[:-1]:
            launch(world, folder, "resume")
        if not quick:
            launch(2, folder, "half")
        return [*parity(folder), *resumes(folder)]


def launch(world: int, folder: Path, mode: str, only: tuple[str, ...] = ()) -> None:
    """Run `run_rank` in a world of this size; the ranks write what they find into `folder`."""
    script = child_process.command("quality.strategies:run_rank", str(folder), mode, *only)
    command = [sys.executable, *script]
    if world > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command = [sys.executable, *torchrun, *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{mode} in a world of {world} failed:\n{done.stderr[-4000:]}")


def parity(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each strategy that trained: how far it is from one process."""
    import torch

    one = folder / "train-1-single.json"
    plain = _read(one)
    gradient = torch.load(folder / "train-1-single.pt")
    for path in sorted(folder.glob("train-*.json")) + sorted(folder.glob("half-*.json")):
        found = torch.load(path.with_suffix(".pt"))
        yield {
            "what": path.stem,
            "largest_loss_difference": furthest(_read(path), plain),
            "largest_norm_difference": furthest(_read(path, "norms"), _read(one, "norms"), relative=True),
            "first_gradient_difference": float((found - gradient).norm() / gradient.norm()),
        }


def resumes(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each checkpoint that was gone on from."""
    _, middle, kept_on = lengths()
    for path in sorted(folder.glob("resume-*.json")):
        writer, reader = path.stem.removeprefix("resume-").split("+")
        undisturbed = _read(folder / f"train-{reader}.json")[middle : middle + kept_on]
        yield {
            "what": f"{writer} -> {reader}",
            "largest_loss_difference": furthest(_read(path), undisturbed),
            "same_world_and_strategy": writer == reader,
        }


def furthest(some: list[float], others: list[float], relative: bool = False) -> float:
    """Largest difference, of gradient norms a relative one."""
    return max(abs(a - b) / (b if relative else 1) for a, b in zip(some, others, strict=True))


def _read(path: Path, figure: str = "losses") -> list[float]:
    """`losses` or `norms` by step."""
    values: list[float] = json.loads(path.read_text())[figure]
    return values


def _write(path: Path, steps: list[tuple[float, float]]) -> None:
    losses, norms = zip(*steps, strict=True)
    path.write_text(json.dumps({"losses": losses, "norms": norms}))


def run_rank(place: str, modes: str, *only: str) -> None:
    """What each rank of a world runs; ends the process."""
    folder = Path(place)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from isobatch.engine.machine.detect import rank_and_world_size

    size = rank_and_world_size(os.environ)[1]
    for mode, strategy in itertools.product(modes.split("+"), only or strategies(size)):
        # Small buckets and no threshold: ZeRO would not partition so small a model otherwise.
        _write_config(folder, strategy)
        if mode == "resume":
            for saved in _resumed(folder, f"saved-{size}-{strategy}"):
                _resume(folder, strategy, saved)
        else:
            _train(folder, strategy, mode)
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own end may wait for gloo's threads


def _resumed(folder: Path, own: str) -> list[Path]:
    """The checkpoints that a strategy goes on from: all or, if quick, its own and that of the next one."""
    found = sorted(folder.glob("saved-*"))
    place = [saved.name for saved in found].index(own)
    return [found[place], found[(place + 1) % len(found)]] if os.environ.get(QUICK) else found


def _write_config(folder: Path, strategy: str) -> None:
    if not strategy.startswith("zero"):
        return
    config = json.loads((ROOT / "configs" / "deepspeed" / f"{strategy}.json").read_text())
    small = {"reduce_bucket_size": 5000, "allgather_bucket_size": 5000}
    if strategy == "zero3":
        small |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 5000}
        small |= {"stage3_max_live_parameters": 10000, "stage3_max_reuse_distance": 10000}
    config["zero_optimization"] |= small
    path = folder / f"deepspeed-{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps(config))
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)


def builder_of(task: str, flags: dict[str, Any], options: dict[str, Any], **plan: Any) -> Builder:
    """What trains a task in this world on a CPU, with other values of its plan."""
    from isobatch.core.plan import PlanOptions
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.loading.prepare import prepare
    from isobatch.engine.machine import hardware
    from isobatch.engine.machine.detect import rank_and_world_size
    from isobatch.engine.planning.planner import make_plan
    from isobatch.engine.registry import workload
    from isobatch.engine.train.build import Builder

    chosen = workload(task)
    recipe, _ = chosen.complete(flags)
    made, data = chosen.make(recipe)
    facts = prepare(data)
    machine, size = hardware.parse_hardware("cpu:2x24gb"), made.model_size(facts)
    asked, world = PlanOptions(device="cpu", **options), rank_and_world_size(os.environ)[1]
    planned = make_plan(recipe, facts, size, machine, asked, world=world)
    planned = dataclasses.replace(planned, threads=1, **plan)
    return Builder(recipe, facts, planned, Communicator(planned, hang_timeout=60))


def _builder(strategy: str, precision: Precision = "fp32") -> Builder:
    flags, (strategy, _, copies) = {"steps": [lengths()[0]]}, strategy.partition(":")
    plan = {"strategy": strategy, "precision": precision, "copies": int(copies or 1)}
    return builder_of(TASK, flags, {"micro_batch": 3}, **plan)


def _steps(state: Training, start: int, stop: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    from isobatch.engine.train.hooks import Hooks, Seen
    from isobatch.engine.train.loop import run_phase

    run_phase(state, Hooks([seen := Seen()]), start, stop)
    return [(figures.loss, figures.norm) for figures in seen.figures]


def first_gradient(state: Training) -> Any:
    """The reduced gradient of all parameters in the first step of a phase, flat; no weight moves."""
    import torch

    from isobatch.engine.train.hooks import Hooks
    from isobatch.engine.train.step import train_step

    found = []

    def keep(*_: Any) -> Any:
        found.append(reduced(state.strategy))
        return torch.zeros(())

    with mock.patch.object(state.strategy, "step_optimizer", keep):
        train_step(state, next(state.batches(0, 1)), Hooks())
    return found[0]


def _train(folder: Path, strategy: str, mode: str) -> None:
    import torch

    from isobatch.engine.checkpointing.writer import CheckpointWriter

    steps, middle, _ = lengths()
    with _builder(strategy, "bf16" if mode == "half" else "fp32") as builder:
        world, schedule = builder.state.world, builder.schedules[0]
        name = f"{world.size}-{strategy}"
        with builder.phase(schedule) as state:
            gradient = first_gradient(state)
        with builder.phase(schedule) as state:
            found = _steps(state, 0, middle)
            if mode == "train":
                facts = {"scaling": state.strategy.loss_scale(), "progress": asdict(state.progress)}
                writer = CheckpointWriter(world)
                writer.start(folder / f"saved-{name}", state.strategy.collect_state(), facts)
                writer.wait()
            found += _steps(state, middle, steps)
    if world.is_main:
        _write(folder / f"{mode}-{name}.json", found)
        torch.save(gradient, folder / f"{mode}-{name}.pt")


def _resume(folder: Path, strategy: str, saved: Path) -> None:
    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint

    _, middle, kept_on = lengths()
    with _builder(strategy) as builder, builder.phase(builder.schedules[0], SavedCheckpoint(saved)) as state:
        found = _steps(state, middle, middle + kept_on)
    world = builder.state.world
    if world.is_main:
        reader = f"{world.size}-{strategy}"
        path = folder / f"resume-{saved.name.removeprefix('saved-')}+{reader}.json"
        _write(path, found)


def reduced(strategy: Any) -> Any:
    """The reduced gradient of all parameters, flat."""
    import torch

    if hasattr(strategy, "reduce"):
        strategy.reduce()
        found = [p.grad for p in strategy.dense if p.grad is not None]
        strategy.optimizer.zero_grad()
    elif strategy.plan.strategy.startswith(("fsdp2", "hsdp")):
        found = [p.grad.full_tensor() for p in strategy.unwrapped.parameters() if p.grad is not None]
        strategy.optimizer.zero_grad()
    else:
        from deepspeed.utils import safe_get_full_grad

        found = [safe_get_full_grad(p).clone() for p in strategy.unwrapped.parameters()]
    return torch.cat([g.flatten() for g in found])
