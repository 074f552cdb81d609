"""`predict`: what a finished model says of texts, or of the rows of a file; `serve` asks it likewise."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from isobatch.core import atomic_files, number_ranges
from isobatch.core.errors import UserError, nearest_file
from isobatch.core.flags import flags_of
from isobatch.core.measures import counted, printable
from isobatch.core.terminal import doing, print_lines
from isobatch.data import tokenizers
from isobatch.data.labelled.dataset import Labelled
from isobatch.data.text.plain_text import TokenizationSettings
from isobatch.data.tokenized import TOKENIZER_FILE
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder, finished_run, run_around
from isobatch.launch.commands import chat
from isobatch.launch.commands.evaluate import require_capability, say_changed
from isobatch.launch.commands.export import PARITY
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import is_prepared, known_data, open_run
from isobatch.launch.predicting import tables
from isobatch.launch.predicting.recommend import ListOptions, answer_users, restrict
from isobatch.models import protocols
from isobatch.models.encoder import prediction
from isobatch.models.encoder.evaluation import has_text_pairs

if TYPE_CHECKING:
    Found = Path | chat.LanguageModel | RunFolder
    """The ONNX file of a classifier, a language model that is no run's, or a run."""

REFUSAL = "predicts nothing: give its task a method predict(model, batch) and train again"
READS_TEXTS = (protocols.Generates, protocols.OpensItemLists, protocols.Predicts, protocols.ScoresAnswers)
LISTS = ("top", "by", "only", "without", "where", "without_category", "with_seen")
DRAWS = ("tokens", "temperature", "top_k", "top_p", "seed", "load_bits")


@dataclass(frozen=True, kw_only=True)  # without slots it goes together with SamplingOptions
class FormOptions(ListOptions):
    """Flags of the form in which a classifier answers, and of what it says, beside those of lists."""

    form: Literal["torch", "onnx", "onnx-dynamic", "onnx-static", "onnx-int8", "onnx-int4"] = "torch"
    """Of a classifier: the trained model, or an ONNX file of it, which runs without torch."""
    precision: number_ranges.Precision | None = None
    """Of a classifier: answer only texts of whose answers so many are right, as validation shows with 95 %
    confidence; others are marked as abstained."""
    threshold: number_ranges.Share | None = None
    """The same from this probability on; of several labels a text, each label from it on. What one form of a
    model needs says nothing of another form."""
    neighbours: number_ranges.Positive | None = None
    """Of a classifier, in its trained form: the so many most alike training texts, with label and cosine."""


