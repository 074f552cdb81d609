"""Tests of compiled models under a strategy: graphs cut for DDP, and CUDA graphs that reuse their memory."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobatch.engine.model_setup.compile_model import compile_model
from isobatch.engine.model_setup.layer_blocks import checkpoint_activations
from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.engine.strategies import replicated
from isobatch.engine.strategies.replicated import ReplicatedStrategy
from isobatch.models.attention_functions import unregister_attention
from isobatch.models.causal_lm import adapters
from isobatch.models.causal_lm.task import CausalLMOptions
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def strategy(model: nn.Module, world: Any, **changes: Any) -> ReplicatedStrategy:
    chosen = plan(processes=world.size, **changes)
    return ReplicatedStrategy(model, lambda m: torch.optim.SGD(m.parameters(), 0.0), chosen, world, 0.0)


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Any]:
    """A world of two, of which only this rank is there; collectives are those of one process."""
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield SimpleNamespace(
        size=2,
        device=torch.device("cpu"),
        all_reduce_gradients=lambda _: True,
        waiting_for=lambda _: contextlib.nullcontext(),
        wrap_in_ddp=lambda model: DistributedDataParallel(model, broadcast_buffers=False),
    )
    dist.destroy_process_group()


class Layers(nn.Module):
    """72 MB, where DDP's buckets have 25."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1500, 1500) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_compiled_model_is_cut_for_the_buckets_of_ddp(
    two_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")  # noqa: SLF001  no public way to name a backend

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, examples)

    monkeypatch.setattr(replicated, "compile_model", lambda model, _: model.compile(backend=backend))
    torch.compiler.reset()
    model = Layers()
    model.compile(backend=backend)
    runner = strategy(model, two_ranks, strategy="ddp", compile="on", reduction="overlapped")
    counts = []
    for _ in range(3):
        with runner.forward_backward(last=True):
            runner.backward(runner.model(torch.randn(2, 1500)).sum())
        runner.step_optimizer(0.0)
        counts.append(len(graphs))
    assert runner.overlapped
    assert counts[0] == 0  # the step that decides runs as it is written
    assert counts[1] == counts[2] > 1


@pytest.mark.parametrize("adapter", [False, True])
def test_blocks_under_activation_checkpointing_are_compiled(adapter: bool) -> None:
    """Their noise counts its draws: without an option dynamo runs such blocks eagerly, in silence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    products: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        modules = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
        nodes = [node for m in modules for node in m.graph.nodes]
        products.append(sum("linear" in str(node.target) for node in nodes))
        return graph.forward

    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, attention_dropout=0.1)
    model: Any = LlamaForCausalLM(config)
    if adapter:
        adapters.add_adapter(model, CausalLMOptions(adapter="lora", lora_dropout=0.05), "base", None)
    noise = KeyedNoise(0)
    key_dropout(model, noise)
    checkpoint_activations(model, keyed=True)
    torch.compiler.reset()
    compile_model(model.train(), plan(compile="on"))
    model.compile(backend=backend)
    noise.bind(0, np.arange(2), torch.device("cpu"))
    model(input_ids=torch.zeros(2, 8, dtype=torch.int64), use_cache=False).logits.sum().backward()
    unregister_attention()
    assert sum(products) >= 2 * 7  # of each block: q, k, v, o, gate, up and down
