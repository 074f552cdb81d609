"""A finished model with the reader of its samples, for `predict` and `serve`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from isobatch.core import number_ranges
from isobatch.core.errors import UserError
from isobatch.core.flags import flags_of
from isobatch.core.measures import printable
from isobatch.core.package import cache_folder
from isobatch.core.terminal.status import doing
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.commands.chat import LanguageModel, language_model_of, plain_model, sampling
from isobatch.launch.commands.evaluate import require_capability
from isobatch.launch.local.run_setup import TrustOptions, open_run
from isobatch.launch.predicting.recommend import restrict
from isobatch.launch.predicting.rows import (
    PromptReader,
    RowReader,
    SequenceReader,
    TextReader,
    UserReader,
)
from isobatch.models.encoder import prediction
from isobatch.models.encoder.evaluation import has_text_pairs
from isobatch.models.protocols import (
    EncodesLatents,
    Generates,
    OpensItemLists,
    Predictor,
    Predicts,
    PredictsBatches,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.models.base import Task
    from isobatch.models.recommendation.recommendations import Recommendations

REFUSAL = "predicts nothing: give its task a method predict(model, batch) and train again"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModelOptions(TrustOptions):
    """Flags that say which model answers. Each kind of model reads some of them."""

    form: Literal["torch", "onnx", "onnx-int4"] = "torch"
    """Of a classifier: the trained model, or an ONNX file of it, which runs without torch."""
    top: number_ranges.Positive = 10
    """Length of a recommender's lists."""
    by: Literal["model", "popularity", "knn", "ease", "best"] = "model"
    """What ranks a recommender's items: the model, a baseline of the same interactions that final/ keeps, or
    the best of them on the validation data."""
    only: str | None = None
    """Of a recommender: offer these items alone, ids or titles with commas between them, or a file."""
    without: str | None = None
    """Of a recommender: offer none of these items."""
    load_bits: Literal[16, 8, 4] | None = None
    """Bits of a language model's matrices; by default those of training. 8 and 4 need bitsandbytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions(ServedModelOptions):
    """And those that say how it is asked, which a client of a server says itself."""

    text_column: str | None = None
    """The column of --file that is read; by default the run's own, or a usual name."""
    pair_column: str | None = None
    """The column of the second text of pairs."""
    tokens: number_ranges.Positive = 60
    """Most tokens that a language model writes for a row."""
    temperature: number_ranges.Rate = 0.0
    """Of a language model; 0 takes the likeliest token every time."""
    top_k: number_ranges.Count = 0
    """Draw among so many of the likeliest tokens; 0 for all."""
    top_p: number_ranges.Fraction = 1.0
    """Draw among the likeliest tokens that have this probability together."""
    seed: number_ranges.Count = 0
    """Of the draws; the same for every row, so that an answer does not depend on its place."""
    with_seen: bool = False
    """Of a recommender: offer also what a user had already."""


class TrainedModel(NamedTuple):
    """A finished run, and its task, which predicts in some way."""

    run: RunFolder
    task: Task


@dataclass(frozen=True, slots=True)
class Answerer:
    """A model that is read once, and how its samples are read."""

    predict: Predictor
    rows: RowReader
    write_text: Any = None
    """Of a language model: (prompt, sampling) -> the text behind it, in pieces."""

    def answer(self, samples: Sequence[str | list[str]]) -> list[dict[str, Any]]:
        """An answer for each text, or list of two where the model reads pairs. Raises UserError."""
        read = [self.rows.from_text(sample, f"text {n}") for n, sample in enumerate(samples, 1)]
        return self.predict(read)


def find_model(where: str, trust: bool) -> Path | LanguageModel | TrainedModel:
    """What `where` names: the ONNX file of a classifier, a language model that is no run's, or a run.

    Raises UserError, also for a run that is not finished or predicts nothing.
    """
    path = Path(where).expanduser()
    if not (path / "recipe.json").is_file() and (file := prediction.onnx_file(path)):
        return file
    if path.suffix == ".onnx":
        raise UserError(f"{where}: there is no such file")
    return plain_model(where) or trained_model(open_run(where, trust))


