"""A classifier as an ONNX graph, written by hand: fp32, or 4-bit on disk and 8-bit in the kernel.

Few-bit weights are INT4 initializers with a Cast to INT8: onnxruntime folds the Cast when it loads the file
and fuses each DequantizeLinear, MatMul, QuantizeLinear group to an integer GEMM. So the file has 4-bit size,
memory after loading 8-bit size, and the speed is that of 8 bits.

Letters: B samples, T tokens, H hidden width, A heads of a layer, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.models.encoder import encoders

OPSET = 21
"""The first with INT4."""
IR_VERSION = 10
MASKED = -1e4
"""Added to the scores of tokens that are padding: their softmax is 0 in fp32."""
ACTIVATIONS = {"gelu": "Gelu", "relu": "Relu"}


class Graph:
    """Nodes and constants, added in the order in which they are computed."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.rounded: list[tuple[str, int]] = []
        """Rounded activations, and how many dimensions each has."""
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def constant(self, value: Any) -> str:
        from onnx import numpy_helper

        name = self.name()
        self.constants.append(numpy_helper.from_array(np.array(value, order="C"), name))
        return name

    def int4(self, levels: np.ndarray) -> str:
        """Numbers of -8..7, two to a byte on disk; an INT8 tensor to who reads it."""
        from onnx import TensorProto, helper

        flat = levels.reshape(-1).astype(np.int8).view(np.uint8) & 0xF
        flat = np.append(flat, np.zeros(len(flat) % 2, np.uint8))
        packed = (flat[0::2] | (flat[1::2] << 4)).tobytes()
        name = self.name()
        self.constants.append(helper.make_tensor(name, TensorProto.INT4, levels.shape, packed, raw=True))
        return self.node("Cast", name, to=TensorProto.INT8)

    def node(self, kind: str, *given: str, **attributes: Any) -> str:
        return self.nodes_of(kind, 1, *given, **attributes)[0]

    def nodes_of(self, kind: str, outputs: int, *given: str, **attributes: Any) -> list[str]:
        from onnx import helper

        names = [self.name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(given), names, **attributes))
        return names


def write(model: Any, file: Path, pairs: bool, roundings: bool = False) -> None:
    """The graph of a classifier, quantized or not, with inputs input_ids, attention_mask and, for pairs,
    token_type_ids, all (batch, tokens) int64, and the output logits (batch, classes).

    With `roundings` all rounded activations are outputs too, in the order of the quantizers.
    """
    import onnx
    from onnx import TensorProto, helper

    model = model.eval()
    graph = Graph()
    x = _embedded(graph, model, pairs)
    mask = _mask(graph)
    for layer in encoders.layers(model):
        x = _layer(graph, model, layer, x, mask)
    logits = _head(graph, model, x)
    graph.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
    rounded = graph.rounded if roundings else []
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if pairs else [])
    given = [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "tokens"]) for n in names]
    found = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", model.config.num_labels])]
    found += [helper.make_tensor_value_info(n, TensorProto.UINT8, [None] * rank) for n, rank in rounded]
    made = helper.make_model(
        helper.make_graph(graph.nodes, "classifier", given, found, graph.constants),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="isobatch",
    )
    onnx.checker.check_model(made)
    onnx.save(made, str(file))


def refuse(config: Mapping[str, Any]) -> None:
    """One line where this graph cannot compute what the model computes."""
    kind = config.get("hidden_act") or config.get("activation") or "gelu"
    if kind not in ACTIVATIONS:
        raise UserError(f"the onnx exports know {', '.join(ACTIVATIONS)}, and this model has {kind}")


def _array(tensor: Any) -> np.ndarray:
    found: np.ndarray = tensor.detach().float().cpu().numpy()
    return found


def _normed(graph: Graph, x: str, norm: Any) -> str:
    weight, bias = graph.constant(_array(norm.weight)), graph.constant(_array(norm.bias))
    return graph.node("LayerNormalization", x, weight, bias, axis=-1, epsilon=norm.eps)


def _embedded(graph: Graph, model: Any, pairs: bool) -> str:
    embeddings = getattr(model, model.base_model_prefix).embeddings
    x = graph.node(
        "Add",
        _rows(graph, embeddings.word_embeddings, "input_ids"),
        _rows(graph, embeddings.position_embeddings, _positions(graph, model.config)),
    )
    types = getattr(embeddings, "token_type_embeddings", None)
    if types is not None:
        used = pairs and types.num_embeddings > 1
        which = "token_type_ids" if used else graph.constant(np.zeros((1, 1), np.int64))
        x = graph.node("Add", x, _rows(graph, types, which))
    return _normed(graph, x, embeddings.LayerNorm)


def _positions(graph: Graph, config: Any) -> str:
    """RoBERTa counts tokens that are no padding, from its padding id on; the others count from 0."""
    from onnx import TensorProto

    if config.model_type == "roberta":
        pad = graph.constant(np.int64(config.pad_token_id))
        token = graph.node("Not", graph.node("Equal", "input_ids", pad))
        token = graph.node("Cast", token, to=TensorProto.INT64)
        counted = graph.node("CumSum", token, graph.constant(np.int64(1)))
        return graph.node("Add", graph.node("Mul", counted, token), pad)
    one = graph.constant(np.int64(1))
    width = graph.node("Gather", graph.node("Shape", "input_ids"), one)
    return graph.node("Range", graph.constant(np.int64(0)), width, one)


