"""`seen`: which steps of a run saw a row of its data, or which rows a step saw; nothing is logged for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import check_fields
from isobatch.core.measures import printable
from isobatch.core.number_ranges import Count, Positive
from isobatch.core.terminal.status import doing
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import TrustOptions, is_prepared, locate_data, open_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from isobatch.engine.runs.run_folder import RunFolder

SHOWN = 20
"""Most rows, and most steps of a row, that are written out; --json has all."""
QUESTIONS = ("sample", "text", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenOptions(TrustOptions):
    """Flags of `seen`."""

    sample: Count | None = None
    """A row of the training data as it was prepared; the first is 0."""
    text: str | None = None
    """A text: the rows that hold it, token by token. Of a recommender USER or USER,ITEM."""
    step: Positive | None = None
    """A step, of which the rows are listed; the first is 1."""
    phase: str | None = None
    """The phase of --step, where there are several."""
    data: str | None = None
    """Where the data lies now, if it has moved."""
    json: bool = False
    """One JSON object on standard output."""

    def __post_init__(self) -> None:
        check_fields(self)
        asked = [f"--{name}" for name in QUESTIONS if getattr(self, name) is not None]
        if not asked:
            raise UserError("seen: what shall be looked for? Give one of --sample, --text or --step")
        if len(asked) > 1:
            raise UserError(f"{' and '.join(asked)} are {len(asked)} questions: give one of them")
        if self.phase is not None and self.step is None:
            raise UserError(f"--phase {self.phase}: belongs to --step; other answers say every phase")


def seen(words: Sequence[str]) -> int:
    """Usage: seen RUN --sample 1204 | --text "..." | --step 120 [--phase NAME]
    [--data PATH] [--json]

    Rows are numbered as they were prepared, from 0; steps from 1.
    """
    positional, flags = split_words(words)
    if len(positional) != 1:
        raise UserError("seen: give the folder of one run (`runs` lists them)")
    options = command_options(flags, SeenOptions, "seen")
    run = open_run(positional[0], options.trust)
    answer = answer_question(run, options)
    if options.json:
        print(atomic_files.json_text(answer, ensure_ascii=False))
        return DONE
    for line in lines(answer):
        print(printable(line))
    return DONE


def answer_question(run: RunFolder, options: SeenOptions) -> dict[str, Any]:
    """The answer as JSON. Raises UserError."""
    from isobatch.engine.forensics import seen_rows
    from isobatch.engine.forensics.run_order import needs_data, open_order

    if options.data is not None or options.text is not None or needs_data(run.recipe):
        doing("looking for the data")
        locate_data(run, run.recipe, options.data)
    order = open_order(run, is_prepared(run))
    found: dict[str, Any]
    if options.step is not None:
        found = {"rows_of_step": seen_rows.step_answer(order, options.step, options.phase)}
    elif options.sample is not None:
        found = {"rows": seen_rows.row_answers(order, [options.sample])}
    else:
        doing("looking for the text")
        found = seen_rows.text_answer(order, options.text or "")
    return {
        "run": str(run.folder),
        "status": run.status(),
        "training_rows": order.sampler.count,
        "steps": {schedule.name: schedule.steps for schedule in order.schedules},
        "steps_done": order.counted,
        "data_at_hand": order.source is not None,
        **found,
    }


def lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """What a user reads."""
    if "rows_of_step" in answer:
        yield from _step_lines(answer["rows_of_step"], answer)
    elif "places" in answer:
        yield from _text_lines(answer)
    else:
        yield from _row_lines(answer["rows"][0], answer)
    if not answer["data_at_hand"]:
        yield "the prepared data is not on this machine, which says texts (--data PATH)"


def _text_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    if answer["note"]:
        yield answer["note"]
    places = answer["places"]
    if not places:
        holds = "is exactly this text" if answer["whole"] else "contains this text"
        yield f"no row of the prepared data {holds}, token by token; a near match is not looked for"
        return
    if crossing := sum(len(place["rows"]) > 1 for place in places):
        border = "the text runs over a border of rows, which are windows of one stream: each row holds a part"
        yield f"{_count(crossing, 'time')} {border}"
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
    if row["seen"]:
        times = _count(len(row["seen"]), "time")
        yield f"{name} was seen {times}: {_steps(row['seen'], len(answer['steps']) > 1)}"
    else:
        yield f"{name} was not seen: no step that this run has made holds it"
    of_set = f"row {row['row_of_set']:,} of the set {row['set']}, " if "set" in row else ""
    text = f": {row['text']}" if row["text"] is not None else ""
    rows = f"{answer['training_rows']:,} rows, the first is 0"
    yield f"  {of_set}{name} of the training data as prepared ({rows}){text}"


def _step_lines(step: Mapping[str, Any], answer: Mapping[str, Any]) -> Iterator[str]:
    rows = step["rows"]
    phase = f" of phase {step['phase']}" if len(answer["steps"]) > 1 else ""
    when = "was not reached" if answer["status"] == "done" else "is still to come"
    held = "saw" if step["counted"] else f"{when} ({_progress(answer)}) and holds"
    yield f"step {step['step']:,}{phase} (epoch {step['epoch']}) {held} {_count(len(rows), 'row')}:"
    for row in rows:
        text = "" if row["text"] is None else f"  {row['text']}"
        yield f"  {row['row']:,}{text}"


def _steps(sightings: Sequence[Mapping[str, Any]], several_phases: bool) -> str:
    shown = [
        f"{one['phase'] + ' ' if several_phases else ''}step {one['step']:,} (epoch {one['epoch']})"
        for one in sightings[:SHOWN]
    ]
    more = len(sightings) - SHOWN
    return ", ".join(shown) + (f" and {more:,} more (--json has all)" if more > 0 else "")


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
