"""Finds the rows of a prepared split that hold given tokens, by comparing them; near matches are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from isobatch.data.base import Ragged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isobatch.data.base import Column, TextQuery

CHUNK = 1 << 22
"""Tokens that are compared at a time."""


def find_rows(query: TextQuery, columns: Mapping[str, Column]) -> list[tuple[int, ...]]:
    """The places of a text in a split, each the rows that it lies in: several where it runs over borders."""
    found: set[tuple[int, ...]] = set()
    for name, variants in query.tokens.items():
        rows = columns[name]
        assert isinstance(rows, Ragged)
        for tokens in variants:
            if query.whole:
                found.update((row,) for row in _equal_rows(rows, tokens))
            else:
                found.update(_places_within(rows, tokens, query.spans_rows))
    if query.equal:
        equal = [np.asarray(columns[name]) == number for name, number in query.equal.items()]
        found.update((row,) for row in np.flatnonzero(np.logical_and.reduce(equal)).tolist())
    return sorted(found)


def _equal_rows(rows: Ragged, tokens: np.ndarray) -> list[int]:
    """Rows that are these tokens."""
    candidates = np.flatnonzero(rows.lengths == len(tokens))
    starts = rows.offsets[candidates]
    same = _starting_at(rows.values, starts, tokens)
    return candidates[same].tolist()


def _places_within(rows: Ragged, tokens: np.ndarray, spans_rows: bool) -> list[tuple[int, ...]]:
    """Rows that contain these tokens, or hold them together."""
    starts = _positions(np.asarray(rows.values), tokens)
    first = np.searchsorted(rows.offsets, starts, "right") - 1
    last = np.searchsorted(rows.offsets, starts + len(tokens) - 1, "right") - 1
    pairs = zip(first.tolist(), last.tolist(), strict=True)
    return [tuple(range(a, b + 1)) for a, b in pairs if a == b or spans_rows]


def _positions(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Where these tokens begin in `values`, int64."""
    last = len(values) - len(tokens)
    found = [np.empty(0, np.int64)]
    for start in range(0, last + 1, CHUNK):
        chunk = values[start : min(start + CHUNK, last + 1)]
        begins = np.flatnonzero(chunk == tokens[0]) + start
        found.append(begins[_starting_at(values, begins, tokens)])
    return np.concatenate(found)


def _starting_at(values: np.ndarray, starts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """(n,) which of these starts the tokens follow; int64 numbers."""
    left = np.arange(len(starts))
    for offset, token in enumerate(tokens.tolist()):
        if not len(left):
            break
        left = left[values[starts[left] + offset] == token]
    return left
