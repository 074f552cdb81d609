"""ONNX files of classifiers, traced by PyTorch: fp32, or few-bit weights that run as 8-bit integers.

Rounding is written as QuantizeLinear and DequantizeLinear, and onnxruntime fuses each group of
DequantizeLinear, MatMul to an integer GEMM when it loads the file. 4-bit weights are INT4 initializers with a
Cast to INT8, which it folds: the file has the size of 4 bits; memory after loading and speed are those of 8.

Letters: B samples, T tokens, K inputs and O outputs of a linear layer.
"""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isobatch.core.errors import ExportError
from isobatch.core.extras import need
from isobatch.models import saving
from isobatch.models.attention_functions import register_attention
from isobatch.models.encoder import encoders, quantization
from isobatch.models.encoder.quantization import ActivationQuantizer, QuantEmbedding, QuantLinear

OPSET = 21
"""The first opset with INT4."""
ATTENTION = "isobatch-onnx"
"""The name of the attention below in transformers' tables."""
MASKED = -1e4
"""Added to the attention scores of padding: their softmax is 0 in fp32."""
QUANTIZER = "quantizer"
"""Metadata of a QuantizeLinear: the name of the model's ActivationQuantizer."""
INT4_LEVELS = "int4_levels"
"""Ends the names of buffers that are stored with 4 bits."""


def classifier_program(model: Any) -> Any:
    """The ONNX program of a classifier of any family, quantized or not; `save` writes its file.

    Inputs: those that this model's tokenizer makes, all (batch, tokens) int64. Output: logits. Raises
    UserError without onnxscript, and ExportError for a model that cannot be traced.
    """
    example = torch.ones(2, 8, dtype=torch.int64)
    example[1, 5:] = 0  # a mask without padding would be left out
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    # Clones: one tensor twice would be one input.
    inputs = {name: (example.clone(), sizes) for name in saving.model_input_names(model.config.to_dict())}
    program = traced(_written_form(model), inputs, "logits", model.config.model_type)
    _finish(program.model)
    return program


def traced(model: nn.Module, inputs: Mapping[str, tuple[Tensor, Any]], output: str, kind: str) -> Any:
    """The ONNX program of a model; `inputs`: an example of each and which of its dimensions vary.

    Raises UserError without onnxscript, and ExportError for a model, of this `kind`, that cannot be traced.
    """
    need("onnxscript", "an ONNX file")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # PyTorch's, of its own code
            program = torch.onnx.export(
                model,
                kwargs={name: example for name, (example, _) in inputs.items()},
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=list(inputs),
                output_names=[output],
                dynamic_shapes={name: sizes for name, (_, sizes) in inputs.items()},
            )
        assert program is not None, "dynamo gives a program"
    except Exception as error:  # of PyTorch's compiler and of the model's own code
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(f"--to onnx: PyTorch cannot trace a {kind} ({reason}): use --to hf") from None
    return program


def write_with_levels(file: Path, to: Path) -> list[str]:
    """Write an ONNX file again with all rounded activations as outputs too, after the logits.

    Returns the names of the model's modules that round, in their order.
    """
    import onnx

    model, names = onnx.load(file), []
    for node in model.graph.node:
        if found := [entry.value for entry in node.metadata_props if entry.key == QUANTIZER]:
            names += found
            model.graph.output.add(name=node.output[0])
    onnx.save(model, to)
    return names


def _written_form(model: Any) -> Any:
    """A copy of a classifier that computes the same in the operations of the file.

    The weights are shared.
    """
    found = copy.deepcopy(model.eval(), {id(one): one for one in (*model.parameters(), *model.buffers())})
    found.config.use_cache = False  # logits alone
    if found.config.model_type in encoders.FAMILIES:
        register_attention(ATTENTION, _attention, _mask)
        found.set_attn_implementation(ATTENTION)
        for layer in encoders.layers(found):
            _write_attention(layer)
    for name, module in list(found.named_modules()):
        if isinstance(module, ActivationQuantizer):
            found.set_submodule(name, _Rounding(module, name))
        elif isinstance(module, QuantLinear):
            found.set_submodule(name, _Linear(module))
        elif isinstance(module, QuantEmbedding):
            found.set_submodule(name, _Embedding(module))
    return found


def _attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if mask is None else scores + mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def _mask(*arguments: Any, **named: Any) -> Tensor:
    """0 for tokens and MASKED for padding, (B, 1, 1, T), where that is all; else what transformers makes."""
    from transformers.masking_utils import bidirectional_mask_function, eager_mask

    inside = named["attention_mask"]
    if named["mask_function"] is bidirectional_mask_function and inside is not None:
        return torch.where(inside[:, None, None, :], 0.0, MASKED)
    return eager_mask(*arguments, **named)


def _write_attention(layer: encoders.EncoderLayer) -> None:
    """Query, key and value as one product; a layer without heads as its output's bias."""
    if not (output := layer.output).in_features:
        layer.replace("output", nn.Identity())
        zeros = torch.zeros(output.out_features)
        layer.replace("attention", _NoHeads(zeros if output.bias is None else output.bias))
        return
    first_alone = "forward" in vars(layer.attention)  # its query has another input than key and value
    parts = layer.producers("output")[first_alone:]
    if len(parts) > 1:
        joined = _join([linear for _, linear, _ in parts])
        # No attribute of a module: tracing allows none to keep a tensor.
        compute = functools.lru_cache(maxsize=1)(lambda x: joined(x).chunk(len(parts), -1))
        for number, (name, *_) in enumerate(parts):
            layer.model.set_submodule(name, _Part(joined, compute, number))


