"""What `seen` answers, as JSON: the steps of rows, the rows of a step, and the rows that hold a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.base import ArraySource
from isobatch.engine.forensics.find_rows import find_rows
from isobatch.engine.loading.inverse_order import is_used

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from isobatch.engine.forensics.run_order import Place, RunOrder, Sighting
    from isobatch.engine.optimization.schedule import PhaseSchedule

TRAIN = "train"
PREVIEW_CHARACTERS = 70
MOST_ROWS = 200
"""Most rows of a split whose steps are looked for: a word that is everywhere asks nothing."""
LEFT_OUT_WORDS = ("left out", "dropped", "cut", "loses", "validation split", "held")
"""Notes on the preparation that have one of these say what is not among the rows, or not whole."""


def row_answer(order: RunOrder, row: int) -> dict[str, Any]:
    """When a training row was seen, and when it comes after what the run has done. Raises UserError."""
    count = order.sampler.count
    if row >= count:
        raise UserError(f"--sample {row}: the training data has {count:,} rows, numbered 0 to {count - 1}")
    return _row_answers(order, [row])[0]


def _row_answers(order: RunOrder, rows: Sequence[int]) -> list[dict[str, Any]]:
    return [_row_answer(order, row, text) for row, text in zip(rows, previews(order, rows), strict=True)]


def _row_answer(order: RunOrder, row: int, text: str | None) -> dict[str, Any]:
    sightings = order.sightings(row)
    seen = [sighting for sighting in sightings if order.is_counted(sighting)]
    return {
        "split": TRAIN,
        "row": row,
        **_set_of(order, row),
        "used": is_used(order.sampler, row),
        "seen": _located(order, row, seen),
        "later": [_where(sighting) for sighting in sightings if not order.is_counted(sighting)],
        "text": text,
    }


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
        held_out = {"split": split, "seen": [], "later": []}
        found["rows"] += (
            _row_answers(order, rows) if split == TRAIN else [{**held_out, "row": row} for row in rows]
        )
    return found


def step_answer(order: RunOrder, step: int, phase: str | None) -> dict[str, Any]:
    """The rows of a step, in the recipe's order. Raises UserError."""
    schedule = _phase(order, step, phase)
    samples, places = order.places(step)
    rows = samples.tolist()
    texts = previews(order, rows)
    left_out = step in order.left_out.get(schedule.name, ())
    return {
        "phase": schedule.name,
        "step": step,
        "epoch": order.epoch_of(step),
        "steps": schedule.steps,
        "counted": step <= order.counted[schedule.name] and not left_out,
        **({"left_out": True} if left_out else {}),
        "rows": [
            {"row": row, **_place_fields(places[at] if places else None), "text": texts[at]}
            for at, row in enumerate(rows)
        ],
    }


def previews(order: RunOrder, rows: Sequence[int]) -> list[str | None]:
    """The beginning of each training row as text; None where the prepared data is not at hand."""
    if order.source is None or not rows:
        return [None] * len(rows)
    described = order.data.describe_rows(order.facts, order.source.fetch(np.array(rows, np.int64)))
    return [shortened(text) for text in described]


def preparation_notes(order: RunOrder) -> list[str]:
    """What the preparation of the data left out, cut or held out, as far as it was noted."""
    notes = map(str, order.facts.extra.get("notes", ()))
    return [note for note in notes if any(word in note for word in LEFT_OUT_WORDS)]


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


def _located(order: RunOrder, row: int, sightings: Iterable[Sighting]) -> list[dict[str, Any]]:
    """The sightings with their places; of a row that a step holds twice, each time its own."""
    found: list[dict[str, Any]] = []
    for sighting in dict.fromkeys(sightings):
        samples, places = order.places(sighting.step)
        for position in np.flatnonzero(samples == row).tolist():
            place = places[position] if places else None
            found.append({**_where(sighting), **_place_fields(place)})
    return found


def _where(sighting: Sighting) -> dict[str, Any]:
    return {"phase": sighting.phase, "step": sighting.step, "epoch": sighting.epoch}


def _place_fields(place: Place | None) -> dict[str, Any]:
    return {} if place is None else {"rank": place.rank, "micro_batch": place.micro_batch}


def _set_of(order: RunOrder, row: int) -> dict[str, Any]:
    """The set of a mixture that a row belongs to, and its number in it."""
    sets, offset = order.facts.extra.get("sets", ()), 0
    for one, (size, _) in zip(sets, order.sampler.parts, strict=False):
        if row < offset + size:
            return {"set": one["name"], "row_of_set": row - offset}
        offset += size
    return {}
