"""Quantization-aware layers: 4-bit weights, 8-bit activations, computed as onnxruntime will.

Designed for onnxruntime's integer GEMM on a CPU: weights are symmetric with a scale per output channel,
activations unsigned 8-bit with one static scale and zero point per tensor. Scales are learned (Esser et al.
2020, LSQ); zero points are set once, in a calibration on the first training samples. torchao is not used: its
QAT has no static per-tensor activations, quantizes weights in groups, which integer GEMMs cannot take, and
its converted layers are slower than fp32 on a CPU (torchao 0.18).

Evaluation computes in whole numbers, as the kernel does: sums of up to 9,000 products of 4-bit and 8-bit
numbers stay below 2^24 and are exact in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isobatch.models.base import CachedWeightTransform

MAX_ACTIVATION_LEVEL = 255
CLIP_CANDIDATES = 24
"""Clipping ranges tried for each weight channel and each activation."""
MAX_VALUES_PER_CALL = 1 << 16
"""Values that a quantizer keeps from one forward to choose its range."""
MIN_SCALE = 1e-8


def max_level(bits: int) -> int:
    """Largest level of a symmetric integer: 7 for 4 bits, 127 for 8."""
    return int(2 ** (bits - 1) - 1)


class ActivationQuantizer(nn.Module):
    """Rounds activations to unsigned 8 bits with a learned scale and a fixed zero point.

    The scale's gradient is multiplied by 1/sqrt(features * largest level), as in the paper.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("zero_point", torch.zeros(1))
        self.zero_point: Tensor
        self.collected: list[Tensor] | None = None
        """Values seen since the calibration began; None when there is none."""
        self.given_levels: Tensor | None = None
        """Levels 0..255 that onnxruntime computed for the next forward's input, taken in place of its own;
        -1 where it is to keep its own.
        """
        self.max_rounding_excess = 0.0
        """Most that such a level was off the value here, in levels, beyond the half of any rounding."""

    def forward(self, x: Tensor) -> Tensor:
        """Training: x fake-quantized. Evaluation: whole numbers that make x when multiplied by `scale`."""
        if self.collected is not None:
            flat = x.detach().reshape(-1)
            self.collected.append(flat[:: max(1, flat.numel() // MAX_VALUES_PER_CALL)].clone())
            return x
        if self.training:
            gradient_scale = 1.0 / (x.shape[-1] * MAX_ACTIVATION_LEVEL) ** 0.5
            return torch._fake_quantize_learnable_per_tensor_affine(  # noqa: SLF001  torch has no public name
                x.float(), self.scale, self.zero_point, 0, MAX_ACTIVATION_LEVEL, gradient_scale
            )
        ratio = (x / self.scale).clamp(-self.zero_point, MAX_ACTIVATION_LEVEL - self.zero_point)
        if (given := self.given_levels) is None:
            return torch.round(ratio)
        excess = float(torch.where(given < 0, 0.0, given - self.zero_point - ratio).abs().max()) - 0.5
        # max() would drop a NaN.
        self.max_rounding_excess = excess if excess != excess else max(self.max_rounding_excess, excess)
        return torch.where(given < 0, torch.round(ratio), given - self.zero_point)

    def choose_range(self) -> None:
        """End the calibration: take the scale and zero point of least squared error over its values."""
        assert self.collected is not None
        values, self.collected = torch.cat(self.collected), None
        low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
        best = (float("inf"), 1.0, 0.0)
        for shrink in torch.linspace(1.0, 0.4, CLIP_CANDIDATES).tolist():
            scale = max((high - low) * shrink / MAX_ACTIVATION_LEVEL, MIN_SCALE)
            zero = round(-low * shrink / scale)
            levels = torch.round(values / scale).add_(zero).clamp_(0, MAX_ACTIVATION_LEVEL).sub_(zero)
            error = float((levels * scale - values).square().sum(dtype=torch.float64))
            best = min(best, (error, scale, float(zero)))
        self.scale.data.fill_(best[1])
        self.zero_point.fill_(best[2])


class QuantLinear(nn.Linear, CachedWeightTransform):
    """A linear layer with few-bit weights, whose input goes through `input_quantizer`.

    The names `own` and (in the attention) `reads` are part of checkpoints.
    """

    input_quantizer: ActivationQuantizer
    """What rounds the input: the layer's own quantizer, or the one that it shares with its attention."""
    rounded: Tensor
    """While held: the fake-quantized weight, with the graph from weight and scale."""
    weight_leaf: Tensor | None = None
    """While held: the same without that graph; micro-batches compute with it and gather gradients in it."""

    def __init__(self, linear: nn.Linear, bits: int, input_quantizer: ActivationQuantizer, own: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.bits = bits
        self.weight_scale = nn.Parameter(channel_scales(self.weight.detach(), bits))
        self.own = input_quantizer if own else None
        # Past nn.Module, as no submodule: the attention registers the one that query, key, value share.
        self.__dict__["input_quantizer"] = input_quantizer

    def forward(self, x: Tensor) -> Tensor:
        input_quantizer = self.input_quantizer
        if self.own is not None:
            x = input_quantizer(x)
        if input_quantizer.collected is not None:
            return F.linear(x, self.weight, self.bias)
        if self.training:
            weight = self._fake_quantized_weight() if self.weight_leaf is None else self.weight_leaf
            return F.linear(x, weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):  # 16-bit floats cannot hold these sums exactly
            product = F.linear(x.float(), self.levels())
            product = product * (input_quantizer.scale * self.weight_scale)
            return product if self.bias is None else product + self.bias

    def _fake_quantized_weight(self) -> Tensor:
        return FakeQuantizeWeight.apply(self.weight, self.weight_scale, max_level(self.bits))

    def hold(self) -> None:
        self.rounded = self._fake_quantized_weight()
        self.weight_leaf = self.rounded.detach().requires_grad_()

    def release(self, whole: bool) -> None:
        rounded, weight_leaf = self.rounded, self.weight_leaf
        del self.rounded, self.weight_leaf
        if whole and weight_leaf is not None and weight_leaf.grad is not None:
            rounded.backward(weight_leaf.grad)

    def levels(self) -> Tensor:
        """(out, in) levels of the weight: whole numbers, as floats."""
        largest = max_level(self.bits)
        return torch.round(self.weight / self.weight_scale[:, None]).clamp_(-largest, largest)


class FakeQuantizeWeight(torch.autograd.Function):
    """Fake quantization of a weight with a learned scale per row (LSQ, Esser et al. 2020).

    Takes half the time of torch's own kernel on a CPU. d/dw passes where w is inside the clip; d/ds = sum
    over the row of (levels - w/s inside, levels outside), times 1/sqrt(columns * largest level) as in the
    paper.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, largest: int) -> Tensor:
        ratio = weight / scale[:, None]
        levels = torch.round(ratio).clamp_(-largest, largest)
        ctx.save_for_backward(ratio, levels)
        ctx.largest = largest
        return levels * scale[:, None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ratio, levels = ctx.saved_tensors
        in_range = ratio.abs() <= ctx.largest + 0.5
        scale_gradient = torch.einsum("oi,oi->o", gradient, levels.sub_(ratio.mul_(in_range)))
        return gradient * in_range, scale_gradient / (ratio.shape[1] * ctx.largest) ** 0.5, None


def channel_scales(weight: Tensor, bits: int) -> Tensor:
    """(out,) scales of least squared error: several clips of each row's largest value are tried."""
    largest = max_level(bits)
    row_max = weight.abs().amax(1).clamp_min(MIN_SCALE)
    best, error = row_max / largest, torch.full_like(row_max, float("inf"))
    for shrink in torch.linspace(1.0, 0.3, CLIP_CANDIDATES).tolist():
        scale = row_max * shrink / largest
        rounded = torch.round(weight / scale[:, None]).clamp_(-largest, largest) * scale[:, None]
        found = (rounded - weight).square().sum(1)
        best, error = torch.where(found < error, scale, best), torch.minimum(found, error)
    return best


class QuantEmbedding(nn.Embedding):
    """An embedding with few-bit rows, each with a scale; gradients pass straight through the rounding."""

    def __init__(self, embedding: nn.Embedding, bits: int) -> None:
        rows, width = embedding.weight.shape
        super().__init__(rows, width, embedding.padding_idx, device="meta")
        self.weight, self.bits = embedding.weight, bits

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        levels, scales = quantize_rows(rows.detach(), self.bits)
        rounded = levels * scales
        return rounded + (rows - rows.detach()) if self.training else rounded


def quantize_rows(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(..., H) levels, whole numbers as floats, and (..., 1) scales from each row's largest value."""
    largest = max_level(bits)
    scales = rows.abs().amax(-1, keepdim=True).clamp_min(MIN_SCALE) / largest
    return torch.round(rows / scales).clamp_(-largest, largest), scales


def quantizers(model: nn.Module) -> list[ActivationQuantizer]:
    """Of all activations that the model rounds; none where it is not quantized."""
    return [m for m in model.modules() if isinstance(m, ActivationQuantizer)]


def levels_of_scales(model: nn.Module) -> dict[str, int]:
    """Name of each learned scale -> the levels of the range that it makes."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            found[f"{name}.weight_scale"] = max_level(module.bits)
        elif isinstance(module, ActivationQuantizer):
            found[f"{name}.scale"] = MAX_ACTIVATION_LEVEL
    return found


def quantize_model(model: Any, bits: int, embedding_bits: int) -> None:
    """Replace a classifier's linear layers and embeddings by quantized ones, in place.

    The layer that makes the logits stays in fp32: it is tiny, and its output is the answer. Embeddings other
    than words' have 8 bits; 32 `embedding_bits` leave all of them in fp32.
    """
    from isobatch.models.encoder import encoders

    for layer in encoders.layers(model):
        has_heads = layer.output.in_features > 0  # else only the output's bias is left
        found, shared = layer.producers("output") if has_heads else [], ActivationQuantizer()
        for part in ("output", "up", "down") if has_heads else ("up", "down"):
            layer.replace(part, QuantLinear(getattr(layer, part), bits, ActivationQuantizer(), own=True))
        for name, linear, _ in found:
            model.set_submodule(name, QuantLinear(linear, bits, shared, own=len(found) == 1))
        if len(found) > 1:
            layer.attention.register_module("reads", shared)
            layer.attention.register_forward_pre_hook(_quantize_input_once, with_kwargs=True)
    names, dense = dict(model.named_modules()), encoders.FAMILIES[model.config.model_type].dense
    if dense in names:  # a head for tokens may have none
        model.set_submodule(dense, QuantLinear(names[dense], 8, ActivationQuantizer(), own=True))
    if embedding_bits < 32:
        words = model.get_input_embeddings()
        for name, module in names.items():
            if type(module) is nn.Embedding:
                model.set_submodule(name, QuantEmbedding(module, embedding_bits if module is words else 8))


def _quantize_input_once(
    module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, Any]:
    """Forward pre-hook: round the states that query, key and value read once for all three."""
    if arguments:
        return (module.reads(arguments[0]), *arguments[1:]), keywords
    return arguments, {**keywords, "hidden_states": module.reads(keywords["hidden_states"])}


def calibrate(model: nn.Module, forwards: Iterable[Any]) -> None:
    """Choose the quantizers' ranges from what they see while the model computes in fp32; `forwards` makes it
    compute as it is read. From then on forwards are quantized.
    """
    for quantizer in quantizers(model):
        quantizer.collected = []
    for _ in forwards:
        pass
    for quantizer in quantizers(model):
        quantizer.choose_range()


QUANTIZER_STATE = ("weight_scale", "scale", "zero_point")
"""Last names of what a state dict has of quantizers."""


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state dict of an unquantized model of this shape, with the rounded weights in fp32; and scales and
    zero points by name.
    """
    weights, quantized = dict[str, Tensor](), dict[str, Tensor]()
    for name, value in model.state_dict().items():
        module_name, _, kind = name.rpartition(".")
        module = model.get_submodule(module_name)
        if kind == "weight" and isinstance(module, QuantLinear):
            value = module.levels() * module.weight_scale[:, None]
        elif kind == "weight" and isinstance(module, QuantEmbedding):
            levels, scales = quantize_rows(module.weight, module.bits)
            value = levels * scales
        (quantized if kind in QUANTIZER_STATE else weights)[name] = value.detach().contiguous()
    return weights, quantized
