"""A finished model with the reader of its samples, for `predict` and `serve`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core import number_ranges
from isobatch.core.errors import UserError
from isobatch.core.flags import flags_of
from isobatch.core.measures import printable
from isobatch.core.package import cache_folder
from isobatch.core.terminal.status import doing
from isobatch.data.text.chat_templates import ChatTemplate
from isobatch.data.tokenizers import open_tokenizer
from isobatch.engine.registry import workload_of
from isobatch.launch.commands.evaluate import require_capability
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.launch.predicting.item_choice import restrict
from isobatch.launch.predicting.rows import (
    PromptReader,
    RowReader,
    SampleError,
    SequenceReader,
    TextReader,
    UserReader,
)
from isobatch.launch.predicting.trained_texts import TrainedTexts
from isobatch.models.causal_lm.generation import Sampling
from isobatch.models.encoder.evaluation import has_text_pairs
from isobatch.models.protocols import (
    EncodesLatents,
    Generates,
    ItemLists,
    OpensItemLists,
    Predictor,
    Predicts,
    PredictsBatches,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.launch.commands.generate import LanguageModel
    from isobatch.models.base import Task

REFUSAL = "predicts nothing: give its task a method predict(model, batch) and train again"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions(TrustOptions):
    """Flags that say how a model is asked. Each kind of model reads some of them."""

    form: Literal["torch", "onnx", "onnx-int4"] = "torch"
    """Of a classifier: the trained model, or an ONNX file of it, which runs without torch."""
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
    top: number_ranges.Positive = 10
    """Length of a recommender's lists."""
    by: Literal["model", "popularity", "knn", "ease", "best"] = "model"
    """What ranks a recommender's items: the model, a baseline of the same interactions that final/ keeps, or
    the best of them on the validation data."""
    skip_unknown: bool = False
    """Of a recommender: leave out items, and rows of users, that training did not know, and count them."""
    only: str | None = None
    """Of a recommender: offer these items alone, ids or titles with commas between them, or a file."""
    without: str | None = None
    """Of a recommender: offer none of these items."""
    with_seen: bool = False
    """Of a recommender: offer also what a user had already."""
    load_bits: Literal[16, 8, 4] | None = None
    """Bits of a language model's matrices; by default those of training. 8 and 4 need bitsandbytes."""


@dataclass(frozen=True, slots=True)
class Answerer:
    """A model that is read once, and how its samples are read."""

    predict: Predictor
    rows: RowReader
    label_column: str | None = None
    """Where training found the labels; None for the usual names."""
    trained: TrainedTexts | None = None
    """What a classifier was trained on; None where its prepared data is not here."""

    def answer(self, samples: Sequence[str | list[str]]) -> list[dict[str, Any]]:
        """An answer for each text, or list of two where the model reads pairs. Raises UserError."""
        read = [self.rows.from_text(sample, f"text {n}") for n, sample in enumerate(samples, 1)]
        return self.predict(read)


def trained_task(run: RunFolder) -> Task:
    """The task of a finished run that predicts in some way. Raises UserError."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    kinds: tuple[type, ...] = (Generates, OpensItemLists, Predicts, PredictsBatches)
    capability = next((kind for kind in kinds if isinstance(task, kind)), PredictsBatches)
    found: Task = require_capability(run, capability, "predict", REFUSAL)
    return found


def open_text_answerer(model: LanguageModel, options: ModelOptions) -> Answerer:
    """A language model that is no run's."""
    doing("loading the model")
    write_text = model.writer(options.load_bits)
    reader = PromptReader(options.text_column, model.template)
    return Answerer(partial(_write, write_text, sampling(options, model.template)), reader)


