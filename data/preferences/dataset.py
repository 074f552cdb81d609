"""Preference data: pairs of answers to a prompt, from folders, files, hub ids, or the demo."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.number_ranges import HeldOutShare
from isobatch.data import corpora, readers, tokenizers
from isobatch.data.base import ArraySource, Column, Ragged
from isobatch.data.chat_formats import Message, SkippedRowError, template_values
from isobatch.data.corpora import DEMO, Corpus, TrainingRows
from isobatch.data.preferences import pairs
from isobatch.data.preparation.encoding import text_hash
from isobatch.data.text import chat_templates
from isobatch.data.text.chat_templates import NOTHING, VERBATIM, ChatSegment, ChatTemplate
from isobatch.data.text.conversations import (
    BATCH_CONVERSATIONS,
    SHOWN_PROMPTS,
    TokenRow,
    fit_turns,
    learn_mask,
    question_mask,
    token_rows,
)
from isobatch.data.text.plain_text import TokenizationSettings
from isobatch.data.text.row_fields import RowCounts
from isobatch.data.tokenized import TokenizedData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from isobatch.data.preferences.pairs import PreferencePair
    from isobatch.data.tokenized import Encoded


class RenderedPair(NamedTuple):
    """A pair as text."""

    prompt: list[ChatSegment]
    answers: tuple[list[ChatSegment], list[ChatSegment]]
    """Chosen, rejected. They end with their last answer."""
    margin: float = 0.0
    """By how much a reward model is to prefer the chosen one."""


def render_pair(
    pair: PreferencePair, template: ChatTemplate, where: str, values: Mapping[str, Any] = NOTHING
) -> RenderedPair:
    """A pair written by a template with these variables.

    Raises UserError where the template cannot tell answers from prompts.
    """
    prompt, chosen = render_answer(pair.prompt, pair.chosen, template, where, values)
    rejected = render_answer(pair.prompt, pair.rejected, template, where, values)[1]
    return RenderedPair(prompt, (chosen, rejected))


def render_answer(
    prompt: list[Message],
    answer: list[Message],
    template: ChatTemplate,
    where: str,
    values: Mapping[str, Any] = NOTHING,
) -> tuple[list[ChatSegment], list[ChatSegment]]:
    """(a prompt, the answer to it) written by a template."""
    segments = template.segments(prompt + answer, where, values)
    turns = sum(message["role"] == "assistant" for message in prompt)
    stop = next(n for n, segment in enumerate(segments) if segment.turn >= turns)
    end = max(n for n, segment in enumerate(segments) if segment.is_answer)
    return segments[:stop], segments[stop : end + 1]


def droppable_tokens(prompt: Sequence[ChatSegment], tokenizer: Tokenizer) -> np.ndarray:
    """(tokens,) bool: True where a token of a prompt is a message's, earlier answers' too."""
    whole = [s._replace(messages=((0, len(s.text)),)) if s.is_answer else s for s in prompt]
    return question_mask(whole, tokenizer)


def fit_pair(
    prompt: np.ndarray, answers: Sequence[TokenRow], find_questions: Callable[[], np.ndarray], max_length: int
) -> tuple[tuple[TokenRow, TokenRow], set[str]]:
    """(both rows with at most `max_length` tokens and the same prompt, the names of CUTS that this took).

    The prompt loses its beginning until the longer answer fits, its messages before its template; an answer
    that alone fills the row loses its end, and the prompt keeps at most half of the row. The other one is
    whole where it fits.
    """
    half = max_length - min(len(prompt), max_length // 2)
    lengths = [len(answer.tokens) for answer in answers]
    wanted = max(half if length >= max_length else length for length in lengths)
    whole = np.concatenate([prompt, np.zeros(wanted, prompt.dtype)])
    is_answer = np.arange(len(whole)) >= len(prompt)

    def droppable() -> np.ndarray:
        return np.append(find_questions(), np.zeros(wanted, bool))

    row = TokenRow(whole, is_answer.astype(np.uint8))
    kept, cuts = fit_turns(row, droppable, max_length, response_only=True)
    prompt = kept.tokens[kept.answer_mask == 0]
    room = max_length - len(prompt)
    one, other = (
        TokenRow(
            np.concatenate([prompt, answer.tokens[:room]]),
            np.concatenate([np.zeros(len(prompt), np.uint8), answer.answer_mask[:room]]),
        )
        for answer in answers
    )
    return (one, other), cuts - {"answers_cut"} | ({"answers_cut"} if max(lengths) > room else set())


ANSWERS = (pairs.CHOSEN, pairs.REJECTED)
MARGIN = "margin"
DEMO_LINES = 4
"""Lines of an answer of the demo."""
_HEADER = re.compile(r"^ *def .*:$")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferencesOptions:
    """The fields of preference data."""

    template: str = "auto"
    """How prompt and answer are written as text; auto is the tokenizer's own chat template, else alpaca for
    instructions, verbatim where prompt and answers are texts, and chatml. Texts that hold their prompt are
    verbatim unless another is named. alpaca, chatml, plain, verbatim, a family (qwen, llama3, gemma, mistral,
    phi3, zephyr), or a file that ends in .jinja."""
    template_kwargs: tuple[str, ...] | None = None
    """Variables of the chat template, as enable_thinking=false; `chat_template_kwargs` of a row go first."""
    vocab_size: int | None = None
    """Size of a tokenizer trained on the data; by default 8192, and 1024 for the demo."""
    data_config: str | None = None
    """The configuration of a hub data set that has several."""
    valid: HeldOutShare | str | None = None
    """Where the data has no validation split: a file that is it, or the share of the rows to draw for it at
    random, the same for every seed; by default the last 5 %."""


class PairSource(ArraySource):
    """Pairs of rows of tokens. A pair is as long as `rows_at_once` rows of its longer one."""

    names: ClassVar[tuple[str, str]] = ANSWERS
    rows_at_once: ClassVar[int] = 2

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self.rows_at_once * self._row_lengths(indices).max(1)

    def _row_lengths(self, indices: np.ndarray) -> np.ndarray:
        """(n, 2) lengths of both rows of these pairs."""
        columns = [self.columns[name] for name in self.names]
        return np.stack([c.lengths_of(indices) for c in columns if isinstance(c, Ragged)], axis=1)

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        """tokens (B, 2, T), learn of the same shape, and row_length (B, 2), chosen first; and the weights.

        T is at least `pad_to` / rows_at_once.
        """
        width = max(pad_to, int(self.lengths(indices).max(initial=2)))
        found = super().fetch(indices, -(-width // self.rows_at_once))
        tokens = np.stack([found.pop(name) for name in self.names], axis=1)
        learn = np.stack([found.pop(f"{name}.learn") for name in self.names], axis=1)
        return {**found, "tokens": tokens, "learn": learn, "row_length": self._row_lengths(indices)}


class Preferences(TokenizedData):
    """Rows with `prompt`, `chosen` and `rejected`. The demo is made of Python's own standard library.

    Columns: `chosen` and `rejected` (n, up to max_length), a prompt and an answer; `chosen.learn` and
    `rejected.learn`, uint8 of the same shapes, 1 where a token is an answer's; `token.weight` (n,), the
    tokens of the chosen answer.
    """

    Options: ClassVar[type] = PreferencesOptions
    version: ClassVar[int] = 5
    demo_vocabulary_size: ClassVar[int] = 1024
    wanted: ClassVar[tuple[str, str]] = ("pairs", "prompt, chosen and rejected")
    """What the rows are, and their columns."""
    require_columns = staticmethod(pairs.require_columns)

    def check(self) -> None:
        chat_templates.check_name(self.options.template, (VERBATIM,))
        chat_templates.parse_values(self.options.template_kwargs or ())
        self._check_vocabulary_size()
        files = self._check_tables(
            f"{self.wanted[0]}: give jsonl, json, csv, tsv or parquet with the columns {self.wanted[1]}"
        )
        for part in files.values():
            self.require_columns(readers.column_names(part), str(part.files[0]))

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        found["options"]["template"] = chat_templates.text_of(self.options.template)
        return found

    def open(self, folder: Path, split: str) -> ArraySource:
        return PairSource.open(folder / split)

    def encode_splits(self) -> Encoded:
        rows = self._open_rows()
        first = next((row for _, row in rows.splits["train"]()), None)
        if first is None:
            raise UserError(f"--data {self.recipe.data}: the train split is empty")
        tokenizer, special = self._open_or_train_tokenizer(
            lambda size: tokenizers.train_byte_level_bpe(self._texts(rows, first), size)
        )
        name, default = self._template_names(first)
        values = chat_templates.parse_values(self.options.template_kwargs or ())
        folder = self._tokenizer_folder()
        template = chat_templates.choose_template(name, default, tokenizer, special, folder, values)
        template = template if self.known is None else ChatTemplate(**self.known.extra["template"])
        settings = TokenizationSettings(tokenizer, special, self.recipe.max_length)
        encoder = self.encoder(self.recipe.data, template, settings)
        order = ["valid"] if self.known else sorted(rows.splits, key=lambda split: split != "train")
        columns = {split: encoder.encode(split, rows) for split in order}
        extra = {
            **self._tokenizer_facts(tokenizer, special),
            "template": dataclasses.asdict(template),
            "prompts": encoder.shown,
            "notes": [*rows.notes, *encoder.notes, *encoder.total.field_notes()],
        }
        return columns, tokenizer, extra

    def _open_rows(self) -> Corpus:
        if self.recipe.data == DEMO:
            return demo_pairs()
        share = corpora.share_of(self.options.valid)
        rows = corpora.open_rows(self.recipe.data, self._files(), self.options.data_config, share)
        self.require_columns(rows.columns, f"--data {self.recipe.data}")
        return rows

    def encoder(self, name: str, template: ChatTemplate, settings: TokenizationSettings) -> PairEncoder:
        """What makes tokens of the rows."""
        return PairEncoder(name, template, settings)

    def _template_names(self, first: Mapping[str, Any]) -> tuple[str, str]:
        """(--template, what `auto` takes where the tokenizer has none) for rows like the first one."""
        name = self.options.template
        if name == "auto" and pairs.holds_whole_texts(first):
            name = VERBATIM
        return name, pairs.default_template(first, VERBATIM)

    def _texts(self, rows: Corpus, first: Mapping[str, Any]) -> Iterator[str]:
        """The texts that a tokenizer is trained on."""
        template = chat_templates.tokenizer_training_template(*self._template_names(first))
        for pair in render_rows(rows, "train", template, RowCounts()):
            yield from (segment.text for segment in sum(pair.answers, pair.prompt))


def demo_pairs() -> Corpus:
    """Pairs with the head of a function as prompt: its next lines are chosen, the same turned round rejected.

    Of every other file; every tenth of those is validation.
    """
    files = corpora.demo_files()[::2]
    valid = files[9::10]
    train = [file for file in files if file not in valid]
    splits = {name: partial(_pairs_of_files, part) for name, part in (("train", train), ("valid", valid))}
    return Corpus(splits)


def _pairs_of_files(files: list[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in files:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        for number, line in enumerate(lines):
            body = lines[number + 1 : number + 1 + DEMO_LINES]
            if _HEADER.match(line) and len(body) == DEMO_LINES:
                chosen, rejected = ("".join(f"\n{one}" for one in way) for way in (body, body[::-1]))
                where = f"{file.name} line {number + 1}"
                yield where, {"prompt": line, "chosen": chosen, "rejected": rejected}


def render_rows(
    rows: Corpus, split: str, template: ChatTemplate, counts: RowCounts, reads_margin: bool = False
) -> Iterator[RenderedPair]:
    """Yield each pair of a split as text; count the rows that are skipped."""
    for where, row in rows.splits[split]():
        try:
            pair = pairs.parse_pair(row, where)
        except SkippedRowError as reason:
            counts.leave_out(reason)
        else:
            margin = row.get(MARGIN) if reads_margin else None
            counts.add_fields(pairs.unread(row if margin is None else {**row, MARGIN: None}))
            rendered = render_pair(pair, template, where, template_values(row, where))
            rendered = rendered._replace(margin=_number(margin or 0, where))
            said = [*pair.prompt, *pair.chosen, *pair.rejected]
            counts.add_fields(template.notes_of_fields(said, sum(rendered.answers, rendered.prompt)))
            yield rendered


def _number(value: Any, where: str) -> float:
    with contextlib.suppress(TypeError, ValueError):
        if math.isfinite(number := float(value)):
            return number
    raise UserError(f"{where}: {MARGIN} is {value!r}: give a number")


class PairEncoder:
    """Encodes the splits of one data set, training first: the others are compared with it."""

    unit = "pair"
    reads_margin = False

    def __init__(self, name: str, template: ChatTemplate, settings: TokenizationSettings) -> None:
        self.name, self.template, self.settings = name, template, settings
        self.notes: list[str] = []
        """What the user should know, one line each."""
        self.shown: list[list[str]] = []
        """[prompt, chosen answer] of the first validation pairs, to be answered by the trained model."""
        self.total = RowCounts()
        self._known = TrainingRows()

    def encode(self, split: str, rows: Corpus) -> dict[str, Column]:
        """The columns of a split. Raises UserError where no row is left to learn from."""
        counts, hashes = RowCounts(), []
        kept: list[tuple[TokenRow, TokenRow]] = []
        margins: list[float] = []
        rendered = render_rows(rows, split, self.template, counts, self.reads_margin)
        for texts, (pair, cuts) in self._pairs(rendered):
            if np.array_equal(pair[0].tokens, pair[1].tokens):
                counts.leave_out("answers that begin alike and are cut")
                continue
            kept.append(pair)
            margins.append(texts.margin)
            counts.update(cuts, rows=1)
            if split == "valid" and len(self.shown) < SHOWN_PROMPTS and not cuts:
                prompt = "".join(segment.text for segment in texts.prompt)
                self.shown.append([prompt, texts.answers[0][0].text.strip()])
            hashes.append(text_hash(b"".join(row.tokens.tobytes() for row in pair)))
        self._conclude(split, counts, hashes)
        found = self._columns(kept, ANSWERS)
        return found | ({MARGIN: np.array(margins, np.float32)} if self.reads_margin else {})

    def _conclude(self, split: str, counts: RowCounts, hashes: list[int]) -> None:
        """Note what was left out and cut. Raises UserError where nothing is left to learn from."""
        self.total.update(counts)
        notes = [*counts.notes(split, self.settings.max_length)]
        self.notes += [*notes, *self._known.compare(split, np.array(hashes, np.uint64))]
        if not hashes:
            reasons = "".join(f"; {note}" for note in notes)
            raise UserError(
                f"--data {self.name}: the {split} split has no {self.unit} to learn from{reasons}"
            )

    def _pairs(
        self, rendered: Iterator[RenderedPair]
    ) -> Iterator[tuple[RenderedPair, tuple[tuple[TokenRow, TokenRow], set[str]]]]:
        """Yield each pair with its rows of tokens and their cuts. Segments are tokenized separately."""
        tokenizer, end_id, width = self.settings.tokenizer, self.template.end_id, self.settings.max_length
        while batch := list(itertools.islice(rendered, BATCH_CONVERSATIONS)):
            parts = [part for pair in batch for part in (pair.prompt, *pair.answers)]
            rows = token_rows(parts, tokenizer, end_id, self.settings.dtype)
            for pair in batch:
                prompt, *answers = itertools.islice(rows, 3)
                find_questions = partial(droppable_tokens, pair.prompt, tokenizer)
                yield pair, fit_pair(prompt.tokens, answers, find_questions, width)

    def _columns(self, kept: list[tuple[TokenRow, TokenRow]], names: Sequence[str]) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        masks = [[learn_mask(row, True) for row in pair] for pair in kept]
        for number, name in enumerate(names):
            pad = self.settings.special_ids.get("pad") or 0
            columns[name] = Ragged.from_rows([pair[number].tokens for pair in kept], pad)
            columns[f"{name}.learn"] = Ragged.from_rows([mask[number] for mask in masks])
        columns["token.weight"] = np.array([mask.sum() for mask, _ in masks], np.int32)
        columns["text.weight"] = np.array([len(mask) - 1 for mask, _ in masks], np.int32)
        return columns


class ScoredEncoder(PairEncoder):
    """Encodes pairs with their margins."""

    reads_margin = True


class ScoredPairs(Preferences):
    """Pairs for a reward model: rows may have a `margin`, by how much the chosen answer is better.

    Columns: those of `Preferences`, and `margin` (n,) float32, 0 where a row has none.
    """

    cache_name: ClassVar[str] = "scored pairs"

    def encoder(self, name: str, template: ChatTemplate, settings: TokenizationSettings) -> PairEncoder:
        return ScoredEncoder(name, template, settings)