class _NoHeads(nn.Module):
    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias.detach()[None, None], requires_grad=False)

    def forward(self, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return self.bias, None


class _Part(nn.Module):
    """One of several linear layers with the same input: all are computed when the first of them is asked."""

    def __init__(self, joined: nn.Module, compute: Callable[[Tensor], Sequence[Tensor]], number: int) -> None:
        super().__init__()
        self.joined, self.compute, self.number = joined, compute, number

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)[self.number]


def _join(linears: Sequence[nn.Linear]) -> nn.Module:
    """Linear layers with the same input as one, their outputs concatenated."""
    joined = copy.deepcopy(linears[0])
    for name, _ in linears[0].named_parameters():
        setattr(joined, name, nn.Parameter(torch.cat([getattr(one, name) for one in linears])))
    return _Linear(joined) if isinstance(joined, QuantLinear) else joined


class _Linear(nn.Module):
    """A QuantLinear: what it reads, times the whole numbers of its weight (K, O) with a scale per column."""

    def __init__(self, linear: QuantLinear) -> None:
        super().__init__()
        self.bias, self.own = linear.bias, linear.own
        self.name = INT4_LEVELS if linear.bits == 4 else "levels"
        self.register_buffer(self.name, linear.levels().detach().t().to(torch.int8).contiguous())
        self.scale = nn.Buffer(linear.weight_scale.detach())
        self.zero = nn.Buffer(torch.zeros_like(self.scale, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.own is None else self.own(x)
        weight = _dequantize(getattr(self, self.name), self.scale, self.zero, axis=1)
        # Of two dimensions with a bias, onnxruntime would make a product of floats.
        product = x @ weight if x.dim() > 2 else (x[None] @ weight)[0]
        return product if self.bias is None else product + self.bias


class _Rounding(nn.Module):
    """An ActivationQuantizer as two operations."""

    def __init__(self, quantizer: ActivationQuantizer, name: str) -> None:
        super().__init__()
        self.name = name
        self.scale = nn.Buffer(quantizer.scale.detach()[0].clone())
        self.zero_point = nn.Buffer(quantizer.zero_point[0].round().to(torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        levels = torch.onnx.ops.symbolic(
            "QuantizeLinear",
            (x, self.scale, self.zero_point),
            dtype=torch.uint8,
            shape=x.shape,
            metadata_props={QUANTIZER: self.name},
        )
        return _dequantize(levels, self.scale, self.zero_point)


def _dequantize(levels: Tensor, scale: Tensor, zero: Tensor, **attributes: Any) -> Tensor:
    inputs = levels, scale, zero
    return torch.onnx.ops.symbolic(
        "DequantizeLinear", inputs, attributes, dtype=torch.float32, shape=levels.shape
    )


class _Embedding(nn.Module):
    """A QuantEmbedding: rows of whole numbers, times their scales."""

    def __init__(self, embedding: QuantEmbedding) -> None:
        super().__init__()
        levels, scales = quantization.quantize_rows(embedding.weight.detach(), embedding.bits)
        self.name = INT4_LEVELS if embedding.bits == 4 else "levels"
        self.register_buffer(self.name, levels.to(torch.int8))
        self.scales = nn.Buffer(scales)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, getattr(self, self.name)).float() * F.embedding(ids, self.scales)


def _finish(model: Any) -> None:
    """Store 4-bit levels as INT4, and leave out the names of sizes and the notes of the tracing.

    Where onnxruntime knows that two tensors have the same sizes, it fuses their sum with the
    LayerNormalization that follows, and its kernel for that is 8 times slower on a CPU (onnxruntime 1.31).
    """
    import ml_dtypes
    import onnx_ir as ir

    ends = (*model.graph.inputs, *model.graph.outputs)
    for value in ends:
        value.shape = ir.Shape([size if isinstance(size, int) else None for size in value.shape])
    for node in model.graph:
        name = node.metadata_props.get(QUANTIZER)
        node.metadata_props.clear()
        node.metadata_props.update({QUANTIZER: name} if name else {})
        for value in node.outputs:
            value.metadata_props.clear()
            value.shape = value.shape if value in ends else None
    for number, node in enumerate(model.graph):
        zero = node.inputs[2] if node.op_type == "DequantizeLinear" else None
        if zero is not None and zero.name in model.graph.initializers and len(zero.uses()) > 1:
            # onnxruntime reads it anew with each weight, and fails where two weights share it.
            values = ir.tensor(zero.const_value.numpy(), name=f"{zero.name}.{number}")
            node.replace_input_with(2, own := ir.Value(name=values.name, const_value=values))
            model.graph.register_initializer(own)
    for name, value in list(model.graph.initializers.items()):
        if name.endswith(INT4_LEVELS):
            levels = value.const_value.numpy().astype(ml_dtypes.int4)
            del model.graph.initializers[name]
            stored = ir.Value(name=name, const_value=ir.tensor(levels, name=name))
            model.graph.register_initializer(stored)
            cast = ir.node("Cast", [stored], {"to": ir.DataType.INT8})
            value.replace_all_uses_with(cast.outputs[0])
            model.graph.insert_before(model.graph[0], cast)
