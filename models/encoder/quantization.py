"""Layers that train as they will run: 4-bit weights, 8-bit activations, integers in the kernel.

Designed for onnxruntime's integer GEMM on a CPU: weights symmetric with a scale per output channel,
activations unsigned 8-bit with one static scale and zero point per tensor. Scales are learned (Esser et al.
2020, LSQ); zero points are set once, from the first training samples. Not torchao's: its QAT knows no static
activations per tensor, quantizes weights in groups, which integer GEMMs cannot take, and its converted layers
are slower than fp32 on a CPU (torchao 0.18).

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

ACTIVATION_LEVELS = 255
CLIPS = 24
"""Clipping ranges tried for each weight channel and activation."""
MOST_VALUES = 1 << 16
"""Activations of one place looked at to choose its range."""
LEAST_SCALE = 1e-8


def top(bits: int) -> int:
    """Largest value of a symmetric integer: 7 of 4 bits, 127 of 8."""
    return int(2 ** (bits - 1) - 1)


class Quantizer(nn.Module):
    """Activations as unsigned 8-bit numbers with a learned scale and a fixed zero point."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("zero_point", torch.zeros(1))
        self.zero_point: Tensor
        self.seen: list[Tensor] | None = None
        """Values collected while ranges are being chosen."""
        self.told: Tensor | None = None
        """Levels 0..255 that another program chose for the next evaluation: taken in place of its own."""
        self.doubt = 0.0
        """How far beyond half a step any of them was from the value here."""

    def forward(self, x: Tensor) -> Tensor:
        """Training: x rounded. Evaluation: whole numbers, of which `scale` makes x."""
        if self.seen is not None:
            self.seen.append(_some(x.detach()))
            return x
        if self.training:
            factor = 1.0 / (x.numel() * ACTIVATION_LEVELS) ** 0.5
            return torch._fake_quantize_learnable_per_tensor_affine(
                x.float(), self.scale, self.zero_point, 0, ACTIVATION_LEVELS, factor
            )
        ratio = (x / self.scale).clamp(-self.zero_point, ACTIVATION_LEVELS - self.zero_point)
        if self.told is None:
            return torch.round(ratio)
        levels = self.told - self.zero_point
        off = float((levels - ratio).abs().max()) - 0.5
        self.doubt = off if off != off else max(self.doubt, off)  # max() would lose not-a-number
        return levels

    def choose(self) -> None:
        """Take the range of least squared error over what was collected."""
        assert self.seen is not None
        values = torch.cat(self.seen)
        self.seen = None
        low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
        best = (float("inf"), 1.0, 0.0)
        for share in torch.linspace(1.0, 0.4, CLIPS).tolist():
            scale = max((high - low) * share / ACTIVATION_LEVELS, LEAST_SCALE)
            zero = round(-low * share / scale)
            levels = torch.round(values / scale).add_(zero).clamp_(0, ACTIVATION_LEVELS).sub_(zero)
            error = float((levels * scale - values).square().sum(dtype=torch.float64))
            best = min(best, (error, scale, float(zero)))
        self.scale.data.fill_(best[1])
        self.zero_point.fill_(best[2])


