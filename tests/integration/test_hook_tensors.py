"""What hooks hold per parameter is saved and read under any strategy and world, and can stand in as weights.

Run as a script, it is a rank: `torchrun test_hook_tensors.py FOLDER write|read STRATEGY...`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.package import ROOT
from isobatch.tests.integration.helpers import command, warm_python

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.strategies.base import Strategy

QUICK = ("ddp", "zero3-gathered", "fsdp2", "hsdp:2")
SHARDED = ("ddp", "zero1", "zero2", "zero3", "zero3-gathered", "fsdp2")


def launch(size: int, *words: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    start = [warm_python(), *(torchrun if size > 1 else []), __file__, *words]
    done = command(start, Path(words[0]), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr[-4000:]


def test_what_any_strategy_wrote_any_other_reads(tmp_path: Path) -> None:
    for mode in ("write", "read"):
        launch(1, str(tmp_path), mode, "single")
        launch(2, str(tmp_path), mode, *QUICK)
    assert len(list(tmp_path.glob("*-1"))) == 1 + len(QUICK)


@pytest.mark.slow
def test_three_processes_read_what_two_wrote(tmp_path: Path) -> None:
    launch(2, str(tmp_path), "write", *SHARDED)
    launch(3, str(tmp_path), "read", *SHARDED)
    for mode in ("write", "read"):
        launch(4, str(tmp_path), mode, "hsdp:2")


def network() -> Any:
    """With buffers, a frozen weight, and weights of fewer rows than there are processes."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
    net[0].bias.requires_grad = False
    return net


def output(model: Any) -> Tensor:
    import torch

    model.eval()
    with torch.no_grad():
        found: Tensor = model(torch.arange(8.0).view(2, 4))
    model.train()
    return found


def step(strategy: Strategy, seed: int) -> None:
    import torch

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    with strategy.accumulate_gradients(), strategy.forward_backward(last=True):
        strategy.backward(strategy.model(x).square().mean() / strategy.world.size)
    strategy.step_optimizer(0.1)


def held(strategy: Strategy) -> dict[str, Tensor]:
    return {name: values.clone() for name, values in strategy.held()}


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(some[n].equal(others[n]) for n in some)


def strategies(world: Communicator, folder: Path, names: tuple[str, ...]) -> Iterator[tuple[str, Strategy]]:
    """(name, strategy after a step), one after another."""
    from isobatch.core.recipe import Recipe
    from isobatch.engine.strategies.base import strategy_class
    from isobatch.tests.unit.helpers import optimizer_of, plan

    for name in names:
        kind, _, copies = name.partition(":")
        kind, *gathered = kind.split("-")
        if gathered:  # DeepSpeed would keep such small weights gathered all the time
            config = json.loads((ROOT / "configs" / "deepspeed" / f"{kind}.json").read_text())
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
            own = folder / f".config-{world.rank}.json"
            own.write_text(json.dumps(config))
            os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(own)
        strategy = strategy_class(kind)(
            network(),
            lambda model: optimizer_of(model, Recipe(task="t")),
            plan(processes=world.size, strategy=kind, copies=int(copies or 1)),
            world,
            clip=1.0,
        )
        os.environ.pop("ACCELERATE_DEEPSPEED_CONFIG_FILE", None)
        step(strategy, 0)
        yield name, strategy
        strategy.close()


def write(strategy: Strategy, name: str, folder: Path) -> None:
    import torch

    from isobatch.tests.unit.helpers import save_checkpoint

    average = {name: values * 3 + 1 for name, values in strategy.held()}
    count = {"2.weight": torch.ones_like(average["2.weight"], dtype=torch.int64)}
    state = strategy.collect_state({"average": average, "count": count})
    save_checkpoint(folder / f"{name}-1", state, {}, strategy.world)


def read(strategy: Strategy, folder: Path) -> None:
    import torch

    from isobatch.engine.checkpointing.checkpoint import open_on_all

    saved = open_on_all(folder, strategy.world)
    strategy.restore(saved)
    step(strategy, 1)
    undisturbed = held(strategy)

    strategy.restore(saved)
    own, before = held(strategy), output(strategy.model)
    found = strategy.read_held(saved, "average")
    assert equal(found, {name: values * 3 + 1 for name, values in own.items()})
    (count,) = strategy.read_held(saved, "count").values()
    assert count.dtype == torch.int64
    assert count.shape == own["2.weight"].shape
    assert bool((count == 1).all())
    assert strategy.read_held(saved, "another") == {}

    other = network()
    other.load_state_dict({name: saved.read(f"hook/average/{name}") for name in found}, strict=False)
    other.load_state_dict({name: buffer.cpu() for name, buffer in strategy.buffers().items()}, strict=False)
    with contextlib.suppress(ZeroDivisionError), strategy.holding(found):
        assert torch.allclose(output(strategy.model), output(other), rtol=1e-5)
        raise ZeroDivisionError
    assert output(strategy.model).equal(before)
    with strategy.holding({"2.weight": found["2.weight"]}):
        assert not output(strategy.model).equal(before)
    assert equal(held(strategy), own)
    step(strategy, 1)
    assert equal(held(strategy), undisturbed)


def to_read(folder: Path, own: str, size: int) -> list[Path]:
    """All that was written; of two processes each strategy reads its own and the next one's."""
    found = sorted(folder.glob("[!.]*-1"))
    place = [saved.name for saved in found].index(own)
    return found if size != 2 else [found[place], found[(place + 1) % len(found)]]


def rank(folder: Path, mode: str, *names: str) -> None:
    from isobatch.core.errors import TrainingError
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.machine.detect import rank_and_world_size
    from isobatch.tests.unit.helpers import plan

    world = Communicator(plan(processes=rank_and_world_size(os.environ)[1]), hang_timeout=60)
    for name, strategy in strategies(world, folder, names):
        if mode == "write":
            write(strategy, name, folder)
            continue
        for saved in to_read(folder, f"{name}-1", world.size):
            read(strategy, saved)
        wrong = next(strategy.held())[1][:0]
        with pytest.raises(TrainingError, match=r"hook odd: has .* for 2.weight, which is held as"):
            strategy.collect_state({"odd": {"2.weight": wrong}})
        with pytest.raises(TrainingError, match=r"for 0.bias, which is no parameter that trains"):
            strategy.collect_state({"odd": {"0.bias": wrong}})


if __name__ == "__main__":
    rank(Path(sys.argv[1]), *sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own end may wait for gloo's threads
