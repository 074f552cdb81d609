"""A training step on a GPU that is not there: its kernels, bytes and arithmetic, and the least time of them.

The model's own forward pass, head and update run on fake CUDA tensors: nothing is computed or allocated, and
what refuses types or shapes on a card refuses here. A kernel takes the larger of arithmetic / rate and
bytes / bandwidth, and the host a launch (Williams et al. 2009). The backward pass is estimated from the
forward pass: torch's engine asks the driver. Both passes of compiled blocks are traced on a CPU instead, and
what lies between two products is one kernel. Needs torch built for CUDA, and neither a GPU nor a driver:
`make gpu-dry`.
"""

from __future__ import annotations

import collections
import contextlib
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isobatch.benchmarks.gpu.calibration import WIDTHS

RATE, ATTENTION_RATE, BANDWIDTH, LAUNCH, PEAK = 650e12, 350e12, 2.9e12, 4.5e-6, 989e12
"""Of an H100 SXM: products of these sizes, FlashAttention, device memory, the host's time for an operation,
and the arithmetic that MFU is a share of."""
TRITON = 0.85
"""Of cuBLAS's rate, in Triton's products, which can have what follows in them. No card has measured it."""
PRODUCTS = ("mm", "addmm", "bmm")
FREE = {
    *("view", "t", "transpose", "_unsafe_view", "slice", "unsqueeze", "expand", "split", "select", "detach"),
    *("alias", "permute", "reshape", "as_strided", "squeeze", "lift_fresh", "split_with_sizes", "unbind"),
    *("empty", "empty_like", "new_empty", "empty_strided", "chunk", "_local_scalar_dense", "device"),
}
NAMED = {"sum", "tanh", "cat", "var_mean", "rsqrt", "_to_copy", "convert_element_type", "add"}
OVERWRITES = ("copy_", "new_zeros", "fill_", "zero_")
"""They read nothing of their first argument."""
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "_unique2", "item")
LLAMAS = {"lora-1b": (2048, 16, 32, 8, 8192, 128256), "lora-8b": (4096, 32, 32, 8, 14336, 128256)}


class Kernels(TorchDispatchMode):
    """(part, name) -> [count, FLOPs, bytes, seconds] of what runs on CUDA tensors inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0, 0.0])
        self.part, self.inside_kernel = "forward", False
        self.waits: collections.Counter[str] = collections.Counter()

    def add(self, name: str, flops: float, moved: float, count: int = 1, rate: float = RATE) -> None:
        row = self.rows[self.part, name]
        for place, value in enumerate((count, flops, moved, max(flops / rate, moved / BANDWIDTH))):
            row[place] += value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = func.__name__.split(".")[0], func(*args, **(kwargs or {}))
        self.waits[name] += name in WAITS
        read, written = list(tensors_in(args[name in OVERWRITES :])), list(tensors_in(out))
        on_card = any(t.device.type == "cuda" for t in (*read, *written))
        if self.inside_kernel or name in FREE or not on_card:
            return out
        flops = 2.0 * read[-2].numel() * read[-1].shape[-1] if name in PRODUCTS else 0.0
        if "attention" in name:  # causal: half of the scores
            flops = 2.0 * read[0].numel() * read[0].shape[-2]
        rate = ATTENTION_RATE if "attention" in name else RATE
        self.add(name, flops, float(sum(t.numel() * t.element_size() for t in (*read, *written))), rate=rate)
        return out

    def add_graph(self, graph: torch.fx.GraphModule, times: int) -> None:
        """A graph that Inductor got, so many times: products, attention, and its own kernels of all else."""
        from torch._inductor.virtualized import V

        module, lowered = scheduled(graph)
        products = set(filter(is_product, module.graph.nodes))
        with V.set_graph_handler(lowered):
            for kernel in (k for k in lowered.scheduler.nodes if not k.is_extern()):
                origins = set().union(*(getattr(n.node, "origins", ()) for n in kernel.get_nodes()))
                named = {operation(n) for n in origins}
                words, moved = (
                    "+".join(sorted(named & NAMED)) or "elementwise",
                    kernel.get_read_write_buffers_sizes(),
                )
                if not kernel.is_template():
                    self.add(f"fused {words}", 0, times * moved, times)
                    continue
                products -= {n for n in origins if operation(n) in PRODUCTS}
                flops = product_flops(kernel.get_template_node())
                for _ in range(times):
                    self.add(f"product with {words}", flops, moved, rate=TRITON * RATE)
        for node in products:
            read = list(tensors_in([i.meta["val"] for i in node.all_input_nodes]))
            moved = float(sum(t.numel() * t.element_size() for t in (*read, *tensors_in(node.meta["val"]))))
            name, rate = operation(node), RATE
            flops = 2.0 * read[-2].numel() * read[-1].shape[-1]
            if "attention" in name:
                flops = 2.0 * read[0].numel() * read[0].shape[-2]
                flops, rate = flops * (2.5 if name.endswith("backward") else 1), ATTENTION_RATE
            for _ in range(times):
                self.add(name, flops, moved, rate=rate)

    def estimate_backward(self, trained: list[nn.Parameter], frozen: bool) -> None:
        """A product costs two, or one beside a frozen weight; attention 2.5; what is elementwise reads a
        tensor more. Weight gradients come in 16 bits and are cast to fp32; none is added to another, as there
        is one micro-batch.
        """
        forward = [(name, row) for (part, name), row in self.rows.items() if part == "forward"]
        self.part = "backward"
        for name, (count, flops, moved, _) in forward:
            times = (1 if frozen else 2) if name in PRODUCTS else 1
            rate = ATTENTION_RATE if "attention" in name else RATE
            self.add(name, flops * (2.5 if rate != RATE else times), 2 * moved, int(count * times), rate)
        self.add("gradients cast", 0, 6.0 * sum(p.numel() for p in trained), len(trained))


def product_flops(product: Any) -> float:
    """Of a product of Inductor's."""
    return 2.0 * math.prod(map(int, product.get_size())) * int(product.inputs[-1].get_size()[0])


