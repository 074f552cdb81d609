"""ONNX export of a classifier: an fp32 graph, or 4-bit weights on disk that run as 8-bit integers.

Few-bit weights are INT4 initializers with a Cast to INT8: onnxruntime folds the Cast when it loads the file
and fuses each DequantizeLinear, MatMul, QuantizeLinear group to an integer GEMM. So the file has the size of
4 bits; memory after loading and speed are those of 8 bits.

Letters: B samples, T tokens, H hidden width, A heads of a layer, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.models import saving
from isobatch.models.encoder import encoders

OPSET = 21
"""The first opset with INT4."""
IR_VERSION = 10
MASKED = -1e4
"""Added to the attention scores of padding: their softmax is 0 in fp32."""
ACTIVATIONS = {"gelu": "Gelu", "relu": "Relu"}
"""Activation in config.json -> ONNX operator."""


class OnnxGraphBuilder:
    """Collects nodes and constants of a graph in the order in which they are computed.

    Its methods return the name of the tensor that they add.
    """

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.quantized_activations: list[tuple[str, int, Any]] = []
        """(name, number of dimensions, quantizer) of each activation that is rounded to 8 bits."""
        self._count = 0

    def new_name(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def constant(self, value: Any) -> str:
        """A number, an array or a tensor."""
        from onnx import numpy_helper

        array = np.array(value if isinstance(value, np.generic | np.ndarray) else _to_numpy(value), order="C")
        self.constants.append(numpy_helper.from_array(array, name := self.new_name()))
        return name

    def int4_constant(self, levels: np.ndarray) -> str:
        """Levels in -8..7, stored two to a byte; other nodes see an INT8 tensor."""
        from onnx import TensorProto, helper

        int4 = helper.tensor_dtype_to_np_dtype(TensorProto.INT4)
        return self.cast(self.constant(levels.astype(int4)), "INT8")

    def cast(self, x: str, kind: str) -> str:
        """`kind`: a name of onnx's TensorProto."""
        from onnx import TensorProto

        return self.node("Cast", x, to=getattr(TensorProto, kind))

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        return self.multi_output_node(operator, 1, *inputs, **attributes)[0]

    def multi_output_node(self, operator: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        from onnx import helper

        names = [self.new_name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names


def write_onnx(model: Any, file: Path, expose_levels: bool = False) -> list[Any]:
    """Write a classifier, quantized or not, as an ONNX file.

    Inputs: those that this model's tokenizer makes, all (batch, tokens) int64. Output: logits (batch,
    classes). With `expose_levels` all rounded activations are outputs too. Returns the quantizers, in their
    order.
    """
    import onnx
    from onnx import TensorProto, helper

    model = model.eval()
    graph = OnnxGraphBuilder()
    names = saving.model_input_names(model.config.to_dict())
    x = _embeddings(graph, model, "token_type_ids" in names)
    mask = _attention_mask(graph)
    for layer in encoders.layers(model):
        x = _encoder_layer(graph, model, layer, x, mask)
    logits = _classification_head(graph, model, x)
    graph.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
    rounded = graph.quantized_activations if expose_levels else []
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "tokens"]) for n in names]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", model.config.num_labels])]
    outputs += [helper.make_tensor_value_info(n, TensorProto.UINT8, [None] * rank) for n, rank, _ in rounded]
    onnx_model = helper.make_model(
        helper.make_graph(graph.nodes, "classifier", inputs, outputs, graph.constants),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="isobatch",
    )
    onnx.checker.check_model(onnx_model)
    onnx.save(onnx_model, str(file))
    return [quantizer for *_, quantizer in graph.quantized_activations]


def activation_of(config: Mapping[str, Any]) -> str:
    """The name of a model's activation function."""
    return str(config.get("hidden_act") or config.get("activation") or "gelu")


def _to_numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def _layer_norm(graph: OnnxGraphBuilder, x: str, norm: Any) -> str:
    affine = [graph.constant(part) for part in (norm.weight, norm.bias)]
    return graph.node("LayerNormalization", x, *affine, axis=-1, epsilon=norm.eps)


def _embeddings(graph: OnnxGraphBuilder, model: Any, has_types: bool) -> str:
    embeddings = getattr(model, model.base_model_prefix).embeddings
    x = graph.node(
        "Add",
        _embedding_lookup(graph, embeddings.word_embeddings, "input_ids"),
        _embedding_lookup(graph, embeddings.position_embeddings, _position_ids(graph, model.config)),
    )
    types = getattr(embeddings, "token_type_embeddings", None)
    if types is not None:
        type_ids = "token_type_ids" if has_types else graph.constant(np.zeros((1, 1), np.int64))
        x = graph.node("Add", x, _embedding_lookup(graph, types, type_ids))
    return _layer_norm(graph, x, embeddings.LayerNorm)


def _position_ids(graph: OnnxGraphBuilder, config: Any) -> str:
    """RoBERTa counts the tokens that are no padding, starting after its padding id; others count from 0."""
    if config.model_type == "roberta":
        pad = graph.constant(np.int64(config.pad_token_id))
        token = graph.cast(graph.node("Not", graph.node("Equal", "input_ids", pad)), "INT64")
        counted = graph.node("CumSum", token, graph.constant(np.int64(1)))
        return graph.node("Add", graph.node("Mul", counted, token), pad)
    one = graph.constant(np.int64(1))
    width = graph.node("Gather", graph.node("Shape", "input_ids"), one)
    return graph.node("Range", graph.constant(np.int64(0)), width, one)