def _some(x: Tensor) -> Tensor:
    """At most MOST_VALUES of the elements, evenly spaced."""
    flat = x.reshape(-1)
    return flat[:: max(1, flat.numel() // MOST_VALUES)].clone()


class QuantLinear(nn.Linear, CachedWeightTransform):
    """A linear layer with few-bit weights, whose input goes through `reads`."""

    rounded: Tensor
    """The weights rounded, as a function of weights and scales, while held."""
    leaf: Tensor | None = None
    """The same for micro-batches to compute with: their gradients gather in it."""

    def __init__(self, linear: nn.Linear, bits: int, reads: Quantizer, own: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.bits = bits
        self.weight_scale = nn.Parameter(channel_scales(self.weight.detach(), bits))
        self.own = reads if own else None
        # Shared by query, key and value: registered once, with the attention.
        self._place = [reads]

    @property
    def reads(self) -> Quantizer:
        """What rounds the input: its own, or the attention's."""
        return self._place[0]

    def forward(self, x: Tensor) -> Tensor:
        reads = self.reads
        if self.own is not None:
            x = reads(x)
        if reads.seen is not None:
            return F.linear(x, self.weight, self.bias)
        if self.training:
            return F.linear(x, self._round() if self.leaf is None else self.leaf, self.bias)
        with torch.autocast(x.device.type, enabled=False):  # half precision cannot count so far
            return F.linear(x.float(), self.levels()) * (reads.scale * self.weight_scale) + self.bias

    def _round(self) -> Tensor:
        rounded: Tensor = _Rounded.apply(self.weight, self.weight_scale, top(self.bits))
        return rounded

    def hold(self) -> None:
        self.rounded = self._round()
        self.leaf = self.rounded.detach().requires_grad_()

    def release(self, whole: bool) -> None:
        rounded, leaf = self.rounded, self.leaf
        del self.rounded, self.leaf
        if whole and leaf is not None and leaf.grad is not None:
            rounded.backward(leaf.grad)

    def levels(self) -> Tensor:
        """(out, in) whole numbers, as floats."""
        most = top(self.bits)
        return torch.round(self.weight / self.weight_scale[:, None]).clamp_(-most, most)


class _Rounded(torch.autograd.Function):
    """LSQ of a weight with a scale per row; half the time of torch's own kernel on a CPU.

    d/dw passes where w is inside the clip; d/ds = sum over the row of (levels - w/s inside, levels outside),
    times 1/sqrt(columns * top) as in the paper.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, most: int) -> Tensor:
        ratio = weight / scale[:, None]
        levels = torch.round(ratio).clamp_(-most, most)
        ctx.save_for_backward(ratio, levels)
        ctx.most = most
        return levels * scale[:, None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ratio, levels = ctx.saved_tensors
        inside = ratio.abs() <= ctx.most + 0.5
        by_scale = torch.einsum("oi,oi->o", gradient, levels.sub_(ratio.mul_(inside)))
        return gradient * inside, by_scale / (ratio.shape[1] * ctx.most) ** 0.5, None


def channel_scales(weight: Tensor, bits: int) -> Tensor:
    """(out,) scales of least squared error, of some clips of each row's largest value."""
    most = top(bits)
    largest = weight.abs().amax(1).clamp_min(LEAST_SCALE)
    best, error = largest / most, torch.full_like(largest, float("inf"))
    for share in torch.linspace(1.0, 0.3, CLIPS).tolist():
        scale = largest * share / most
        rounded = torch.round(weight / scale[:, None]).clamp_(-most, most) * scale[:, None]
        found = (rounded - weight).square().sum(1)
        best, error = torch.where(found < error, scale, best), torch.minimum(found, error)
    return best


class QuantEmbedding(nn.Embedding):
    """Rows of few-bit numbers, each with a scale; gradients pass through the rounding."""

    def __init__(self, embedding: nn.Embedding, bits: int) -> None:
        super().__init__(
            embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx, device="meta"
        )
        self.weight, self.bits = embedding.weight, bits

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        levels, scales = row_levels(rows.detach(), self.bits)
        rounded = levels * scales
        return rounded + (rows - rows.detach()) if self.training else rounded


def row_levels(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(..., H) whole numbers as floats, and (..., 1) scales from each row's largest value."""
    most = top(bits)
    scales = rows.abs().amax(-1, keepdim=True).clamp_min(LEAST_SCALE) / most
    return torch.round(rows / scales).clamp_(-most, most), scales


def quantizers(model: nn.Module) -> Iterable[tuple[str, Quantizer]]:
    return ((name, m) for name, m in model.named_modules() if isinstance(m, Quantizer))


def quantize(model: Any, bits: int, embedding_bits: int) -> None:
    """Replace the encoder's linear layers, the head's inner one and the embeddings, in place.

    The layer before the logits stays in fp32: it is tiny, and its output is the answer.
    """
    from isobatch.models.encoder import encoders

    for layer in encoders.layers(model):
        if layer.query.out_features:  # where all heads went, a bias is all that is left
            _quantize_attention(layer, bits)
        for part in ("up", "down"):
            layer.put(part, QuantLinear(getattr(layer, part), bits, Quantizer(), own=True))
    inner = encoders.inner_head(model)
    model.set_submodule(inner, QuantLinear(model.get_submodule(inner), 8, Quantizer(), own=True))
    if embedding_bits < 32:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Embedding:
                few = embedding_bits if "word" in name else 8
                model.set_submodule(name, QuantEmbedding(module, few))


def _quantize_attention(layer: Any, bits: int) -> None:
    shared = Quantizer()
    layer.attention.register_module("reads", shared)
    layer.attention.register_forward_pre_hook(_read_first, with_kwargs=True)
    for part in ("query", "key", "value"):
        layer.put(part, QuantLinear(getattr(layer, part), bits, shared, own=False))
    layer.put("output", QuantLinear(layer.output, bits, Quantizer(), own=True))


def _read_first(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """The states that query, key and value read, rounded once for the three."""
    if given:
        return (module.reads(given[0]), *given[1:]), named
    return given, {**named, "hidden_states": module.reads(named["hidden_states"])}


def is_quantized(model: nn.Module) -> bool:
    return any(True for _ in quantizers(model))


def collecting(model: nn.Module) -> None:
    """From now on forwards are in fp32, and quantizers remember what they see."""
    for _, quantizer in quantizers(model):
        quantizer.seen = []


def choose_ranges(model: nn.Module) -> None:
    """End of collecting."""
    for _, quantizer in quantizers(model):
        quantizer.choose()


def rounded_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of an ordinary model of this shape whose weights are the rounded ones."""
    quantized = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear | QuantEmbedding)}
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        owner, _, last = name.rpartition(".")
        module = quantized.get(owner)
        if last in ("weight_scale", "scale", "zero_point"):
            continue
        if last == "weight" and isinstance(module, QuantLinear):
            value = module.levels() * module.weight_scale[:, None]
        elif last == "weight" and isinstance(module, QuantEmbedding):
            levels, scales = row_levels(module.weight, module.bits)
            value = levels * scales
        found[name] = value.detach().contiguous()
    return found


def extra_state(model: nn.Module) -> dict[str, Tensor]:
    """Scales and zero points."""
    names = ("weight_scale", "scale", "zero_point")
    return {k: v for k, v in model.state_dict().items() if k.rpartition(".")[2] in names}