def operation(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", "").partition(".")[0]


def is_product(node: torch.fx.Node) -> bool:
    return operation(node) in PRODUCTS or "attention" in operation(node)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


@contextlib.contextmanager
def pretended_card(kernels: Kernels) -> Iterator[None]:
    """Inside, torch takes CUDA for available, and what a GPU does in one kernel counts as one."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from transformers import AttentionInterface

    from isobatch.engine.noise import keyed_noise
    from isobatch.models.causal_lm import chunked_cross_entropy as head
    from isobatch.models.fused_kernels import fused_on_gpu

    def one_kernel(self: Any, first: Any, *others: Any) -> Any:
        kernels.inside_kernel = True
        out = (self.unfused if self.is_kernel else self.formula)(first, *others)
        kernels.inside_kernel = False
        if self.is_kernel:  # reads a row twice, the second time from the card's cache
            kernels.add("softmax errors", 0, 1.0 * first.numel() * (first.itemsize + others[-1].itemsize))
        else:
            moved = sum(t.numel() * t.element_size() for t in tensors_in((first, others, out)))
            kernels.add(f"fused {self.formula.__qualname__}", 0, float(moved))
        return out

    def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
        moved = 2.0 * (one.numel() + other.numel()) + 8.0 * total.numel()
        kernels.add("addmm", 2.0 * one.numel() * other.shape[1], moved)

    def draws(array: np.ndarray, _: Any) -> Tensor:
        return torch.empty(array.shape, dtype=torch.int32, device="cuda")

    values = {"name": "NVIDIA H100 80GB HBM3", "total_memory": 85 << 30, "major": 9, "minor": 0}
    values |= {"multi_processor_count": 132, "max_threads_per_multi_processor": 2048}
    card = SimpleNamespace(**values, regs_per_multiprocessor=65536, warp_size=32)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
            (torch.cuda, "get_device_properties", lambda *_, **__: card),
            (CudaInterface, "get_device_properties", lambda *_, **__: card),
            (CudaInterface.Worker, "get_device_properties", lambda *_, **__: card),
            (scheduler, "has_triton", lambda *_: True),
            (fused_on_gpu, "__call__", one_kernel),
            (head, "add_product", add_product),
            (keyed_noise, "array_to_device", draws),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        attentions = AttentionInterface._global_mapping  # noqa: SLF001  register() has no way back
        stack.enter_context(mock.patch.dict(attentions, sdpa=_flash_attention))
        yield


def _flash_attention(
    _: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    __: Any,
    dropout: float = 0.0,
    scaling: Any = None,
    **___: Any,
) -> tuple[Tensor, None]:
    """Without the choice that asks the driver; queries and keys in the value's type."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.to(value.dtype).repeat_interleave(groups, 1) for x in (key, value))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001  torch's own name
    found = kernel(query.to(value.dtype), key, value, dropout, True, False, scale=scaling)
    return found[0].transpose(1, 2).contiguous(), None


def fake_model(what: str) -> Any:
    """GPT-2 124M to train from scratch, or a Llama of that size with an adapter on every matrix."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from isobatch.models.causal_lm import adapters, chunked_cross_entropy

    if what == "gpt2":
        config = AutoConfig.for_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    else:
        config = AutoConfig.for_model("llama", **dict(zip(WIDTHS, LLAMAS[what], strict=True)))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config)
    chunked_cross_entropy.make_head_bypassable(model)
    if what != "gpt2":
        options = {
            "r": 16,
            "alpha": 16,
            "dropout": 0.05,
            "bias": "none",
            "targets": "all-linear",
            "scale": "plain",
        }
        options |= dict.fromkeys(("init", "layers", "experts"))
        move, nn.Module.to = nn.Module.to, lambda self, *_, **__: self  # type: ignore[method-assign]
        with torch.device("cuda"):
            named = {f"lora_{name}": value for name, value in options.items()}
            asked = SimpleNamespace(adapter="lora", also_train=None, frozen_dtype="bf16", **named)
            adapters.add_adapter(model, asked, "", None)
        nn.Module.to = move  # type: ignore[method-assign]
    return model


def block_graphs(rows: int, length: int, mode: str) -> list[torch.fx.GraphModule]:
    """What Inductor gets of both passes of a block of GPT-2 124M, traced on a CPU without computing it."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx
    from transformers import AutoConfig, AutoModelForCausalLM

    from isobatch.engine.model_setup.compile_model import compile_model
    from isobatch.engine.model_setup.layer_blocks import layer_blocks
    from isobatch.models.fused_layers import fuse_layers

    plain = {"n_layer": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **plain))
    fuse_layers(model)
    plan: Any = SimpleNamespace(compile=mode, device="cuda")
    compile_model(model, plan)
    (block,) = layer_blocks(model)
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        found.append(graph)
        outputs: Any = graph.graph.output_node().args[0]

        def empty(node: torch.fx.Node | None) -> Tensor | None:
            value: Any = node and node.meta["val"]
            return (
                value
                if value is None
                else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            )

        return make_boxed_func(lambda *_: list(map(empty, outputs)))

    block.compile(backend=lambda graph, given: compile_fx(graph, given, inner_compile=keep))
    with torch.autocast("cpu", torch.bfloat16):
        out = block(torch.empty(rows, length, model.config.n_embd, requires_grad=True))
    out = out[0] if isinstance(out, tuple) else out
    out.backward(torch.empty_like(out))
    return found


