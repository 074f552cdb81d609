"""Layers of transformers and peft that are many small kernels on a GPU, as one kernel each.

The classes are changed and no model: those built before, and copies, follow. On a CPU, GELU aside, they
compute what they did in fp32, to the bit.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.models.activations import fuse_gelu
from isobatch.models.fused_kernels import fused_on_gpu

GATED = ("down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))", "return down_proj")
"""The forward pass of the gated MLP that Llama and a hundred others have."""


def fuse_layers(model: nn.Module) -> None:
    """Fuse what `model` has: GELUs by tanh, RMS norms, rotary embeddings, gated MLPs and LoRA."""
    fuse_gelu()
    kinds: set[Any] = {type(module) for module in model.modules()}
    for kind in (
        k for k in kinds if k.__module__.startswith(("transformers.", "peft.")) and "fused" not in vars(k)
    ):
        kind.fused = True
        if kind.__name__.endswith("RMSNorm"):
            kind.forward = _as_method(kind.forward)
        elif _statements(kind.forward) == GATED:
            kind.forward = _gated_mlp
        elif kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ == "Linear":
            kind.forward = _lora_forward(kind.forward)
        elif _reads_by_products_alone(kind.forward):
            kind.forward = _casting_once(kind.forward)
        home = vars(sys.modules[kind.__module__])
        if not isinstance(rotate := home.get("apply_rotary_pos_emb"), fused_on_gpu | None):
            home["apply_rotary_pos_emb"] = fused_on_gpu(rotate)


def _statements(function: Any) -> tuple[str, ...]:
    """What a function does, a line each; nothing where its source is not known."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return ()
    return tuple(map(ast.unparse, tree.body[0].body)) if isinstance(tree.body[0], ast.FunctionDef) else ()


def _as_method(forward: Any) -> Any:
    fused = fused_on_gpu(lambda x, module: forward(module, x))
    return lambda module, x: fused(x, module)


def _reads_by_products_alone(forward: Any) -> bool:
    """Whether an attention's hidden states go into its projections, and nowhere else but for their shape."""
    text = " ".join(_statements(forward))
    known = re.findall(r"self\.[qkv]_proj\(hidden_states\)|hidden_states\.shape", text)
    return "self.q_proj(hidden_states)" in known and len(known) == text.count("hidden_states")


def _casting_once(forward: Any) -> Any:
    """Autocast rounds what each projection reads: here it is rounded for all of them at once."""

    def casting(module: Any, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        return forward(module, _as_autocast(hidden_states), *args, **named)

    return casting


def _as_autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _gated_mlp(module: Any, x: Tensor) -> Any:
    x = _as_autocast(x)
    return module.down_proj(_gate(module.gate_proj(x), module.up_proj(x), module.act_fn))


@fused_on_gpu
def _gate(gate: Tensor, up: Tensor, activation: Any) -> Any:
    return activation(gate) * up


@fused_on_gpu
def _add_scaled(result: Tensor, more: Tensor, scale: float) -> Any:
    return result + more * scale


def _lora_forward(plain: Any) -> Any:
    """peft's forward pass of a linear layer, but one plain adapter's sum is one kernel, and autocast, which
    rounds the factors' input anyway, gets that input as it is.
    """

    def forward(layer: Any, x: Tensor, *args: Any, **named: Any) -> Any:
        active = [name for name in layer.active_adapters if name in layer.lora_A]
        other = layer.disable_adapters or layer.merged or len(active) != 1 or layer.lora_variant or named
        if other or args:
            return plain(layer, x, *args, **named)
        name, result = active[0], layer.base_layer(x)
        factor = layer.lora_A[name]
        if not torch.is_autocast_enabled(x.device.type):
            x = layer._cast_input_dtype(x, factor.weight.dtype)  # noqa: SLF001  peft has no public name
        more = layer.lora_B[name](factor(layer.lora_dropout[name](x)))
        return _add_scaled(result, more, layer.scaling[name]).to(result.dtype)

    return forward