MARKS = {"unknown": "with unknown items, left out", "fallback": "with what most users took"}
MARKS |= {"did_you_mean": "with ids written otherwise in training", "unused": "with the user's list alone"}
"""What a recommender says beside an answer, and how rows of it are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions(FormOptions, chat.SamplingOptions):
    """Flags that say which model answers, and how. Each kind of model reads some of them."""

    text_column: str | None = None
    """The column of --file that is read; by default the run's own, or a usual name."""
    pair_column: str | None = None
    """The column of the second text of pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictOptions(ModelOptions):
    """Flags of `predict`."""

    file: str | None = None
    """Rows to answer: csv, tsv, jsonl, json, Parquet, or txt with a text a line; of a task of your own
    whatever its read_rows reads."""
    out: str | None = None
    """Write the rows with their answers here: csv, jsonl or Parquet, by its ending."""
    split: str | None = None
    """Of a classifier the rows of this split of its own data, such as valid; of a task of your own the
    prepared samples."""
    json: bool = False
    """A JSON object a row on standard output."""


def predict(words: Sequence[str]) -> int:
    """Usage: predict RUN ["text" ...] [--file rows.csv | --split valid] [--out predictions.csv] [--json]
    [--text-column NAME] [--pair-column NAME] [--form onnx-int4] [--precision 0.95] [--neighbours 5];
    of language models also [--tokens 60] [--temperature 0] [--top-k 50] [--top-p 0.9] [--seed 0];
    of recommenders [--top 10] [--by ease] [--only FILE|ID,ID] [--without FILE|ID,ID] [--with-seen];
    reward models take none of these

    RUN may be an ONNX file of a classifier, the folder of one, or that of a language model. Texts of pairs,
    and a prompt with its answer, are given in twos.
    """
    positional, flags = split_words(words)
    if not positional:
        raise UserError('predict: give the folder of a run, and texts or --file: predict RUN "text"')
    where, *texts = positional
    if len(texts) == 1 and "file" not in flags and tables.is_table(texts[0]) and Path(texts[0]).is_file():
        flags["file"] = texts.pop()
    options = command_options(flags, PredictOptions, "predict")
    if bool(texts) + (options.file is not None) + (options.split is not None) != 1:
        raise UserError("predict: give one of texts in quotes, ids of users, --file rows.csv, --split valid")
    if options.file is not None and not Path(options.file).expanduser().exists():
        tables.check_file(options.file)
    found = find_model(where, options.trust)
    source = found.recipe.data if options.split and isinstance(found, RunFolder) else options.file
    out = None if options.out is None else tables.check_out(options.out, source)
    answered = _answers(found, texts, options)
    if out is not None:
        return tables.write_rows(out, answered, options.json, source)
    for row in itertools.chain.from_iterable(answered):
        print(tables.json_line(row) if options.json else printable(format_row(row)))
    return 0


def _answers(found: Found, texts: Sequence[str], options: PredictOptions) -> Iterable[list[dict[str, Any]]]:
    """Chunks of answered rows, as `--out` has them."""
    if isinstance(found, RunFolder) and not isinstance(task_of(found), READS_TEXTS):
        from isobatch.launch.predicting.own_task import predict_own_rows

        return predict_own_rows(found, options.file, options.split)
    if options.file is not None:  # before a model is loaded
        tables.check_file(options.file)
    data: Any = known_data(found, "--split") if options.split and isinstance(found, RunFolder) else None
    if options.split and not isinstance(data, Labelled):
        raise UserError("--split: is for the run of a classifier (--form, too) or of a task of your own")
    rows = data.rows_of(options.split) if options.split else None
    answerer = open_answerer(found, options)
    return iter([answerer.answer_typed(texts)]) if texts else answerer.answer_file(options.file, rows)


@dataclass(frozen=True, slots=True)
class Answerer:
    """A model that is read once, and how its samples are read. Its methods raise UserError."""

    predict: protocols.Predictor
    rows: tables.RowReader
    write_text: Any = None
    """Of a language model: (prompt, sampling) -> the text behind it, in pieces."""

    def answer(self, samples: Sequence[str | list[str]]) -> list[dict[str, Any]]:
        """An answer for each text, or list of two where the model reads pairs."""
        return self.predict([self.rows.from_text(sample, f"text {n}") for n, sample in enumerate(samples, 1)])

    def answer_typed(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """The texts with their answers; those of pairs in twos."""
        names = ("text", "pair") if self.rows.pairs else ("text",)
        if len(texts) % len(names):
            raise UserError(f"predict: of {len(texts)} texts there are no pairs: give them in twos")
        given = list(zip(*(texts[place :: len(names)] for place in range(len(names))), strict=True))
        answers = self.answer([list(one) if len(one) > 1 else one[0] for one in given])
        rows = (dict(zip(names, one, strict=True)) for one in given)
        return [tables.beside(*both) for both in zip(rows, answers, strict=True)]

    def answer_file(self, file: str | None, given: Any = None) -> Iterator[list[dict[str, Any]]]:
        """Chunks of a file's rows, or of `given` LocatedRows, with their answers. Rows without a text get an
        empty answer, those of unknown users what most users took; both are counted at the end.
        """
        unanswered: dict[str, list[tables.UnansweredRowError]] = defaultdict(list)
        blank: dict[str, Any] = {}
        rows, marks, withheld = self.rows, defaultdict[str, list[Any]](list), Counter[bool]()
        waiting = iter(given or tables.read_table(str(file), columns=[rows.column, rows.pair]))
        for number, chunk in enumerate(iter(lambda: [*itertools.islice(waiting, tables.CHUNK_ROWS)], [])):
            doing(f"predicting: {number * tables.CHUNK_ROWS:,} rows done")
            samples: dict[int, Any] = {}
            for place, (where, row) in enumerate(chunk):
                try:
                    samples[place] = rows.from_row(row, where)
                except tables.UnansweredRowError as error:
                    unanswered[error.what].append(error)
            if not (samples or blank):
                raise next(iter(unanswered.values()))[0]
            answers = dict(zip(samples, self.predict(list(samples.values())), strict=True))
            for mark in MARKS:  # as a recommender's answers have in service
                marks[mark] += [answer.pop(mark) for answer in answers.values() if mark in answer]
            blank = blank or tables.without_values(next(iter(answers.values())))
            withheld.update(one["abstained"] for one in answers.values() if "abstained" in one)
            yield [tables.beside(row, answers.get(place, blank)) for place, (_, row) in enumerate(chunk)]
        said = [
            f"{counted(len(errors), 'row')} without an answer ({why}); the first: {errors[0]}"
            for why, errors in unanswered.items()
        ]
        if withheld:
            said.append(f"abstained: {withheld[True]:,} of {withheld.total():,} answers are not sure enough")
        said += [f"{counted(len(m), 'row')} {MARKS[k]}; the first: {m[0]}" for k, m in marks.items() if m]
        if isinstance(self.predict, prediction.TextClassifier) and (drifted := self.predict.drift()):
            said.append(f"the texts differ from those of validation (in brackets): {'; '.join(drifted)}")
        print_lines(*said)


def format_row(row: dict[str, Any]) -> str:
    """`name: value` of each column; what a language model writes stands alone on its lines."""
    return "  ".join(f"{name}: {_format_value(value)}" for name, value in row.items())


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_format_value(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def find_model(where: str, trust: bool) -> Found:
    """What `where` names. Raises UserError."""
    path = finished_run(where)
    if not (path / "recipe.json").is_file() and (file := prediction.onnx_file(path)):
        return file
    if path.suffix == ".onnx":
        raise UserError(f"{where}: there is no such file{nearest_file(where)}")
    return chat.plain_model(where) or open_run(path, trust)


def task_of(run: RunFolder) -> Any:
    """The task of a run. Raises UserError where it is not finished or predicts in no way."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    kind = next((kind for kind in READS_TEXTS if isinstance(task, kind)), protocols.PredictsBatches)
    return require_capability(run, kind, "predict", REFUSAL)


