"""The answers of `seen` as lines of text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SHOWN = 20
"""Most rows, and most steps of a row, that are written out; --json has all."""
SHOWN_LATER = 3
"""The same for steps that the run has not made."""


def lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """What a user reads."""
    if "rows_of_step" in answer:
        yield from _step_lines(answer["rows_of_step"], answer)
    elif "places" in answer:
        yield from _text_lines(answer)
    else:
        yield from _row_lines(answer["rows"][0], answer)
    if not answer["data_at_hand"]:
        yield "the prepared data is not on this machine, which says texts and micro-batches (--data PATH)"
    phase, last = list(answer["steps_done"].items())[-1]
    if answer["exported"] not in (None, f"{phase}-{last}"):
        step = answer["exported"].rpartition("-")[2]
        yield f"final/ holds the weights after step {step} of {phase}, the best: later steps are not in it"
    if "starts_from" in answer:
        before = answer["starts_from"]
        yield f"the run began with the weights of {before}: ask `isobatch seen {before}` of those as well"


def _text_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    if answer["note"]:
        yield answer["note"]
    places = answer["places"]
    if not places:
        holds = "is exactly this text" if answer["whole"] else "contains this text"
        yield f"no row of the prepared data {holds}, token by token; a near match is not looked for"
        yield from (f"  when the data was prepared: {note}" for note in answer["notes"])
        return
    crossing = [place for place in places if len(place["rows"]) > 1]
    if crossing:
        yield (
            f"{_count(len(crossing), 'time')} the text runs over a border of rows, which are windows of one"
            " stream: each row holds a part"
        )
    everywhere = dict.fromkeys((place["split"], row) for place in places for row in place["rows"])
    of_split = Counter(split for split, _ in everywhere)
    if len(everywhere) > 1:
        yield "the text is in " + ", ".join(f"{_count(n, 'row')} of {split}" for split, n in of_split.items())
    rows = sorted(answer["rows"], key=lambda row: not row["seen"])
    for row in rows[:SHOWN]:
        yield from _row_lines(row, answer)
    if len(everywhere) > SHOWN:
        yield f"and {len(everywhere) - SHOWN:,} more rows, which --json names"


def _row_lines(row: Mapping[str, Any], answer: Mapping[str, Any]) -> Iterator[str]:
    name = f"row {row['row']:,}"
    if row["split"] != "train":
        yield f"{name} of the {row['split']} data is held out: training never saw it"
        return
    seen, later = row["seen"], row["later"]
    several = len(answer["steps"]) > 1
    if seen:
        yield f"{name} was seen {_count(len(seen), 'time')}: {_steps(seen, several)}"
    else:
        yield f"{name} was {'not seen so far' if later else 'never seen: no step of this run holds it'}"
    if later:
        when = "not reached" if answer["status"] == "done" else "still to come"
        yield f"  {when} ({_progress(answer)}): {_steps(later, several, SHOWN_LATER)}"
    yield f"  {_what(row, answer)}"


def _what(row: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """Which row a number names, and what it holds."""
    of_set = f"row {row['row_of_set']:,} of the set {row['set']}, " if "set" in row else ""
    rows = f"{answer['training_rows']:,} rows, the first is 0"
    named = f"{of_set}row {row['row']:,} of the training data as prepared ({rows})"
    return named + (f": {row['text']}" if row["text"] is not None else "")


def _step_lines(step: Mapping[str, Any], answer: Mapping[str, Any]) -> Iterator[str]:
    rows = step["rows"]
    phase = f" of phase {step['phase']}" if len(answer["steps"]) > 1 else ""
    when = "was not reached" if answer["status"] == "done" else "is still to come"
    held = "saw" if step["counted"] else f"{when} ({_progress(answer)}) and holds"
    if step.get("left_out"):
        held = "is left out: training does not see its"
    yield f"step {step['step']:,}{phase} (epoch {step['epoch']}) {held} {_count(len(rows), 'row')}:"
    for row in rows:
        text = "" if row["text"] is None else f"  {row['text']}"
        yield f"  {row['row']:,}{_place(row, '  ')}{text}"


def _steps(sightings: Sequence[Mapping[str, Any]], several_phases: bool, most: int = SHOWN) -> str:
    shown = [
        f"{one['phase'] + ' ' if several_phases else ''}step {one['step']:,}"
        f" (epoch {one['epoch']}{_place(one, ', ')})"
        for one in sightings[:most]
    ]
    more = len(sightings) - most
    return ", ".join(shown) + (f" and {more:,} more (--json has all)" if more > 0 else "")


def _place(one: Mapping[str, Any], before: str) -> str:
    return f"{before}micro-batch {one['micro_batch']} of rank {one['rank']}" if "rank" in one else ""


def _progress(answer: Mapping[str, Any]) -> str:
    """How far the run is, in the phases that are not complete."""
    done, steps = answer["steps_done"], answer["steps"]
    open_phases = [name for name in steps if done[name] < steps[name]]
    return f"{answer['status']} after " + ", ".join(
        f"step {done[name]:,} of {steps[name]:,}{f' of {name}' if len(steps) > 1 else ''}"
        for name in open_phases
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
