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
FIRST, TOKENS = "first_token", -2
"""Beginning of the names of what is added; the axis of the tokens in a layer's output."""
Use = tuple[Any, int, int]
"""A node, which of its inputs, and the axis of the tokens there, counted from the last."""
Shapes = dict[str, list[int | str]]


def keep_first_token(model: Any) -> int:
    """Compute for the first token alone what is read of it alone, in place; the number of nodes it concerns.

    `model`: an onnx.ModelProto with its values' shapes, as torch.onnx.export writes it; they are taken out,
    as some are others then. 0 where the head reads more than the first token.
    """
    graph = model.graph
    shapes: Shapes = {
        v.name: [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim]
        for v in (*graph.input, *graph.value_info)
    }
    shapes |= {v.name: list(v.dims) for v in graph.initializer}
    uses = [name for node in graph.node for name in node.input] + [v.name for v in graph.output]
    wanted: dict[str, list[Use]] = {}
    moved = []
    for node in reversed(graph.node):
        asked = [use for name in node.output for use in wanted.get(name, [])]
        if not asked and _reads_first_token(graph, node, shapes):
            wanted.setdefault(node.input[0], []).append((node, 0, TOKENS))
        elif (
            asked
            and len(asked) == sum(map(uses.count, node.output))
            and len({axis for *_, axis in asked}) == 1
        ):
            above = _above(node, asked[0][2], shapes)
            for place, axis in above:
                wanted.setdefault(node.input[place], []).append((node, place, axis))
            if above:
                moved.append(node)
                wanted = {name: those for name, those in wanted.items() if name not in node.output}
    del graph.value_info[:]
    for node in moved:
        if node.op_type == "Reshape":
            _reshape_to(graph, node, [0, 1, *shapes[node.output[0]][2:]])
    for name in wanted if moved else ():
        for axis in {use[2] for use in wanted[name]}:
            _slice(graph, name, axis, [use for use in wanted[name] if use[2] == axis])
    return len(moved)


def _reads_first_token(graph: Any, node: Any, shapes: Shapes) -> bool:
    """Whether a node takes token 0 of (batch, tokens, width)."""
    if node.op_type not in ("Gather", "Slice") or len(shapes.get(node.input[0], ())) != 3:
        return False
    from onnx import numpy_helper

    constants = {v.name: v for v in graph.initializer if v.name in node.input[1:]}
    if len(constants) < len(node.input) - 1:
        return False
    values = [np.ravel(numpy_helper.to_array(constants[name])).tolist() for name in node.input[1:]]
    if node.op_type == "Slice":  # starts, ends, axes, steps
        return values[:2] == [[0], [1]] and values[2:3] in ([[1]], [[TOKENS]])
    return values == [[0]] and [a.i for a in node.attribute if a.name == "axis"] in ([1], [TOKENS])


def _above(node: Any, axis: int, shapes: Shapes) -> list[tuple[int, int]]:
    """(which input, its axis of tokens) of what a node needs for the first token of its output.

    Empty where it needs more of an input than its first token, or is not known.
    """
    if any(name not in shapes for name in (*node.input, node.output[0])):
        return []
    ranks = [len(shapes[name]) for name in node.input]
    kind, rank = node.op_type, len(shapes[node.output[0]])
    if kind in ELEMENTWISE:
        by_token = [n for n, name in enumerate(node.input) if ranks[n] >= -axis and shapes[name][axis] != 1]
        return [(n, axis) for n in by_token]
    if kind in ROW_BY_ROW and axis == TOKENS and ranks[0] == rank:
        return [(0, axis)]
    if kind == "Transpose":
        permutation = next(a.ints for a in node.attribute if a.name == "perm")
        return [(0, permutation[rank + axis] - rank)]
    if kind == "Reshape" and rank + axis == 1:
        before, after = shapes[node.input[0]], shapes[node.output[0]]
        if before[:2] == after[:2] and all(isinstance(n, int) and n for n in after[2:]):
            return [(0, 1 - ranks[0])]
    return []


def _constant(graph: Any, values: list[Any]) -> str:
    from onnx import numpy_helper

    name = f"{FIRST}_{len(graph.initializer)}"
    graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
    return name


def _reshape_to(graph: Any, node: Any, shape: list[Any]) -> None:
    node.input[1] = _constant(graph, shape)
    del node.attribute[:]  # a 0 copies the batch


def _slice(graph: Any, name: str, axis: int, uses: list[Use]) -> None:
    """Give these nodes the first token of a value in place of the whole."""
    from onnx import helper

    inputs = [name, *(_constant(graph, [n]) for n in (0, 1, axis))]
    first = helper.make_node("Slice", inputs, [f"{FIRST}_of_{name}_{-axis}"])
    for node, place, _ in uses:
        node.input[place] = first.output[0]
    graph.node.insert(min(list(graph.node).index(node) for node, *_ in uses), first)
