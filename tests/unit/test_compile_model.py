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
from torch._inductor.scheduler import SchedulerNode
from transformers import AutoConfig, AutoModelForCausalLM

from isobatch.engine.model_setup.compile_model import compile_model
from isobatch.engine.model_setup.gpu_graphs import KeptResiduals, SumsWithinSamples, WholeEpilogues
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


@pytest.mark.parametrize(("timed", "whole"), [(False, 0), (True, 1)])
def test_graphs_for_a_gpu_compute_the_same(timed: bool, whole: int) -> None:
    """Both passes of a block of GPT-2 under bf16, as Inductor gets them: the sum of residual and product is
    kept and not made again, and only biases' gradients are rounded another way. Where products are timed, the
    sum of what GELU's product gives is left alone.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", vocab_size=53, **FAMILIES["gpt2"])
    block, *_ = layer_blocks(AutoModelForCausalLM.from_config(config).eval())
    states = torch.randn(2, 8, 32)

    def gradients(keep: Any, rewrite: Any) -> tuple[dict[str, Tensor], int, int]:
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
        sums = graphs[-1].graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
        rows = [n for n in sums if n.args[1] == [0] and n.args[0].target is torch.ops.aten.reshape.default]
        return found, sum({torch.float32, torch.bfloat16} == set(dtypes) for dtypes in given), len(rows)

    before, added, all_whole = gradients(None, lambda _: None)
    with inductor.patch(max_autotune_gemm=timed):
        now, kept, left = gradients(KeptResiduals(), SumsWithinSamples())
    assert (added, all_whole, kept, left) == (1, 4, 0, whole)
    for name, gradient in now.items():
        near = float(gradient.abs().max()) / 128 if "bias" in name else 0.0
        torch.testing.assert_close(gradient, before[name], rtol=0, atol=near)


def test_what_follows_a_product_is_made_comparable_where_it_alone_reads_it() -> None:
    """With the loops of both written out as one; not where a sum, another product or a second reader is."""

    class Node(SchedulerNode):
        def __init__(
            self, template: bool = False, reduction: bool = False, users: tuple[Any, ...] = ()
        ) -> None:
            self.is_template, self.is_reduction = (lambda: template), (lambda: reduction)
            self.get_outputs = lambda: [SimpleNamespace(users=[SimpleNamespace(node=n) for n in users])]
            self.node = SimpleNamespace(extract_read_writes=lambda normalize: normalize)
            self.one_loop = False

        def set_read_writes(self, rw: Any) -> None:
            self.one_loop = rw

        def refresh_dependencies(self, normalize: bool, need_clear_tiling_cache: bool) -> None:
            self.one_loop = normalize and not need_clear_tiling_cache

    gelu, norm, other, product = Node(), Node(reduction=True), Node(), Node(template=True)
    of_output = object()  # what is kept for the backward pass is read by the graph's output, too
    for users, comparable in (
        ((gelu, of_output), True),
        ((norm,), False),
        ((product,), False),
        ((gelu, other), False),
    ):
        gelu.one_loop = False
        made = Node(template=True, users=users)
        nodes = [made, gelu, norm, other, product]
        assert WholeEpilogues()(nodes) == nodes
        assert (made.one_loop, users[0].one_loop) == (comparable, comparable), users