def _embedding_lookup(graph: OnnxGraphBuilder, embedding: Any, ids: str) -> str:
    from isobatch.models.encoder.quantization import QuantEmbedding, quantize_rows

    if not isinstance(embedding, QuantEmbedding):
        return graph.node("Gather", graph.constant(embedding.weight), ids)
    levels, scales = quantize_rows(embedding.weight.detach(), embedding.bits)
    table = _to_numpy(levels).astype(np.int8)
    stored = graph.int4_constant(table) if embedding.bits == 4 else graph.constant(table)
    rows = graph.cast(graph.node("Gather", stored, ids), "FLOAT")
    return graph.node("Mul", rows, graph.node("Gather", graph.constant(scales), ids))


def _attention_mask(graph: OnnxGraphBuilder) -> str:
    """(B, 1, 1, T): 0 for tokens and MASKED for padding, to be added to attention scores."""
    wide = graph.node("Unsqueeze", "attention_mask", graph.constant(np.array([1, 2])))
    inside = graph.cast(wide, "FLOAT")
    outside = graph.node("Sub", graph.constant(np.float32(1)), inside)
    return graph.node("Mul", outside, graph.constant(np.float32(MASKED)))


def _encoder_layer(
    graph: OnnxGraphBuilder, model: Any, layer: encoders.EncoderLayer, x: str, mask: str
) -> str:
    block = model.get_submodule(layer.prefix)
    if model.config.model_type == "distilbert":
        first, second = block.sa_layer_norm, block.output_layer_norm
    else:
        first, second = block.attention.output.LayerNorm, block.output.LayerNorm
    activation = ACTIVATIONS[activation_of(model.config.to_dict())]
    attended = _attention(graph, layer, x, mask)
    x = _layer_norm(graph, graph.node("Add", attended, x), first)
    up = graph.node(activation, _linear_layers(graph, x, layer.up))
    return _layer_norm(graph, graph.node("Add", _linear_layers(graph, up, layer.down), x), second)


def _attention(graph: OnnxGraphBuilder, layer: encoders.EncoderLayer, x: str, mask: str) -> str:
    size = layer.head_size
    heads = layer.query.out_features // size
    if heads == 0:  # without heads only the output's bias is left
        return graph.constant(layer.output.bias)
    qkv = _linear_layers(graph, x, layer.query, layer.key, layer.value)
    query, key, value = graph.multi_output_node("Split", 3, qkv, axis=-1, num_outputs=3)
    split = graph.constant(np.array([0, 0, heads, size]))

    def split_heads(y: str, order: list[int]) -> str:
        return graph.node("Transpose", graph.node("Reshape", y, split), perm=order)

    scores = graph.node("MatMul", split_heads(query, [0, 2, 1, 3]), split_heads(key, [0, 2, 3, 1]))
    scaled = graph.node("Mul", scores, graph.constant(np.float32(size**-0.5)))
    probabilities = graph.node("Softmax", graph.node("Add", scaled, mask), axis=-1)
    context = graph.node("MatMul", probabilities, split_heads(value, [0, 2, 1, 3]))
    joined = graph.node("Transpose", context, perm=[0, 2, 1, 3])
    flat = graph.node("Reshape", joined, graph.constant(np.array([0, 0, heads * size])))
    return _linear_layers(graph, flat, layer.output)


def _linear_layers(graph: OnnxGraphBuilder, x: str, *modules: Any, rank: int = 3) -> str:
    """Linear layers with the same input, their outputs concatenated. `rank`: number of dimensions of x."""
    from isobatch.models.encoder.quantization import QuantLinear

    bias = graph.constant(np.concatenate([_to_numpy(m.bias) for m in modules]))
    if isinstance(modules[0], QuantLinear):
        product = _quantized_matmul(graph, x, modules, rank)
    else:
        weight = np.concatenate([_to_numpy(m.weight) for m in modules]).T
        product = graph.node("MatMul", x, graph.constant(weight))
    return graph.node("Add", product, bias)


def _quantized_matmul(graph: OnnxGraphBuilder, x: str, modules: tuple[Any, ...], rank: int) -> str:
    quantizer = modules[0].input_quantizer
    scale = graph.constant(np.float32(_to_numpy(quantizer.scale)[0]))
    zero = graph.constant(np.uint8(round(float(quantizer.zero_point[0]))))
    x_levels = graph.node("QuantizeLinear", x, scale, zero)
    graph.quantized_activations.append((x_levels, rank, quantizer))
    rounded = graph.node("DequantizeLinear", x_levels, scale, zero)
    levels = np.concatenate([_to_numpy(m.levels()) for m in modules]).T.astype(np.int8)
    scales = np.concatenate([_to_numpy(m.weight_scale) for m in modules])
    stored = graph.int4_constant(levels) if modules[0].bits == 4 else graph.constant(levels)
    zeros = graph.constant(np.zeros(len(scales), np.int8))
    weight = graph.node("DequantizeLinear", stored, graph.constant(scales), zeros, axis=1)
    return graph.node("MatMul", rounded, weight)


def _classification_head(graph: OnnxGraphBuilder, model: Any, x: str) -> str:
    """Logits: the first token's state through the dense layer, its activation and the output layer."""
    model_type = model.config.model_type
    dense, output = (model.get_submodule(name) for name in encoders.FAMILIES[model_type][2:])
    first = graph.node("Gather", x, graph.constant(np.int64(0)), axis=1)
    hidden = _linear_layers(graph, first, dense, rank=2)
    activated = graph.node("Relu" if model_type == "distilbert" else "Tanh", hidden)
    return _linear_layers(graph, activated, output, rank=2)