def open_answerer(run: RunFolder, task: Task, options: ModelOptions) -> Answerer:
    """The model of a run whose rows need no Data of its own. Raises UserError."""
    text, pair = (getattr(options, n) or run.recipe.options.get(n) for n in ("text_column", "pair_column"))
    doing("loading the model")
    if isinstance(task, Generates):
        refuse_unread(
            options, run, "text_column", "tokens", "temperature", "top_k", "top_p", "seed", "load_bits"
        )
        template = chat_template(run)
        reader = PromptReader(text or run.recipe.options.get("question_column"), template)
        write_text = task.writer(run.final, options.load_bits)
        return Answerer(partial(_write, write_text, sampling(options, template)), reader)
    if isinstance(task, OpensItemLists):
        choice = ("only", "without", "with_seen")
        refuse_unread(options, run, "text_column", "top", "by", "skip_unknown", *choice)
        lists = task.open_lists(run.final, options.by)
        items = run.recipe.options.get("item_column")
        for line in restrict(lists, options.only, options.without, options.with_seen, items):
            print(printable(line), file=sys.stderr)
        column = text or run.recipe.options.get("user_column")
        users = UserReader(column, lists if options.skip_unknown else None, split=lists.split_items)
        return Answerer(partial(_recommend, lists, options.top), users)
    assert isinstance(task, Predicts), "trained_task has asked"
    if isinstance(task, EncodesLatents):
        refuse_unread(options, run, "text_column")
        column = text or run.recipe.options.get("sequence_column")
        return Answerer(task.open_predictor(run.final, run.folder, "torch"), SequenceReader(column))
    refuse_unread(options, run, "form", "text_column", "pair_column")
    predictor = task.open_predictor(run.final, run.folder / "exports", options.form)
    texts = TextReader(text, pair, _reads_pairs(run))
    return Answerer(predictor, texts, run.recipe.options.get("label_column"), trained_texts(run))


def refuse_unread(options: ModelOptions, run: RunFolder, *read: str) -> None:
    """Raise UserError for a flag that was given and that this kind of model does not read."""
    for flag in flags_of(ModelOptions, "predict").values():
        if flag.name not in (*read, "trust") and getattr(options, flag.name) != flag.default:
            raise UserError(f"{flag.spelling}: changes nothing of a {run.recipe.task} run; leave it out")


def chat_template(run: RunFolder) -> ChatTemplate | None:
    """How the conversations were written that the run was trained on; None where there were none."""
    found = run.facts.extra.get("template")
    return ChatTemplate.from_dict(found) if found else None


def sampling(options: ModelOptions, template: ChatTemplate | None) -> Sampling:
    """How a language model draws tokens."""
    drawn = {n: getattr(options, n) for n in ("temperature", "top_k", "top_p", "seed")}
    end = None if template is None else template.end_id
    return Sampling(max_new_tokens=options.tokens, stop_token_id=end, **drawn)


def _write(write_text: Any, drawn: Sampling, prompts: Sequence[Any]) -> list[dict[str, Any]]:
    """One prompt after the other: in a batch, padding would change float sums, and greedy answers."""
    name = "continuation" if drawn.stop_token_id is None else "answer"
    return [{name: "".join(write_text(prompt, drawn))} for prompt in prompts]


def _recommend(lists: ItemLists, top: int, users: Sequence[str | list[str]]) -> list[dict[str, Any]]:
    """`users`: ids; or, of users who were not in training, the items they took."""
    answers = []
    for number, user in enumerate(users):
        try:
            entries = lists.recommend(user, top) if isinstance(user, str) else lists.for_items(user, top)
        except UserError as error:
            raise SampleError(number, str(error)) from None
        answers.append({f"{name}s": [e[name] for e in entries] for name in ("item", "title", "score")})
    return answers


def _reads_pairs(run: RunFolder) -> bool | None:
    """Whether a classifier was trained on pairs; None where its prepared data is not here."""
    if run.recipe.options.get("pair_column"):
        return True
    return has_text_pairs(run.facts) if _has_prepared_data(run) else None


def trained_texts(run: RunFolder) -> TrainedTexts | None:
    """What a classifier was trained on; None where its prepared data is not here."""
    if not _has_prepared_data(run):
        return None
    tokenizer = open_tokenizer(Path(run.facts.folder) / "tokenizer.json")
    return TrainedTexts(run.facts.folder, tokenizer, run.recipe.max_length)


def _has_prepared_data(run: RunFolder) -> bool:
    """Whether it is here, in this machine's own cache: a received run may name any folder."""
    folder = Path(run.facts.folder)
    ours = folder.resolve().parent == (cache_folder() / "prepared").resolve()
    return ours and (folder / "train").is_dir()