def open_answerer(found: Found, options: ModelOptions) -> Answerer:
    """The model, read. Raises UserError, also for a flag that this kind of model does not read."""
    doing("loading the model")
    if isinstance(found, Path):
        _refuse_unread(options, "an ONNX file", "precision", "threshold", *prediction.COLUMNS)
        if run_path := run_around(found):
            say_changed(RunFolder(run_path))
        return _classifier(prediction.open_onnx(found), options)
    if isinstance(found, chat.LanguageModel):
        return _writer(found, options.text_column, options)
    run, task, asked = found, task_of(found), found.recipe.options
    text = options.text_column or asked.get("text_column")
    what = f"a {run.recipe.task} run"
    if isinstance(task, protocols.Generates):
        return _writer(chat.language_model_of(run, task), text, options)
    if isinstance(task, protocols.OpensItemLists):
        _refuse_unread(options, what, "text_column", *LISTS)
        lists = task.open_lists(run.final, options.by)
        print_lines(f"ranked by {lists.by}", *restrict(lists, options, asked.get("item_column")))
        users = tables.UserReader(text or asked.get("user_column"), lists=lists)
        return Answerer(partial(answer_users, lists, options.top), users)
    if isinstance(task, protocols.ScoresAnswers):
        _refuse_unread(options, what)
        tokenizer = tokenizers.open_tokenizer(run.final / TOKENIZER_FILE)
        settings = TokenizationSettings(tokenizer, {}, run.recipe.max_length)
        template = chat.ChatTemplate(**run.facts.extra["template"])
        reader = tables.AnswerReader(template=template, settings=settings)
        return Answerer(task.open_scorer(run.final, run.facts), reader)
    if not isinstance(task, protocols.Predicts):
        from isobatch.launch.predicting.own_task import OwnModel, refuse_without_read_rows

        _refuse_unread(options, what)
        refuse_without_read_rows(run)
        return Answerer(OwnModel(run), tables.WholeRows())
    if isinstance(task, protocols.EncodesLatents):
        _refuse_unread(options, what, "text_column")
        sequences = tables.SequenceReader(text or asked.get("sequence_column"))
        return Answerer(task.open_predictor(run.final, run.folder, "torch"), sequences)
    _refuse_unread(options, what, "form", "precision", "threshold", "neighbours", *prediction.COLUMNS)
    predictor: Any = task.open_predictor(run.final, run.folder / "exports", options.form)
    if options.neighbours is not None:
        from isobatch.launch.predicting.neighbours import training_neighbours

        if predictor.encode is None:
            raise UserError("--neighbours: only the trained model tells which texts are alike: --form torch")
        if predictor.problem.per_token:
            raise UserError("--neighbours: is for labels of whole texts, and this model labels words")
        found_near = training_neighbours(run, predictor, options.neighbours)
        predictor = dataclasses.replace(predictor, neighbours=found_near)
    known = has_text_pairs(run.facts) if is_prepared(run) else None  # a received run may name any folder
    return _classifier(predictor, options, True if asked.get("pair_column") else known, run)