def trained_model(run: RunFolder) -> TrainedModel:
    """A run whose task predicts in some way. Raises UserError."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    kinds: tuple[type, ...] = (Generates, OpensItemLists, Predicts, PredictsBatches)
    capability = next((kind for kind in kinds if isinstance(task, kind)), PredictsBatches)
    return TrainedModel(run, require_capability(run, capability, "predict", REFUSAL))


def reads_texts(found: Path | LanguageModel | TrainedModel) -> bool:
    """Whether its rows need no Data of its own."""
    return not isinstance(found, TrainedModel) or isinstance(
        found.task, Generates | OpensItemLists | Predicts
    )


def open_answerer(found: Path | LanguageModel | TrainedModel, options: ModelOptions) -> Answerer:
    """The model, read. Raises UserError, also for a flag that this kind of model does not read."""
    doing("loading the model")
    if isinstance(found, Path):
        return _open_onnx(found, options)
    if isinstance(found, LanguageModel):
        return _writer(found, PromptReader(options.text_column, found.template), options)
    run, task = found
    asked = run.recipe.options
    text, pair = (getattr(options, name) or asked.get(name) for name in prediction.COLUMNS)
    what = f"a {run.recipe.task} run"
    if isinstance(task, Generates):
        _refuse_unread(
            options, what, "text_column", "tokens", "temperature", "top_k", "top_p", "seed", "load_bits"
        )
        model = language_model_of(run, task)
        return _writer(model, PromptReader(text or asked.get("question_column"), model.template), options)
    if isinstance(task, OpensItemLists):
        choice = ("only", "without", "with_seen")
        _refuse_unread(options, what, "text_column", "top", "by", *choice)
        lists = task.open_lists(run.final, options.by)
        items = asked.get("item_column")
        for line in restrict(lists, options.only, options.without, options.with_seen, items):
            print(printable(line), file=sys.stderr)
        users = UserReader(text or asked.get("user_column"), lists)
        return Answerer(partial(_recommend, lists, options.top), users)
    assert isinstance(task, Predicts), "the caller has asked"
    if isinstance(task, EncodesLatents):
        _refuse_unread(options, what, "text_column")
        reader = SequenceReader(text or asked.get("sequence_column"))
        return Answerer(task.open_predictor(run.final, run.folder, "torch"), reader)
    _refuse_unread(options, what, "form", *prediction.COLUMNS)
    predictor = task.open_predictor(run.final, run.folder / "exports", options.form)
    pairs = True if asked.get("pair_column") else _has_pairs(run)
    return Answerer(predictor, TextReader(text, pair, pairs))


def _open_onnx(file: Path, options: ModelOptions) -> Answerer:
    """The classifier in an ONNX file, without torch. Texts are cut as in training where it lies in a run."""
    _refuse_unread(options, "an ONNX file", *prediction.COLUMNS)
    folders = list(file.absolute().parents)[1:3]  # of final/, or of exports/onnx
    found = next((f for f in folders if (f / "recipe.json").is_file()), None)
    run = None if found is None else RunFolder.open(found)
    classifier = prediction.open_onnx(file, None if run is None else run.recipe.max_length)
    text, pair = (getattr(options, name) or classifier.columns[name] for name in prediction.COLUMNS)
    return Answerer(classifier, TextReader(text, pair))


def _refuse_unread(options: ModelOptions, what: str, *read: str) -> None:
    """Raise UserError for a flag that was given and that this kind of model does not read."""
    for flag in flags_of(ModelOptions, "predict").values():
        if flag.name not in (*read, "trust") and getattr(options, flag.name) != flag.default:
            raise UserError(f"{flag.spelling}: changes nothing of {what}; leave it out")


def _writer(model: LanguageModel, reader: PromptReader, options: ModelOptions) -> Answerer:
    """One prompt after the other: in a batch, padding would change float sums, and greedy answers."""
    write_text, drawn = model.writer(options.load_bits), sampling(options, model.template)
    name = "continuation" if drawn.stop_token_id is None else "answer"

    def write(prompts: Sequence[Any]) -> list[dict[str, Any]]:
        return [{name: "".join(write_text(prompt, drawn))} for prompt in prompts]

    return Answerer(write, reader, write_text=write_text)


def _recommend(lists: Recommendations, top: int, users: Sequence[str | list[str]]) -> list[dict[str, Any]]:
    """`users`: ids; or, of users who were not in training, the items they took."""
    found = (lists.recommend(u, top) if isinstance(u, str) else lists.for_items(u, top) for u in users)
    return [{f"{name}s": [e[name] for e in one] for name in ("item", "title", "score")} for one in found]


def _has_pairs(run: RunFolder) -> bool | None:
    """Whether the texts that it learnt were pairs; None where its prepared data is not in this machine's own
    cache: a received run may name any folder.
    """
    folder = Path(run.facts.folder)
    ours = folder.resolve().parent == (cache_folder() / "prepared").resolve()
    return has_text_pairs(run.facts) if ours and (folder / "train").is_dir() else None
