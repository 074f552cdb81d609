"""FLOPs of a token of training, counted from a model's size; with tokens/s they give the utilisation (MFU).

6 N + 12 L T d (Chowdhery et al. 2022, "PaLM", appendix B), where N are the parameters that multiply every
token: attention, MLP and head. Embedding tables are looked up. Scores count as if attention were not causal.
"""

from __future__ import annotations

import math

from isobatch.models.base import ModelSize

ASSUMED_LAYERS = 12


def flops_per_token(size: ModelSize, length: float, activation_checkpointing: bool = False) -> float:
    """FLOPs per token in samples of `length` tokens, forward and backward pass.

    A weight costs 6: 2 in the forward pass, 2 for the gradient of its input and 2 for its own, which frozen
    weights (LoRA) do not need. Activation checkpointing that keeps nothing runs the forward pass twice; model
    FLOPs utilisation leaves that out.
    """
    layers, _ = layers_and_width(size)
    trained = size.trainable / max(size.parameters, 1)
    again = 1 if activation_checkpointing else 0
    scores = 4.0 * layers * query_width(size) * length if size.layers else 0.0
    return (4 + 2 * trained + 2 * again) * matmul_parameters(size) + (3 + again) * scores


def matmul_parameters(size: ModelSize) -> float:
    """Parameters that multiply every token: those of the layers, and the output projection, tied or not.

    Where the number of layers is unknown: all parameters, at most those of a 12-layer stack.
    """
    if size.layers:
        return size.layers * layer_parameters(size) + size.vocabulary * size.hidden
    return min(float(size.parameters), 12.0 * ASSUMED_LAYERS * size.hidden**2 or math.inf)


def layer_parameters(size: ModelSize) -> float:
    """Weights of a layer's matrices: queries and output, keys and values, two or three of the MLP."""
    attention = 2.0 * size.hidden * (query_width(size) + key_width(size))
    return attention + (3.0 if size.gated else 2.0) * size.hidden * intermediate_width(size)


def query_width(size: ModelSize) -> float:
    """Width of all attention heads together."""
    return size.query_width or layers_and_width(size)[1]


def key_width(size: ModelSize) -> float:
    """Width of the keys, and of the values."""
    return size.key_width or query_width(size)


def intermediate_width(size: ModelSize) -> float:
    """Width of the MLP; four times the hidden width where it is not known."""
    return size.intermediate or 4 * layers_and_width(size)[1]


def layers_and_width(size: ModelSize) -> tuple[float, float]:
    """(layers, hidden width); where the size has none, those of a 12-layer transformer of as many parameters.

    A crude estimate: parameters = 12 * layers * hidden^2 gives hidden = sqrt(parameters / 144). Embedding
    tables make it too large, which is safe for memory.
    """
    if size.layers:
        return size.layers, size.hidden
    return ASSUMED_LAYERS, size.hidden or math.sqrt(size.parameters / (12 * ASSUMED_LAYERS))
