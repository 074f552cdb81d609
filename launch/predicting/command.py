"""`predict`: what a finished model says of texts, or of the rows of a file."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.measures import counted, printable
from isobatch.core.terminal.status import doing
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.predicting import tables
from isobatch.launch.predicting.answerer import (
    Answerer,
    ModelOptions,
    TrainedModel,
    find_model,
    open_answerer,
    reads_texts,
)
from isobatch.launch.predicting.recommend import listed
from isobatch.launch.predicting.rows import RowReader, UnansweredRowError, UserReader
from isobatch.models.protocols import OpensItemLists

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictOptions(ModelOptions):
    """Flags of `predict`."""

    file: str | None = None
    """Rows to answer: csv, tsv, jsonl, json or Parquet."""
    out: str | None = None
    """Write the rows with their answers here: csv, jsonl or Parquet, by its ending."""
    split: str | None = None
    """Of a task of your own: the prepared samples of this split, such as valid."""
    json: bool = False
    """A JSON object a row on standard output."""


def predict(words: Sequence[str]) -> int:
    """Usage: predict RUN ["text" ...] [--file rows.csv] [--out predictions.csv] [--form onnx-int4]
    [--text-column NAME] [--pair-column NAME] [--json]; of language models also [--tokens 60]
    [--temperature 0] [--top-k 50] [--top-p 0.9] [--seed 0]; of recommenders [--top 10]
    [--by ease] [--only FILE|ID,ID] [--without FILE|ID,ID] [--with-seen]; their --out has a
    row for each item of a list, as that of `recommend`.

    RUN may be an ONNX file of a classifier, the folder of one, or that of a language model. Texts of pairs
    are given in twos.
    """
    positional, flags = split_words(words)
    if not positional:
        raise UserError('predict: give the folder of a run, and texts or --file: predict RUN "text"')
    where, *texts = positional
    if "data" in flags:  # as `auto` calls the rows
        flags.setdefault("file", flags.pop("data"))
    if len(texts) == 1 and "file" not in flags and _is_table(texts[0]):
        flags["file"] = texts.pop()
    options = command_options(flags, PredictOptions, "predict")
    if options.file is not None:  # before a model is loaded
        tables.check_file(options.file)
    out = None if options.out is None else tables.check_out(options.out, options.file)
    answered = _answers(where, texts, options)
    if out is None:
        for row in (row for rows in answered for row in rows):
            print(tables.json_line(row) if options.json else printable(format_row(row)))
        return 0
    count = tables.write_rows(out, answered)
    said = {"rows": count, "out": str(out)}
    print(atomic_files.json_text(said) if options.json else f"{counted(count, 'row')} -> {out}")
    return 0


def _is_table(word: str) -> bool:
    return Path(word).suffix.lower() in tables.ROW_ENDINGS and Path(word).is_file()


def _answers(where: str, texts: Sequence[str], options: PredictOptions) -> Iterator[list[dict[str, Any]]]:
    """Chunks of answered rows, as `--out` has them."""
    found = find_model(where, options.trust)
    if isinstance(found, TrainedModel) and not reads_texts(found):
        from isobatch.launch.predicting.own_task import predict_own_rows

        if texts:
            task = found.run.recipe.task
            raise UserError(f"predict: {task} reads files and no texts: give --file, or --split")
        return predict_own_rows(found.run, options.file, options.split)
    if options.split is not None:
        raise UserError("--split: is for tasks of your own with a method predict(model, batch): give --file")
    is_recommender = isinstance(found, TrainedModel) and isinstance(found.task, OpensItemLists)
    what = "ids of users" if is_recommender else "texts in quotes"
    if texts and options.file is not None:
        raise UserError(f"--file {options.file}: give {what} or a file, not both")
    if not texts and options.file is None:
        raise UserError(f"predict: what shall it answer? Give {what} behind the run, or --file rows.csv")
    answerer = open_answerer(found, options)
    answered = (
        iter([_answer_texts(answerer, texts)])
        if options.file is None
        else answer_file(answerer, options.file)
    )
    if isinstance(answerer.rows, UserReader) and options.out is not None:
        return listed(answered, answerer.rows.user_in)
    return answered


def _answer_texts(answerer: Answerer, texts: Sequence[str]) -> list[dict[str, Any]]:
    width = answerer.rows.texts_per_sample
    if len(texts) % width:
        raise UserError(
            f"predict: this model reads pairs of texts, and {len(texts)} were given: give them in twos"
        )
    samples = [list(texts[at : at + width]) for at in range(0, len(texts), width)]
    answers = answerer.answer([one if width > 1 else one[0] for one in samples])
    rows = (dict(zip(("text", "pair"), one, strict=False)) for one in samples)
    return [tables.beside(*both) for both in zip(rows, answers, strict=True)]


def answer_file(answerer: Answerer, file: str) -> Iterator[list[dict[str, Any]]]:
    """Rows without a text, or of an unknown user, get an empty answer, and are counted at the end."""
    done = 0
    unanswered: list[UnansweredRowError] = []
    blank: dict[str, Any] | None = None
    rows = answerer.rows
    if isinstance(rows, UserReader):
        rows = dataclasses.replace(rows, skips_unknown=True)
    doing("predicting")
    for chunk in tables.in_chunks(tables.read_table(file, columns=rows.columns)):
        samples: dict[int, Any] = {}
        for place, (where, row) in enumerate(chunk):
            try:
                samples[place] = rows.from_row(row, where)
            except UnansweredRowError as error:
                unanswered.append(error)
        if not samples and blank is None:
            raise unanswered[0]
        answers = dict(zip(samples, answerer.predict(list(samples.values())), strict=True))
        blank = blank or _without_values(next(iter(answers.values())))
        done += len(chunk)
        doing(f"predicting: {counted(done, 'row')} done")
        yield [tables.beside(row, answers.get(place, blank)) for place, (_, row) in enumerate(chunk)]
    for line in _unanswered_lines(rows, unanswered):
        print(printable(line), file=sys.stderr)


def _unanswered_lines(rows: RowReader, unanswered: Sequence[UnansweredRowError]) -> Iterator[str]:
    """How many rows got no answer, for each reason, and how many items of rows were left out."""
    for why in dict.fromkeys(error.why for error in unanswered):
        of_it = [error for error in unanswered if error.why == why]
        first = str(of_it[0]).removesuffix(": leave it out")
        yield f"{counted(len(of_it), 'row')} without an answer ({why}); the first: {first}"
    if isinstance(rows, UserReader) and (items := rows.left_out):
        unknown = counted(len(items), "unknown item")
        yield f"{unknown} of the rows left out: training had none of that name; the first: {items[0]}"


def _without_values(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _without_values(v) if isinstance(v, dict) else None for k, v in answer.items()}


def format_row(row: dict[str, Any]) -> str:
    """`name: value` of each column; what a language model writes stands alone on its lines."""
    return "  ".join(f"{name}: {_format_value(value)}" for name, value in row.items())


def _format_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_format_value(v)}" for k, v in value.items())
    return ", ".join(map(_format_value, value)) if isinstance(value, list) else str(value)
