"""An ONNX classifier whose head reads the first token alone computes its last layer for that token.

Keys and values of the last layer are those of all tokens; queries, the attention's output and the
feed-forward part are of the first one alone. No answer changes, whatever the family: a slice behind an
operator that treats tokens alike equals a slice before it, and is moved up for as long as that holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ELEMENTWISE = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Neg", "Where", "IsNaN", "Cast", "Identity"),
    *("Gelu", "Erf", "Tanh", "Relu", "Sigmoid"),
)
ROW_BY_ROW = (
    *("MatMul", "LayerNormalization", "RMSNormalization", "Softmax", "QuantizeLinear", "DequantizeLinear"),
    "Split",
)
"""They keep the rows of their first input apart; their other inputs are no tokens."""
TOKENS = -2
"""The axis of the tokens in a layer's output (batch, tokens, width)."""
Use = tuple[Any, int, int]
"""A node, which of its inputs, and the axis of the tokens there, counted from the last."""


def keep_first_token(graph: Any) -> int:
    """Compute for the first token alone what is read of it alone, in place; the number of nodes it concerns.

    `graph`: an onnx_ir.Graph whose values have their shapes, as torch.onnx.export makes it. 0 where the head
    reads more than the first token.
    """
    wanted: dict[Any, list[Use]] = {}
    moved = []
    for node in reversed(list(graph)):
        asked = [use for value in node.outputs for use in wanted.get(value, [])]
        if not asked and _reads_first_token(node):
            wanted.setdefault(node.inputs[0], []).append((node, 0, TOKENS))
        elif asked and len(asked) == sum(len(v.uses()) + v.is_graph_output() for v in node.outputs):
            axes = {axis for *_, axis in asked}
            if len(axes) == 1 and (above := _above(node, *axes)):
                moved.append(node)
                wanted = {value: uses for value, uses in wanted.items() if value not in node.outputs}
                for place, axis in above:
                    wanted.setdefault(node.inputs[place], []).append((node, place, axis))
    for node in moved:
        if node.op_type == "Reshape":
            node.replace_input_with(1, _constant(graph, [0, 1, *node.outputs[0].shape[2:]]))
            node.attributes.clear()  # a 0 copies the batch
    for value, uses in wanted.items() if moved else ():
        for axis in {use[2] for use in uses}:
            _slice(graph, value, axis, [use for use in uses if use[2] == axis])
    for value in (value for node in moved for value in node.outputs):
        value.shape = None
    return len(moved)


def _reads_first_token(node: Any) -> bool:
    """Whether a node takes token 0 of (batch, tokens, width)."""
    if node.op_type not in ("Gather", "Slice") or len(node.inputs[0].shape or ()) != 3:
        return False
    constants = [value.const_value for value in node.inputs[1:]]
    if None in constants:
        return False
    values = [np.ravel(constant.numpy()).tolist() for constant in constants]
    if node.op_type == "Slice":  # starts, ends, axes, steps
        return values[:2] == [[0], [1]] and values[2:3] in ([[1]], [[TOKENS]])
    return values == [[0]] and node.attributes["axis"].value in (1, TOKENS)


def _above(node: Any, axis: int) -> list[tuple[int, int]]:
    """(which input, its axis of tokens) of what a node needs for the first token of its output.

    Empty where it needs more of an input than its first token, or is not known.
    """
    if any(value is None or value.shape is None for value in (*node.inputs, *node.outputs)):
        return []
    before, after = node.inputs[0].shape, node.outputs[0].shape
    if node.op_type in ELEMENTWISE:
        shapes = [value.shape for value in node.inputs]
        return [(n, axis) for n, shape in enumerate(shapes) if len(shape) >= -axis and shape[axis] != 1]
    if node.op_type in ROW_BY_ROW and axis == TOKENS and len(before) == len(after):
        return [(0, axis)]
    if node.op_type == "Transpose":
        return [(0, node.attributes["perm"].value[axis] - len(after))]
    keeps_tokens = node.op_type == "Reshape" and len(after) + axis == 1 and before[:2] == after[:2]
    return [(0, 1 - len(before))] if keeps_tokens and all(isinstance(n, int) for n in after[2:]) else []


def _constant(graph: Any, values: list[int]) -> Any:
    import onnx_ir as ir

    name = f"first_token_{len(graph.initializers)}"
    value = ir.Value(name=name, const_value=ir.tensor(values, dtype=ir.DataType.INT64, name=name))
    graph.register_initializer(value)
    return value


def _slice(graph: Any, value: Any, axis: int, uses: list[Use]) -> None:
    """Give these nodes the first token of a value in place of the whole."""
    import onnx_ir as ir

    first = ir.node("Slice", [value, *(_constant(graph, [n]) for n in (0, 1, axis))])
    for node, place, _ in uses:
        node.replace_input_with(place, first.outputs[0])
    nodes = list(graph)
    graph.insert_before(min((node for node, *_ in uses), key=nodes.index), first)
