"""`seen`: which steps of a run saw a row of its data, or which rows a step saw; nothing is logged for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import check_fields
from isobatch.core.measures import printable
from isobatch.core.number_ranges import Count, Positive
from isobatch.core.terminal.status import doing
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import TrustOptions, is_prepared, locate_data, open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.forensics.run_order import RunOrder
    from isobatch.engine.runs.run_folder import RunFolder

QUESTIONS = ("sample", "text", "file", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenOptions(TrustOptions):
    """Flags of `seen`."""

    sample: Count | None = None
    """A row of the training data as it was prepared; the first is 0."""
    text: str | None = None
    """A text: the rows that hold it, token by token. Of a recommender USER or USER,ITEM."""
    file: str | None = None
    """A text file whose content is looked for in this way."""
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
            raise UserError("seen: what shall be looked for? Give one of --sample, --text, --file or --step")
        if len(asked) > 1:
            raise UserError(f"{' and '.join(asked)} are {len(asked)} questions: give one of them")
        if self.phase is not None and self.step is None:
            raise UserError(f"--phase {self.phase}: belongs to --step; other answers say every phase")


def seen(words: Sequence[str]) -> int:
    """Usage: seen RUN --sample 1204 | --text "..." | --file text.txt | --step 120 [--phase NAME]
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
    from isobatch.launch.forensics.seen_lines import lines

    for line in lines(answer):
        print(printable(line))
    return DONE


def answer_question(run: RunFolder, options: SeenOptions) -> dict[str, Any]:
    """The answer as JSON. Raises UserError."""
    from isobatch.engine.forensics import seen_rows
    from isobatch.engine.forensics.run_order import needs_data, open_order

    text = _text(options)
    if options.data is not None or text is not None or needs_data(run.recipe):
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
        found = seen_rows.text_answer(order, text or "")
    notes = seen_rows.preparation_notes(order)
    return {"run": str(run.folder), **_state(run, order), **found, "notes": notes}


def _text(options: SeenOptions) -> str | None:
    """The text that is looked for, if it is a text. Raises UserError."""
    if options.file is None:
        return options.text
    path = Path(options.file).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--file {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--file {path}: is no text in UTF-8: give a text file, or --text") from None


def _state(run: RunFolder, order: RunOrder) -> dict[str, Any]:
    """How far the run is, and what the answer rests on."""
    steps = {schedule.name: schedule.steps for schedule in order.schedules}
    before = run.recipe.starts_from
    exported = next(
        (row["exported"] for row in reversed(newest_rows(run.metrics)) if "exported" in row), None
    )
    return {
        "status": run.status(),
        "training_rows": order.sampler.count,
        "steps": steps,
        "steps_done": order.counted,
        "exported": exported,
        "data_at_hand": order.source is not None,
        **({"starts_from": before["run"]} if before else {}),
    }
