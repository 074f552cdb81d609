"""A run that is stopped and killed on its way through worlds and strategies is one run.

A few walks are written down; more are drawn by seed, and one is walked again by its name:
`pytest -m slow "tests/integration/test_walks.py::test_a_walk_is_one_run[drawn-7]"`. In which step its signals
and kills fall is up to the machine.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from isobatch.core.package import ROOT
from isobatch.tests.integration.helpers import (
    RAGGED,
    at_work_in,
    kill_all,
    launch,
    losses,
    rows,
    succeed,
    summary,
    warm_command,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS, SAVE_EVERY = 40, 3
RATES = {"adamw": "3e-3", "adamw8bit": "3e-3", "sgd": "1e-1", "adafactor": "3e-2"}
"""Optimizer -> a learning rate with which lost moments would be seen."""
SHARES = (3, 1, 3, 1)
"""How often each is drawn: the others go few ways."""
LOSS = 2e-6
"""Largest relative difference of a loss from that of one undisturbed process (measured: 2.5e-7)."""
WEIGHTS = {"adamw": 1e-4, "sgd": 2e-6, "adafactor": 5e-6}
"""Optimizer -> largest absolute difference of a final weight (measured: 1.2e-5, 2.4e-7, 6.0e-7)."""
EIGHT_BIT = (2e-5, 5e-3)
"""Both, of adamw8bit: a sum of another order may round a moment to the next of its 256 levels (measured:
1.5e-6, 5.6e-4)."""
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "zero3-offload", "fsdp2-offload", "hsdp")
WAYS = [(processes, strategy) for processes in (1, 2, 3) for strategy in STRATEGIES]
ENDS = ("signal", "kill", "kill in a save")
WALKS = 30
BOUND_SECONDS = 240


@dataclass(frozen=True)
class Leg:
    """One launch of a run: its world and strategy, and how it ends."""

    processes: int
    strategy: str
    end: str
    """One of ENDS, `done`, or `refused`."""

    @property
    def words(self) -> list[str]:
        world = ["--processes", str(self.processes), "--strategy", self.strategy]
        world += ["--copies", "2"] if self.strategy == "hsdp" and self.processes % 2 == 0 else []
        return [*world, "--precision", "fp32", "--device", "cpu", "--quiet"]


@dataclass(frozen=True)
class Walk:
    """The legs of a run, those among them that the planner refuses."""

    optimizer: str
    legs: list[Leg]

    @property
    def ways(self) -> list[tuple[int, str]]:
        return list({(leg.processes, leg.strategy): 0 for leg in self.legs if leg.end != "refused"})


SHORT = [
    Walk("adamw", [Leg(1, "ddp", "kill in a save"), Leg(1, "ddp", "kill"), Leg(1, "ddp", "done")]),
    Walk("adamw", [Leg(1, "ddp", "signal"), Leg(2, "zero2", "kill"), Leg(1, "ddp", "done")]),
    Walk("adamw8bit", [Leg(2, "zero3", "refused"), Leg(2, "ddp", "signal"), Leg(1, "ddp", "done")]),
]
LONG = Walk(
    "adamw",
    [
        *(
            Leg(4, "hsdp", "signal"),
            Leg(4, "ddp", "kill"),
            Leg(4, "fsdp2", "signal"),
            Leg(4, "zero2", "kill"),
        ),
        *(Leg(2, "fsdp2-offload", "signal"), Leg(4, "hsdp", "done")),
    ],
)


def draw(seed: int) -> Walk:
    """Three to five legs. Those of every fourth walk go all the same way."""
    generator, legs, way = random.Random(seed), list[Leg](), (0, "")
    (optimizer,) = generator.choices(list(RATES), SHARES)
    ends = [generator.choice(ENDS) for _ in range(generator.randint(2, 4))]
    for end in [*ends, "done"]:
        if seed % 4 or not way[0]:
            while is_refused(*(way := generator.choice(WAYS)), optimizer):
                legs += [] if (refused := Leg(*way, "refused")) in legs else [refused]
        legs.append(Leg(*way, end))
    return Walk(optimizer, legs)


def is_refused(processes: int, strategy: str, optimizer: str) -> bool:
    """One process has nobody to share with, in flat shards no matrix can be seen, and ZeRO's copy of the
    weights may outweigh what it saves of one moment.
    """
    alone = processes == 1 and strategy != "ddp" and not strategy.endswith("offload")
    needs_matrices = optimizer in ("adamw8bit", "adafactor") and strategy != "ddp"
    saves_nothing = optimizer == "sgd" and processes == 2 and strategy in ("zero1", "zero2")
    return alone or needs_matrices or saves_nothing


def common(optimizer: str) -> list[str]:
    words = ["auto", "--task", RAGGED.replace("RaggedLM", "PacedLM"), "--ledger", "--eval-every", "9"]
    words += ["--optimizer", optimizer, "--lr", RATES[optimizer]]
    return [*words, "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--name", "run"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(optimizer, processes, strategy) -> a run that nothing happened to."""

    @functools.cache
    def train(optimizer: str, processes: int = 1, strategy: str = "ddp") -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        leg = Leg(processes, strategy, "done")
        succeed(*common(optimizer), *leg.words, cwd=folder, **variables(leg, folder))
        return folder / "runs" / "run"

    return train


