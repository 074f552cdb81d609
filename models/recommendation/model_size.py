"""The size of a recommender, computed from its recipe and the catalogue's counts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.recipe import Recipe
from isobatch.models.base import ModelSize
from isobatch.models.causal_lm import model_sizes

DOT_HIDDEN = 8
"""Hidden width that the planner gets for the dot head, which has hardly any multiplications."""
KEPT_BY_A_TRANSFORMER = 5.5
"""Tensors that a transformer's MLP keeps for the backward pass, where this head's keeps one."""
CHUNK_TOKENS = 4096
"""Padded tokens that the text encoder computes at a time."""
ASSUMED_COUNT = 10_000
"""Users and items if the data is not at hand."""


def parse_layer_widths(layers: str) -> tuple[int, ...]:
    """--layers as numbers. Raises UserError."""
    parts = layers.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--layers {layers}: give widths such as 128,64")
    return tuple(int(part) for part in parts)


def num_negatives(options: Any) -> int:
    """Negative items per pair (shared ones for sampled-softmax)."""
    return int(options.negatives or (4 if options.loss == "bce" else 1024))


def recommender_size(
    recipe: Recipe, options: Any, facts: Facts, config: Mapping[str, Any] | None
) -> ModelSize:
    """The size of id tables, the head or the transformer of sequences, and with `config` the text encoder."""
    users, items = (facts.extra.get(name, ASSUMED_COUNT) for name in ("users", "items"))
    dim = options.dim
    in_sequences = recipe.options.get("samples") == "sequences"
    shared = in_sequences or options.loss != "bce"
    of_user = 0 if in_sequences else dim + (options.loss != "sampled-softmax")
    count, mlp_width, encoder, cached, flops = items * (dim + 1) + users * of_user, 0, 0, 0.0, 0.0
    if options.head in ("mlp", "neumf"):
        layers = parse_layer_widths(options.layers)
        all_widths = [2 * dim if options.head == "mlp" else dim, *layers, 1]
        count += sum(a * b + b for a, b in itertools.pairwise(all_widths))
        mlp_width = sum(layers)
    why = "its tables are updated by rows" if options.sparse_tables else ""
    if config is not None:
        why = "it computes parts of its encoder by themselves"
        encoder, layers_of_encoder, hidden = _encoder_size(config)
        cached, flops = _text_costs(recipe, options, facts, layers_of_encoder, hidden)
        count += (1 if in_sequences else 2) * (hidden * dim + dim + 2 * dim * dim + dim)
    negatives = options.cohort or num_negatives(options)
    scored = 1 + (min(negatives, items) if shared else negatives)
    pairs = 1 if shared and options.head == "dot" else scored
    blocks, heads, wide = 1, 1, round(max(mlp_width, dim) * pairs / KEPT_BY_A_TRANSFORMER) or 1
    if in_sequences:
        blocks, heads, wide = options.blocks, options.heads, 4 * dim
        count += recipe.max_length * dim + blocks * (12 * dim**2 + 13 * dim) + 2 * dim
    tuned = {"valid", "test"} <= facts.samples.keys()
    fit_bytes, fit_seconds = fit_costs(users, items, facts.samples["train"] * facts.mean_length, tuned)
    return ModelSize(
        parameters=count + encoder,
        trainable=count + (encoder if options.text == "full" else 0),
        layers=blocks,
        hidden=DOT_HIDDEN if options.head == "dot" and not in_sequences else dim,
        heads=heads,
        intermediate=wide,
        keyed_dropout=in_sequences and bool(recipe.dropout) and recipe.noise == "keyed",
        keyed_scores=False,
        ranked=items,
        fit_bytes=fit_bytes,
        fit_seconds=fit_seconds,
        distinct=users,
        cached_bytes=cached,
        step_flops=flops,
        vocabulary=min(negatives, items) if shared else 0,
        why_unshardable=why,
        remark="" if recipe.preset or recipe.starts_from else "--preset classics takes seconds: try it first",
    )


def fit_costs(users: int, items: int, taken: float, tuned: bool) -> tuple[float, float]:
    """(peak bytes, seconds of a core) of fitting the classics to `taken` interactions, with all settings or
    the first of each.

    The factors are fitted to MovieLens 100K and Amazon Beauty on a core of an AMD EPYC.
    """
    from isobatch.models.recommendation import classics as c

    lambdas, shrinkages = (len(some) if tuned else 1 for some in (c.EASE_LAMBDAS, c.KNN_SHRINKAGES))
    dims, block, k = [dim for dim, *_ in c.ALS_SETTINGS], 4.0 * c.FLOATS_AT_ONCE, c.EASE_NEIGHBOURS
    together = 2 * taken**2 / max(users, 1)  # two items of a user: those who took many weigh more
    near = items * min(k, taken**2 / max(users * items, 1))  # kept weights of item-kNN, too
    pairs = min(items**2, together) * 2 / 3
    knn = 20.0 * shrinkages * near + max(4.4 * block, 82.0 * near)
    als = 12 * block + 8.0 * max(dims) * (users + items)
    if items <= c.EXACT_ITEMS:
        weights = items * min(c.EASE_WEIGHTS, items)
        ease = 16.0 * items**2 + 82.0 * weights + 4.4 * block
        seconds = lambdas * (6.4e-11 * items**3 + 190e-9 * weights)
    else:
        ease = 4.0 * items * k * (1 + lambdas) + max(4.0 * c.GRAMS_AT_ONCE + 8 * block, 82.0 * near)
        seconds = (
            -(-items * k**2 // c.GRAMS_AT_ONCE) * (30e-9 * together + 2e-9 * items**2)
            + 17e-9 * items * k**2
            + 210e-9 * pairs
        )
        seconds += lambdas * (1.15e-10 * items * k**3 + 150e-9 * near)
    seconds += 60e-9 * together + 16e-9 * items**2 + shrinkages * (240e-9 * pairs + 150e-9 * near)
    seconds += 1.57e-8 * taken * 2 * c.ALS_ROUNDS * sum(dims if tuned else dims[:1])
    return 24.0 * taken + max(knn, als, ease), seconds


def _text_costs(recipe: Recipe, options: Any, facts: Facts, layers: int, hidden: int) -> tuple[float, float]:
    """(bytes, FLOPs of a step) of the texts.

    Bytes of their vectors, or of the states that enter the lowest trained block, and of a chunk of texts in
    the blocks that train: 120 bytes a token and unit of width (8 h-wide and 5.5 4h-wide tensors), padding
    included. FLOPs of the texts of a batch in the blocks that train: each once, forward and backward.
    """
    blocks = min(layers, options.lora_blocks or layers)
    trained = {"full": layers, "frozen": 0}.get(options.text, blocks)
    counted = facts.extra.get("texts")
    texts = counted or facts.extra.get("items", ASSUMED_COUNT)
    tokens = facts.extra.get("text_tokens") or texts * recipe.max_length / 2
    longest = min(facts.extra.get("longest_text") or recipe.max_length, recipe.max_length)
    kept = 4.0 * hidden * (texts if trained == 0 else tokens if trained < layers else 0)
    chunk = min(CHUNK_TOKENS / max(tokens, 1), 1.0) * texts * longest
    of_batch = min(counted or ASSUMED_COUNT, 2 * recipe.batch_size)
    flops = 6 * 12.0 * hidden**2 * trained * of_batch * recipe.max_length / 2
    return kept + chunk * 120.0 * hidden * max(trained, 1), flops


def _encoder_size(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(parameters, layers, hidden width) of a text encoder, estimated if its type has no exact formula."""
    if (size := model_sizes.size_from_config(config)) is not None:
        return size.parameters, size.layers, size.hidden
    hidden = int(config.get("hidden_size") or config.get("dim") or config["d_model"])
    layers = int(config.get("num_hidden_layers") or config.get("n_layers") or 12)
    intermediate = int(config.get("intermediate_size") or config.get("hidden_dim") or 4 * hidden)
    blocks = layers * (4 * hidden**2 + 2 * hidden * intermediate)
    return int(config["vocab_size"]) * hidden + blocks, layers, hidden
