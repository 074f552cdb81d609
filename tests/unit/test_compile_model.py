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
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import view_to_reshape
from transformers import AutoConfig, AutoModelForCausalLM

from isobatch.engine.model_setup.compile_model import compile_model
from isobatch.engine.model_setup.gpu_graphs import KeptResiduals, SumsWithinSamples
from isobatch.engine.model_setup.layer_blocks import checkpoint_activations, layer_blocks
from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.engine.strategies.replicated import ReplicatedStrategy
from isobatch.models.attention_functions import unregister_attention
from isobatch.models.causal_lm import adapters
from isobatch.models.causal_lm.chunked_cross_entropy import make_head_bypassable, next_token_loss
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


def test_a_compiled_model_is_cut_for_the_buckets_of_ddp(two_ranks: Any) -> None:
    graphs = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")  # noqa: SLF001  no public way to name a backend

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, examples)

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
    assert counts[0] == 1  # of the step that decides
    assert counts[1] == counts[2] > 2


FAMILIES = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
}


def losses_and_gradients(model: Any, noise: KeyedNoise) -> list[Tensor]:
    """Of micro-batches of two shapes."""
    found = []
    for rows, length in ((2, 8), (3, 6)):
        noise.bind(0, np.arange(rows), torch.device("cpu"))
        tokens = torch.arange(rows * length).view(rows, length)
        model.zero_grad()
        loss = next_token_loss(model, tokens, tokens)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize(("kind", "adapter"), [("gpt2", False), ("llama", True)])
def test_all_blocks_are_one_graph(kind: str, adapter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second one for all other shapes; each block draws its own noise and counts its draws."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=53, **FAMILIES[kind]))
    if adapter:
        adapters.add_adapter(model, CausalLMOptions(adapter="lora", lora_dropout=0.05), "base", None)
    make_head_bypassable(model)
    noise = KeyedNoise(0)
    key_dropout(model.train(), noise)
    if adapter:  # and some of its activations are computed twice
        checkpoint_activations(model, "selective", keyed=True)
    expected = losses_and_gradients(model, noise)
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode: compiled(self, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    compile_model(model, plan(compile="on"))
    assert all(map(torch.equal, losses_and_gradients(model, noise), expected))
    unregister_attention()
    first = 1 if adapter else 0  # what is frozen before the first block gives it an input without a gradient
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (2 * (1 + first), {})


def test_graphs_for_a_gpu_compute_the_same() -> None:
    """Both passes of a block of GPT-2 under bf16, as Inductor gets them: the sum of residual and product is
    kept and not made again, and only biases' gradients are rounded another way.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", vocab_size=53, **FAMILIES["gpt2"])
    block, *_ = layer_blocks(AutoModelForCausalLM.from_config(config).eval())
    states = torch.randn(2, 8, 32)

    def gradients(keep: Any, rewrite: Any) -> tuple[dict[str, Tensor], int]:
        graphs: list[torch.fx.GraphModule] = []

        def inner(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
            graphs.append(graph)
            view_to_reshape(graph)
            rewrite(graph.graph)
            graph.recompile()
            return make_boxed_func(graph.forward)

        torch.compiler.reset()
        run = torch.compile(block, backend=lambda g, given: compile_fx(g, given, inner_compile=inner))
        x = states.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), inductor.patch(joint_custom_post_pass=keep):
            out = run(x)
        out.square().sum().backward()
        found = {"": x.grad, **{name: p.grad for name, p in block.named_parameters()}}
        block.zero_grad()
        adds = graphs[-1].graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        given = [[n.meta["val"].dtype for n in add.all_input_nodes] for add in adds]
        return found, sum({torch.float32, torch.bfloat16} == set(dtypes) for dtypes in given)

    before, added = gradients(None, lambda _: None)
    now, kept = gradients(KeptResiduals(), SumsWithinSamples())
    assert (added, kept) == (1, 0)
    for name, gradient in now.items():
        near = float(gradient.abs().max()) / 128 if "bias" in name else 0.0
        torch.testing.assert_close(gradient, before[name], rtol=0, atol=near)