def variables(leg: Leg, folder: Path) -> dict[str, str]:
    """ZeRO-3 would gather so small a model once and for all."""
    if not leg.strategy.startswith("zero3"):
        return {}
    config = json.loads((ROOT / "configs" / "deepspeed" / f"{leg.strategy}.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    path = folder / f"{leg.strategy}.json"
    path.write_text(json.dumps(config))
    return {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}


class Walker:
    """Walks the legs of a run in a folder of its own, and looks at what each of them leaves."""

    def __init__(self, folder: Path, optimizer: str) -> None:
        self.folder, self.run, self.optimizer = folder, folder / "runs" / "run", optimizer
        self.generator = random.Random(0)

    def walk(self, leg: Leg) -> None:
        words = ["resume", str(self.run)] if self.run.exists() else common(self.optimizer)
        if leg.end == "refused":
            self.refused([*words, *leg.words])
            return
        before, said = self.newest(), len(self.log())
        process = subprocess.Popen(
            warm_command(*words, *leg.words),
            cwd=self.folder,
            env={**os.environ, **variables(leg, self.folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self.end(process, leg, before, said)
        finally:
            kill_all(at_work_in(self.folder))
            _, err = process.communicate(timeout=BOUND_SECONDS)
        expected = {"signal": 75, "done": 0}.get(leg.end, -signal.SIGKILL)
        assert process.returncode == expected, f"{leg}: exit {process.returncode}, {err}"
        self.check(leg, before, self.log()[said:])

    def check(self, leg: Leg, before: int, log: str) -> None:
        """It began where the newest checkpoint was: a run that starts again writes the same rows."""
        assert "damaged" not in log, f"{leg}: {log}"
        start = f"resumed from train-{before}:" if before else ""
        assert start in log, f"{leg}: {log}"
        assert before or "resumed from" not in log, f"{leg}: {log}"
        if leg.end in ("signal", "done"):
            found = summary(self.run)
            assert found["resumed_from"] == (f"train-{before}" if before else None)
            assert (found["world_size"], found["steps"]) == (leg.processes, self.newest())

    def refused(self, words: list[str]) -> None:
        """In one line, and nothing of the run changes."""
        before = self.files()
        done = launch(*words, cwd=self.folder)
        assert done.returncode == 2, done.stderr
        assert "--strategy" in done.stderr
        assert done.stderr.count("\n") == 1
        assert self.files() == before

    def end(self, process: subprocess.Popen[str], leg: Leg, before: int, said: int) -> None:
        """Wait for the leg's end, or bring it about."""
        if leg.end == "done":
            process.wait(timeout=BOUND_SECONDS)
            return
        if before:  # then the rows after the checkpoint are cut off
            self.wait(process, lambda: "resumed from" in self.log()[said:])
        if leg.end == "signal":
            steps = self.generator.randint(2, 6)
            self.wait(process, lambda: self.step() >= before + steps)
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=BOUND_SECONDS)
            return
        self.wait(process, lambda: self.newest() > before)
        members = at_work_in(self.folder)
        if leg.end == "kill in a save":
            self.wait(process, lambda: any(self.run.glob("checkpoints/.*.tmp")))
        time.sleep(self.generator.uniform(0, 0.01 if leg.end == "kill in a save" else 0.3))
        kill_all(members)

    def wait(self, process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
        end = time.monotonic() + BOUND_SECONDS
        while process.poll() is None and not reached():
            assert time.monotonic() < end, "it does not move"
            time.sleep(0.002)

    def log(self) -> str:
        path = self.run / "log.txt"
        return path.read_text() if path.exists() else ""

    def step(self) -> int:
        """The newest logged step."""
        path = self.run / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return max((r["step"] for line in whole.splitlines() if "lr" in (r := json.loads(line))), default=0)

    def newest(self) -> int:
        """The step of the newest complete checkpoint; 0 without any."""
        found = self.run.glob("checkpoints/train-*/checksums.json")
        return max((int(path.parent.name.removeprefix("train-")) for path in found), default=0)

    def files(self) -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in self.folder.rglob("*") if p.is_file()}


def compare(run: Path, calm: Path, loss: float, weights: float) -> None:
    """Steps, samples, losses, metrics and weights are those of a run that nothing happened to."""
    assert summary(run)["status"] == "done"
    chains, expected = ([r["chain"] for r in rows(one) if "chain" in r] for one in (run, calm))
    assert (chains, len(chains)) == (expected, STEPS)
    assert (run / "samples.bin").read_bytes() == (calm / "samples.bin").read_bytes()
    assert losses(run) == pytest.approx(losses(calm), rel=loss, abs=0)
    assert summary(run)["metrics"] == pytest.approx(summary(calm)["metrics"], rel=loss, abs=0)
    found, wanted = (load_file(one / "final" / "model.safetensors") for one in (run, calm))
    assert found.keys() == wanted.keys()
    furthest = {name: float((found[name] - w).abs().max()) for name, w in wanted.items()}
    assert max(furthest.values()) <= weights, furthest


@pytest.mark.parametrize(
    "walk",
    [
        *(pytest.param(walk, id=f"short-{number}") for number, walk in enumerate(SHORT)),
        pytest.param(LONG, id="long", marks=pytest.mark.slow),
        *(pytest.param(draw(seed), id=f"drawn-{seed}", marks=pytest.mark.slow) for seed in range(WALKS)),
    ],
)
def test_a_walk_is_one_run(walk: Walk, undisturbed: Callable[..., Path], tmp_path: Path) -> None:
    walker = Walker(tmp_path, walk.optimizer)
    for leg in walk.legs:
        walker.walk(leg)
    way, *others = walk.ways
    if others:
        bounds = EIGHT_BIT if walk.optimizer == "adamw8bit" else (LOSS, WEIGHTS[walk.optimizer])
        compare(walker.run, undisturbed(walk.optimizer), *bounds)
    else:  # the same way every time: the same bits
        compare(walker.run, undisturbed(walk.optimizer, *way), 0.0, 0.0)
    succeed("verify", str(walker.run), "--processes", "1", cwd=tmp_path)
