"""What `seen` answers, as JSON: the steps of rows, the rows of a step, and the rows that hold a text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.base import ArraySource, Ragged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isobatch.data.base import Column, TextQuery
    from isobatch.engine.forensics.run_order import RunOrder
    from isobatch.engine.optimization.schedule import PhaseSchedule

TRAIN = "train"
PREVIEW_CHARACTERS = 70
MOST_ROWS = 200
"""Most rows of a split whose steps are looked for: a word that is everywhere asks nothing."""
CHUNK = 1 << 22
"""Tokens that are compared at a time."""


def row_answers(order: RunOrder, rows: Sequence[int]) -> list[dict[str, Any]]:
    """When training rows were seen. Raises UserError."""
    count = order.sampler.count
    if unknown := [row for row in rows if row >= count]:
        raise UserError(
            f"--sample {unknown[0]}: the training data has {count:,} rows, numbered 0 to {count - 1}"
        )
    found = order.sightings(rows)
    return [
        {
            "split": TRAIN,
            "row": row,
            **_set_of(order, row),
            "seen": list(map(dataclasses.asdict, found[row])),
            "text": text,
        }
        for row, text in zip(rows, previews(order, rows), strict=True)
    ]


def text_answer(order: RunOrder, text: str) -> dict[str, Any]:
    """The places of a text in every split, and when the first MOST_ROWS of training were seen.

    Raises UserError.
    """
    found: dict[str, Any] = {"places": [], "rows": [], "whole": True, "note": ""}
    for split in sorted(order.facts.samples, key=lambda name: name != TRAIN):
        query = order.data.text_query(order.facts, split, text)
        found |= {"whole": query.whole, "note": query.note}
        source = order.data.open(Path(order.facts.folder), split)
        if not isinstance(source, ArraySource):
            raise UserError("--text: the samples of this task are no columns to look through: give --sample")
        places = find_rows(query, source.columns)
        found["places"] += [{"split": split, "rows": list(place)} for place in places]
        rows = sorted({row for place in places for row in place})[:MOST_ROWS]
        held_out = [{"split": split, "row": row, "seen": []} for row in rows]
        found["rows"] += row_answers(order, rows) if split == TRAIN else held_out
    return found


def step_answer(order: RunOrder, step: int, phase: str | None) -> dict[str, Any]:
    """The rows of a step, in the recipe's order. Raises UserError."""
    schedule = _phase(order, step, phase)
    rows = order.sampler.batch(step - 1).tolist()
    return {
        "phase": schedule.name,
        "step": step,
        "epoch": order.epoch_of(step),
        "steps": schedule.steps,
        "counted": step <= order.counted[schedule.name],
        "rows": [{"row": row, "text": text} for row, text in zip(rows, previews(order, rows), strict=True)],
    }


def previews(order: RunOrder, rows: Sequence[int]) -> list[str | None]:
    """The beginning of each training row as text; None where the prepared data is not at hand."""
    if order.source is None or not rows:
        return [None] * len(rows)
    described = order.data.describe_rows(order.facts, order.source.fetch(np.array(rows, np.int64)))
    return [shortened(text) for text in described]


def shortened(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= PREVIEW_CHARACTERS else f"{line[:PREVIEW_CHARACTERS]}…"


def _phase(order: RunOrder, step: int, phase: str | None) -> PhaseSchedule:
    names = [schedule.name for schedule in order.schedules]
    if phase is None and len(names) > 1:
        raise UserError(f"--step {step}: of which phase? --phase names one of {', '.join(names)}")
    if phase is not None and phase not in names:
        raise UserError(f"--phase {phase}: this run's phases are {', '.join(names)}")
    schedule = order.schedules[names.index(phase) if phase else 0]
    if step > schedule.steps:
        raise UserError(f"--step {step}: phase {schedule.name} has the steps 1 to {schedule.steps}")
    return schedule


def _set_of(order: RunOrder, row: int) -> dict[str, Any]:
    """The set of a mixture that a row belongs to, and its number in it."""
    sets, offset = order.facts.extra.get("sets", ()), 0
    for one, (size, _) in zip(sets, order.sampler.parts, strict=False):
        if row < offset + size:
            return {"set": one["name"], "row_of_set": row - offset}
        offset += size
    return {}


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
