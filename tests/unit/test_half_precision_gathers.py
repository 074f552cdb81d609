"""Tests of what sharded strategies gather in bf16: weights that autocast rounds, and no gradient."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.model_setup.compile_model import compile_model
from isobatch.engine.model_setup.layer_blocks import matmul_parameters
from isobatch.engine.strategies.fsdp2 import FullyShardStrategy
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from collections.abc import Iterator


class Block(nn.Module):
    """Half of a transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


class Net(nn.Module):
    """Blocks between an embedding and a head that share a matrix, as a language model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_only_what_autocast_rounds_is_chosen() -> None:
    net = Net()
    net.blocks[1].table = nn.Embedding(6, 4)
    net.blocks[1].table.weight = net.blocks[1].down.weight = nn.Parameter(torch.zeros(6, 4))
    names = {p: name for name, p in net.named_parameters()}
    assert [names[p] for p in matmul_parameters(net)] == [
        *("blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.weight", "blocks.0.down.bias"),
        *("blocks.1.up.weight", "blocks.1.up.bias", "blocks.1.down.bias"),  # its weight is a table's as well
    ]


@pytest.fixture
def world() -> Iterator[Any]:
    """One process with a process group, which sharding needs."""
    import torch.distributed as dist

    with preserve_process_state():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        os.environ["LOCAL_RANK"] = "0"
        made: Any = object.__new__(Communicator)
        made.rank, made.size, made.device = 0, 1, torch.device("cpu")
        yield made
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp_gathers_products_in_bf16_and_nothing_else(world: Any, precision: Any) -> None:
    net = Net()
    strategy = FullyShardStrategy(
        net,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        plan(strategy="fsdp2", precision=precision),
        world,
        clip=0.0,
    )
    found: dict[str, torch.dtype] = {}

    def look(module: Any, *_: Any) -> None:
        found[type(module).__name__.removeprefix("FSDP")] = module.weight.dtype

    for module in (net.embedding, net.blocks[1].norm, net.blocks[1].up):  # type: ignore[union-attr]
        module.register_forward_pre_hook(look)  # type: ignore[union-attr]
    with (
        strategy.forward_backward(last=True),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        strategy.backward(net(torch.tensor([[1, 2, 3]])).float().square().sum())
    half = torch.bfloat16 if precision == "bf16" else torch.float32
    assert found == {"Embedding": torch.float32, "LayerNorm": torch.float32, "Linear": half}
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize(
    ("strategy", "precision"), [("fsdp2", "fp32"), ("fsdp2", "bf16"), ("fsdp2-offload", "bf16")]
)
def test_blocks_of_shards_are_compiled_whole(
    world: Any, strategy: str, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is gathered inside of one, where its graph would break; all learn what eager ones do."""
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode: compiled(self, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    found = []
    for mode in ("off", "on"):
        torch.manual_seed(0)
        net, chosen = Net(), plan(strategy=strategy, precision=precision, compile=mode)
        with torch._dynamo.config.patch(optimize_ddp=True):  # noqa: SLF001  put back: others want it
            compile_model(net, chosen)
        runner = FullyShardStrategy(
            net, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), chosen, world, clip=1.0
        )
        for length in (3, 4):
            with (
                runner.forward_backward(last=True),
                torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
            ):
                runner.backward(net(torch.arange(length)[None]).float().square().sum())
            runner.step_optimizer(0.1)
        found.append([values.clone() for _, values in runner.held()])
    assert all(map(torch.equal, *found))
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (2, {})