def scheduled(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, Any]:
    """A graph on fake CUDA tensors as Inductor rewrites it, and its kernels, of which none is compiled."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for node in graph.graph.nodes:
        if node.op == "call_function" and "attention" in operation(node):
            node.target = _attention_backward if "backward" in operation(node) else _attention
    graph.recompile()
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with fake, torch.no_grad(), V.set_fake_mode(fake):
        given = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="cuda:0") for v in values]
        module = make_fx(graph, _allow_non_fake_inputs=True)(*given)
        view_to_reshape(module)
        post_grad_passes(module, is_inference=False)
        lowered = GraphLowering(module, given, fake.shape_env)
        handlers = (
            V.set_graph_handler(lowered),
            V.set_debug_handler(DebugContext()),
            V.set_extern_kernel_nodes([]),
        )
        with handlers[0], handlers[1], handlers[2], pretended_timings():
            lowered.run(*given)
            lowered.init_wrapper_code()
            lowered._update_scheduler()  # noqa: SLF001  what Inductor's code generation begins with
    return module, lowered


@contextlib.contextmanager
def pretended_timings() -> Iterator[None]:
    """Inside, Inductor gets the least time of each kernel in place of a measured one, in ms."""
    import triton
    from torch._inductor import config
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.select_algorithm import AlgorithmSelectorCache, ExternKernelCaller

    def products(_: Any, __: str, inputs: Any, layout: Any, *others: Any, **___: Any) -> dict[Any, float]:
        asked = SimpleNamespace(get_size=lambda: layout.size, inputs=inputs)
        least = 1e3 * product_flops(asked) / RATE
        return {c: least if isinstance(c, ExternKernelCaller) else least / TRITON for c in others[2]}

    def apart(_: Any, nodes: Any) -> tuple[float, str]:
        return 1e3 * sum(node.get_read_write_buffers_sizes() for node in nodes) / BANDWIDTH, ""

    def together(self: Any, nodes: Any, _: Any) -> tuple[float, str]:
        return max(1e3 * product_flops(nodes[0].node) / RATE / TRITON, apart(self, nodes)[0]), ""

    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(compile_threads=1))
        for owner, name, value in (
            (AlgorithmSelectorCache, "do_autotuning", products),
            (Scheduler, "benchmark_fused_nodes", apart),
            (Scheduler, "compile_kernel", lambda _, nodes, **__: (None, nodes)),
            (Scheduler, "benchmark_codegened_module", together),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    """A CPU's attention in a graph, as a card's; so its backward pass."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[:2]  # noqa: SLF001