def _classifier(
    found: prediction.TextClassifier,
    options: ModelOptions,
    pairs: bool | None = None,
    run: RunFolder | None = None,
) -> Answerer:
    """A classifier that answers as the flags say. `pairs`: whether it reads pairs, None where the columns
    decide.
    """
    if options.precision is not None:
        if options.threshold is not None:
            raise UserError("--precision and --threshold exclude each other: give one of them")
        found = found.abstaining(options.precision)
    if options.threshold is not None:
        found = found.cut(options.threshold)
    least = "" if found.threshold is None else f"; no answer below a probability of {found.threshold:.4g}"
    print_lines(f"answers by {found.file}{_measured(found, run)}{least}{found.shown}")
    text, pair = (getattr(options, name) or found.columns[name] for name in prediction.COLUMNS)
    words = found.problem.per_token
    return Answerer(found, tables.WordReader(text) if words else tables.TextReader(text, pair, pairs))


def _measured(found: prediction.TextClassifier, run: RunFolder | None) -> str:
    """How well it answers held-out samples, as `export` noted beside it, or else the run's summary."""
    name, noted = found.problem.headline, found.file.parent / PARITY
    figures: Any = atomic_files.read_json(noted) if noted.is_file() else (run and run.summary()) or {}
    with contextlib.suppress(KeyError, TypeError):  # an older run, and a received one, may lack any of it
        scores, split = figures.get("metrics", figures), figures["split"]
        score = scores.get(f"exported_{name}", scores.get(name))
        count = figures.get("samples") or cast("RunFolder", run).facts.samples[split]
        return f": {found.problem.title} {100 * score:.1f} % on {count:,} {split} samples"
    return ""


def _refuse_unread(options: ModelOptions, what: str, *read: str) -> None:
    """Raise UserError for a flag that was given and that this kind of model does not read."""
    for flag in flags_of(ModelOptions).values():
        if flag.name not in (*read, "trust") and getattr(options, flag.name) != flag.default:
            raise UserError(f"{flag.spelling}: changes nothing of {what}; leave it out")


def _writer(model: chat.LanguageModel, column: str | None, options: ModelOptions) -> Answerer:
    """One prompt after the other: in a batch, padding would change float sums, and greedy answers."""
    _refuse_unread(options, "a language model", "text_column", *DRAWS)
    write_text, drawn = model.writer(options.load_bits), chat.sampling(options, model.template)
    name = "continuation" if model.template is None else "answer"

    def write(prompts: Sequence[Any]) -> list[dict[str, Any]]:
        return [{name: "".join(write_text(prompt, drawn))} for prompt in prompts]

    return Answerer(write, tables.PromptReader(column, template=model.template), write_text)
