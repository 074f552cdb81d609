"""How large a recommender is, by its recipe's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isobatch.core.errors import UserError
from isobatch.models.base import ModelSize
from isobatch.models.causal_lm import model_sizes

LEAST_HIDDEN = 8
"""A product of vectors multiplies its numbers once: the planner counts a layer's as hidden x intermediate."""
ASSUMED = 10_000
"""Users and items where the data is not at hand."""


def widths(layers: str) -> tuple[int, ...]:
    """--layers as numbers."""
    parts = layers.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--layers {layers}: give widths such as 128,64")
    return tuple(int(part) for part in parts)


def negatives(options: Any) -> int:
    """Items that a pair is trained against."""
    return int(options.negatives or (1024 if options.loss == "sampled-softmax" else 4))


def shape(recipe: Any, options: Any, facts: Any, config: Mapping[str, Any] | None) -> ModelSize:
    """Tables of ids, and an encoder whose rows are texts, not samples."""
    users, items, dim = facts.extra.get("users", ASSUMED), facts.extra.get("items", ASSUMED), options.dim
    shared = options.loss == "sampled-softmax"
    tables = (users + items) * dim + items + (0 if shared else users)
    count, inner, encoder = tables, 0, 0
    if options.head != "dot":
        layers = widths(options.layers)
        every = [2 * dim if options.head == "mlp" else dim, *layers, 1]
        count += sum(a * b + b for a, b in zip(every, every[1:], strict=False))
        inner = sum(layers)
    if config is not None:
        encoder, hidden = _encoder(config)
        count += 2 * (hidden * dim + dim) + 2 * (2 * dim * dim + dim)
    scored = (options.cohort or negatives(options)) + 1
    pairs = 1 if shared and options.head == "dot" else scored
    return ModelSize(
        parameters=count + encoder,
        trainable=count + (encoder if options.text == "full" else 0),
        layers=1,
        hidden=LEAST_HIDDEN if options.head == "dot" else dim,
        heads=1,
        intermediate=max(inner, dim) * pairs,
        vocabulary=(options.cohort or negatives(options)) if shared else 0,
        remark="; ".join(
            filter(None, [_cost_of_tables(recipe, options, tables), _few_items(options, items)])
        ),
        why_unshardable=_whole(options, config is not None),
    )


def _few_items(options: Any, items: int) -> str:
    asked = options.negatives
    if options.cohort or asked <= items:
        return ""
    if options.loss == "sampled-softmax":
        return f"--negatives {asked}: all {items:,} items are taken, for there are no more"
    return f"--negatives {asked}: there are {items:,} items, so that some come several times for a pair"


def _encoder(config: Mapping[str, Any]) -> tuple[int, int]:
    """(parameters, hidden width) of a text model."""
    if (known := model_sizes.size_from_config(config)) is not None:
        return known.parameters, known.hidden
    hidden = int(config.get("hidden_size") or config.get("dim") or config["d_model"])
    layers = int(config.get("num_hidden_layers") or config.get("n_layers") or 12)
    inner = int(config.get("intermediate_size") or config.get("hidden_dim") or 4 * hidden)
    return int(config["vocab_size"]) * hidden + layers * (4 * hidden**2 + 2 * hidden * inner), hidden


def _cost_of_tables(recipe: Any, options: Any, numbers: int) -> str:
    """Adam keeps four floats a number and moves seven: all of the table, or the rows of a batch."""
    own, shared = negatives(options), options.loss == "sampled-softmax"
    rows = recipe.batch_size * (2 if shared else 2 + own) + (own if shared else 0)
    every, some = 28 * numbers / 1e6, 28 * min(numbers, rows * options.dim) / 1e6
    now, other = (some, every) if options.sparse_tables else (every, some)
    without = "without" if options.sparse_tables else "with"
    return (
        f"tables of ids take {16 * numbers / 1e6:.1f} MB of each process, and a step moves {now:.1f} MB"
        f" of them ({without} --sparse-tables at most {other:.1f})"
    )


def _whole(options: Any, reads: bool) -> str:
    if reads:
        return "it computes parts of its encoder by themselves"
    return "its tables are updated by rows" if options.sparse_tables else ""