def _attention_backward(*tensors: Any, **_: Any) -> Any:
    (*known, _, _), length = tensors, tensors[0].shape[2]
    state = torch.empty(2, dtype=torch.uint64, device=tensors[0].device)
    more = (None, None, length, length, 0.0, True, state, state)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*known, *more)  # noqa: SLF001


def measure(what: str = "gpt2", rows: int = 16, length: int = 1024, mode: str = "off") -> tuple[Kernels, Any]:
    """One step of so many rows under bf16 autocast; `mode`: how blocks are compiled, of GPT-2."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from isobatch.engine.model_setup.layer_blocks import layer_blocks
    from isobatch.engine.noise.keyed_attention import key_dropout
    from isobatch.engine.noise.keyed_noise import KeyedNoise
    from isobatch.engine.strategies.base import gradient_norm
    from isobatch.models.causal_lm import chunked_cross_entropy as head
    from isobatch.models.fused_layers import fuse_layers

    compiled = mode != "off"
    kernels, graphs = Kernels(), block_graphs(rows, length, mode) if compiled else []
    with FakeTensorMode(allow_non_fake_inputs=True), pretended_card(kernels):
        model, noise, device = fake_model(what), KeyedNoise(0), torch.device("cuda")
        fuse_layers(model)
        key_dropout(model, noise)
        noise.bind(0, np.arange(rows), device)
        trained = [p for p in model.parameters() if p.requires_grad]
        blocks = layer_blocks(model) if compiled else []
        inside = {p for block in blocks for p in block.parameters()}
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: setattr(kernels, "part", "as written"))
            block.register_forward_hook(lambda *_: setattr(kernels, "part", "forward"))
        tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        table = model.get_input_embeddings().weight

        def loss(states: Tensor) -> Tensor:
            kernels.part = "head"
            return head.chunked_loss(states, tokens.flatten(), model.lm_head, rows * length)

        with kernels:
            with torch.autocast("cuda", torch.bfloat16):
                head.at_head(model.lm_head, model, tokens, loss)
            cast = [p for p in trained if p not in inside and p is not table]
            kernels.estimate_backward(cast, frozen=what != "gpt2")
            tied = table.numel() if table is model.lm_head.weight else 0
            kernels.add(
                "head's gradients times 1 / tokens", 0, 8.0 * (tied + rows * length * table.shape[1]), 2
            )
            kernels.add("head's gradient and embedding's added", 0, 12.0 * tied, bool(tied))
            for key in [key for key in kernels.rows if key[0] == "as written"]:
                del kernels.rows[key]
            kernels.part = "update"
            gradient_norm([torch.empty_like(p) for p in trained], device)
            kernels.add("adamw", 0, 32.0 * sum(p.numel() for p in trained))  # writes clipped gradients
        for kernels.part, graph in zip(("forward", "backward"), graphs, strict=False):
            kernels.add_graph(graph, len(blocks))
    return kernels, model


def report(what: str, rows: int, length: int, mode: str = "off") -> float:
    """Prints the parts and the longest kernels; returns the least time of a step in seconds."""
    kernels, model = measure(what, rows, length, mode)
    config, adapted, tokens = model.config, what != "gpt2", rows * length
    left_out = ("wpe", "embed_tokens", "lora")
    matrices = sum(
        p.numel()
        for n, p in model.named_parameters()
        if p.ndim == 2 and not any(word in n for word in left_out)
    )
    flops = (4 if adapted else 6) * matrices + 12 * config.num_hidden_layers * config.hidden_size * length
    count = sum(row[0] for row in kernels.rows.values())
    device = sum(row[3] for row in kernels.rows.values())
    least = max(device, count * LAUNCH)
    speed, share = tokens / least, tokens * flops / least / PEAK
    print(f"{what}: {rows} rows of {length}, bf16 autocast, --compile {mode}: {count:.0f} kernels")
    print(f"  at least {least * 1e3:.1f} ms: {speed:,.0f} tokens/s, MFU {share:.3f}")
    print(f"  the host waits: {dict(+kernels.waits) or 'never'}")
    longest = sorted(kernels.rows.items(), key=lambda row: -row[1][3])[:16]
    for (part, name), (times, work, moved, seconds) in longest:
        size = f"{work / 1e12:.2f} TFLOP, {moved / 1e9:.1f} GB"
        print(f"  {seconds * 1e3:7.2f} ms {times:5.0f} x {part} {name}: {size}")
    return least


if __name__ == "__main__":
    if torch.version.cuda is None:
        sys.exit("this torch is built for CPUs: `make gpu-dry` needs one that is built for CUDA")
    report(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