def _rows(graph: Graph, embedding: Any, ids: str) -> str:
    from onnx import TensorProto

    from isobatch.models.encoder.quantization import QuantEmbedding, row_levels

    if not isinstance(embedding, QuantEmbedding):
        return graph.node("Gather", graph.constant(_array(embedding.weight)), ids)
    levels, scales = row_levels(embedding.weight.detach(), embedding.bits)
    table = _array(levels).astype(np.int8)
    kept = graph.int4(table) if embedding.bits == 4 else graph.constant(table)
    rows = graph.node("Cast", graph.node("Gather", kept, ids), to=TensorProto.FLOAT)
    return graph.node("Mul", rows, graph.node("Gather", graph.constant(_array(scales)), ids))


def _mask(graph: Graph) -> str:
    """(B, 1, 1, T), 0 for tokens and MASKED for padding."""
    from onnx import TensorProto

    wide = graph.node("Unsqueeze", "attention_mask", graph.constant(np.array([1, 2])))
    inside = graph.node("Cast", wide, to=TensorProto.FLOAT)
    outside = graph.node("Sub", graph.constant(np.float32(1)), inside)
    return graph.node("Mul", outside, graph.constant(np.float32(MASKED)))


def _layer(graph: Graph, model: Any, layer: encoders.Layer, x: str, mask: str) -> str:
    first, second = _norms(model, layer)
    attended = _attention(graph, model, layer, x, mask)
    x = _normed(graph, graph.node("Add", attended, x), first)
    up = graph.node(_activation(model.config), _linear(graph, x, layer.up))
    return _normed(graph, graph.node("Add", _linear(graph, up, layer.down), x), second)


def _activation(config: Any) -> str:
    values = config.to_dict()
    return ACTIVATIONS[values.get("hidden_act") or values["activation"]]


def _norms(model: Any, layer: encoders.Layer) -> tuple[Any, Any]:
    block = model.get_submodule(layer.prefix)
    if model.config.model_type == "distilbert":
        return block.sa_layer_norm, block.output_layer_norm
    return block.attention.output.LayerNorm, block.output.LayerNorm


def _attention(graph: Graph, model: Any, layer: encoders.Layer, x: str, mask: str) -> str:
    size = encoders.head_size(model.config)
    heads = layer.query.out_features // size
    if heads == 0:  # nothing is left of it but the bias
        return graph.constant(_array(layer.output.bias))
    qkv = _linear(graph, x, layer.query, layer.key, layer.value)
    query, key, value = graph.nodes_of("Split", 3, qkv, axis=-1, num_outputs=3)
    split = graph.constant(np.array([0, 0, heads, size]))

    def headed(y: str, order: list[int]) -> str:
        return graph.node("Transpose", graph.node("Reshape", y, split), perm=order)

    scores = graph.node("MatMul", headed(query, [0, 2, 1, 3]), headed(key, [0, 2, 3, 1]))
    scaled = graph.node("Mul", scores, graph.constant(np.float32(size**-0.5)))
    shares = graph.node("Softmax", graph.node("Add", scaled, mask), axis=-1)
    mixed = graph.node("MatMul", shares, headed(value, [0, 2, 1, 3]))
    joined = graph.node("Transpose", mixed, perm=[0, 2, 1, 3])
    flat = graph.node("Reshape", joined, graph.constant(np.array([0, 0, heads * size])))
    return _linear(graph, flat, layer.output)


def _linear(graph: Graph, x: str, *modules: Any, rank: int = 3) -> str:
    """Linear layers that read the same, side by side. `rank`: dimensions of x."""
    from isobatch.models.encoder.quantization import QuantLinear

    bias = graph.constant(np.concatenate([_array(m.bias) for m in modules]))
    if isinstance(modules[0], QuantLinear):
        product = _integer_product(graph, x, modules, rank)
    else:
        weight = np.concatenate([_array(m.weight) for m in modules]).T
        product = graph.node("MatMul", x, graph.constant(weight))
    return graph.node("Add", product, bias)


def _integer_product(graph: Graph, x: str, modules: tuple[Any, ...], rank: int) -> str:
    reads = modules[0].reads
    scale = graph.constant(np.float32(_array(reads.scale)[0]))
    zero = graph.constant(np.uint8(round(float(reads.zero_point[0]))))
    levels_of_x = graph.node("QuantizeLinear", x, scale, zero)
    graph.rounded.append((levels_of_x, rank))
    rounded = graph.node("DequantizeLinear", levels_of_x, scale, zero)
    levels = np.concatenate([_array(m.levels()) for m in modules]).T.astype(np.int8)
    scales = np.concatenate([_array(m.weight_scale) for m in modules])
    kept = graph.int4(levels) if modules[0].bits == 4 else graph.constant(levels)
    zeros = graph.constant(np.zeros(len(scales), np.int8))
    weight = graph.node("DequantizeLinear", kept, graph.constant(scales), zeros, axis=1)
    return graph.node("MatMul", rounded, weight)


def _head(graph: Graph, model: Any, x: str) -> str:
    """The first token's state through the inner layer, its activation, and the logits' layer."""
    kind = model.config.model_type
    first = graph.node("Gather", x, graph.constant(np.int64(0)), axis=1)
    inner = _linear(graph, first, model.get_submodule(encoders.inner_head(model)), rank=2)
    active = graph.node("Relu" if kind == "distilbert" else "Tanh", inner)
    return _linear(graph, active, model.get_submodule(encoders.OUTER_HEADS[kind]), rank=2)
