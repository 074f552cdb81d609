"""Single answers of which each is good or bad, for KTO: rows with `label`, or pairs, which give two each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import chat_formats
from isobatch.data.chat_formats import Message, SkippedRowError
from isobatch.data.preferences import pairs
from isobatch.data.preferences.dataset import (
    PairEncoder,
    PairSource,
    Preferences,
    droppable_tokens,
    fit_pair,
    render_answer,
)
from isobatch.data.preparation.encoding import text_hash
from isobatch.data.text import chat_templates
from isobatch.data.text.chat_templates import VERBATIM, ChatSegment, ChatTemplate
from isobatch.data.text.conversations import SHOWN_PROMPTS, TokenRow, token_rows
from isobatch.data.text.row_fields import JUDGED, JUDGEMENTS, RowCounts, check_fields, notes_of_unread

if TYPE_CHECKING:
    from isobatch.data.base import ArraySource, Column
    from isobatch.data.corpora import Corpus
    from isobatch.data.text.plain_text import TokenizationSettings

ROWS = ("answer", "other")
"""Columns of a sample: its prompt with its own answer, and with another prompt's."""


class JudgedAnswer(NamedTuple):
    """A prompt, an answer to it, and whether that is good."""

    prompt: list[Message]
    answer: list[Message]
    is_good: bool


def parse_answers(row: Mapping[str, Any], where: str) -> list[JudgedAnswer]:
    """The judged answers in a row: one, or the two of a pair. `where` names the row in errors.

    Raises UserError for a row of another shape, SkippedRowError for one with nothing to learn.
    """
    if {pairs.CHOSEN, pairs.REJECTED} <= row.keys():
        pair = pairs.parse_pair(row, where)
        return [JudgedAnswer(pair.prompt, pair.chosen, True), JudgedAnswer(pair.prompt, pair.rejected, False)]
    return [JudgedAnswer(*parse_answer(row, where), _judgement(row, where))]


def parse_answer(row: Mapping[str, Any], where: str) -> tuple[list[Message], list[Message]]:
    """(prompt, answer) in a row of any form that `causal-lm` reads: the answer is what it ends with.

    Raises UserError for a row of another shape, SkippedRowError for one without a prompt or an answer.
    """
    rest = {name: value for name, value in row.items() if name not in JUDGED}
    check_fields(rest, where)
    messages = chat_formats.parse_messages(rest, where, _chat_format(rest, where))
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    start = len(messages)
    while start and messages[start - 1]["role"] == "assistant":
        start -= 1
    if not any(map(chat_formats.asks_something, messages[:start])):
        raise SkippedRowError("an empty prompt")
    return messages[:start], messages[start:]


def encode_answer(
    prompt: list[Message],
    answer: list[Message],
    template: ChatTemplate,
    settings: TokenizationSettings,
    where: str,
    values: Mapping[str, Any],
) -> np.ndarray:
    """(tokens,) of a prompt and its answer, cut as in training. `values`: the template's variables."""
    texts = render_answer(prompt, answer, template, where, values)
    asked, own = token_rows(texts, settings.tokenizer, template.end_id, settings.dtype)
    find_questions = partial(droppable_tokens, texts[0], settings.tokenizer)
    return fit_pair(asked.tokens, (own, own), find_questions, settings.max_length)[0][0].tokens


def _judgement(row: Mapping[str, Any], where: str) -> bool:
    name = next((name for name in JUDGED if row.get(name) is not None), None)
    if name is None:
        raise SkippedRowError("no label")
    value = row[name]
    text = str(value).strip().lower()
    if not text:
        raise SkippedRowError("no label")
    in_tables = {"1": True, "0": False}  # whose cells are texts
    known = value if value in (0, 1) else {**in_tables, **JUDGEMENTS}.get(text)
    if known is None:
        raise UserError(f"{where}: {name} is {value!r}: it says whether the answer is good: true or false")
    return bool(known)


def _chat_format(row: Mapping[str, Any], where: str) -> str:
    if (found := chat_formats.detect_chat_format([*row])) is None:
        raise UserError(f"{where}: has no prompt and completion, and no messages; it has: {', '.join(row)}")
    return found


def require_columns(names: Sequence[str], where: str) -> None:
    """Raise UserError unless rows with these columns hold judged answers. `where` names their file."""
    if {pairs.CHOSEN, pairs.REJECTED} <= {*names}:
        return
    if {*JUDGED}.isdisjoint(names):
        raise UserError(
            f"{where}: has no column label, which says whether an answer is good, and no chosen and rejected;"
            f" it has: {', '.join(names[:20]) or 'nothing'}"
        )


class AnswerSource(PairSource):
    """Rows of tokens in twos, of which the model reads the second without gradients, at another time."""

    names: ClassVar[tuple[str, str]] = ROWS
    rows_at_once: ClassVar[int] = 1


class JudgedAnswers(Preferences):
    """Rows with an answer and `label`, or pairs. The demo is that of preferences.

    Columns: `answer` (n, up to max_length), a prompt and its answer; `other`, the same prompt with the answer
    of the next row that has another prompt, the last with the first; `answer.learn` and `other.learn`, 1
    where a token is an answer's; `label` (n,) uint8, 1 where the answer is good.
    """

    version: ClassVar[int] = 1
    wanted: ClassVar[tuple[str, str]] = ("judged answers", "prompt, completion and label")
    require_columns = staticmethod(require_columns)

    def open(self, folder: Path, split: str) -> ArraySource:
        return AnswerSource.open(folder / split)

    def encoder(self, name: str, template: ChatTemplate, settings: TokenizationSettings) -> PairEncoder:
        return AnswerEncoder(name, template, settings)

    def _template_names(self, first: Mapping[str, Any]) -> tuple[str, str]:
        if {pairs.CHOSEN, pairs.REJECTED} <= first.keys():
            return super()._template_names(first)
        return self.options.template, pairs.default_template(_as_a_pair(first), VERBATIM)

    def _texts(self, rows: Corpus, first: Mapping[str, Any]) -> Iterator[str]:
        template = chat_templates.tokenizer_training_template(*self._template_names(first))
        for prompt, answer, _ in render_rows(rows, "train", template, RowCounts()):
            yield from (segment.text for segment in prompt + answer)


def _as_a_pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its answer as the chosen one: what a pair's default template looks at."""
    answer = next((row[n] for n in chat_formats.ANSWERS_OF["prompt"] if row.get(n) is not None), None)
    return {**row, pairs.CHOSEN: answer}


Rendered = tuple[list[ChatSegment], list[ChatSegment], bool]
"""A prompt, its answer, and whether that is good."""


def render_rows(rows: Corpus, split: str, template: ChatTemplate, counts: RowCounts) -> Iterator[Rendered]:
    """Yield each judged answer of a split as text; count the rows that are skipped."""
    for where, row in rows.splits[split]():
        try:
            found = parse_answers(row, where)
        except SkippedRowError as reason:
            counts.leave_out(reason)
            continue
        counts.add_fields(_unread(row))
        for one in found:
            values = chat_formats.template_values(row, where)
            prompt, answer = render_answer(one.prompt, one.answer, template, where, values)
            counts.add_fields(template.notes_of_fields(one.prompt + one.answer, prompt + answer))
            yield prompt, answer, one.is_good


def _unread(row: Mapping[str, Any]) -> list[str]:
    if {pairs.CHOSEN, pairs.REJECTED} <= row.keys():
        return pairs.unread(row)
    rest = {name: value for name, value in row.items() if name not in JUDGED}
    chat_format = chat_formats.detect_chat_format([*rest]) or ""
    return notes_of_unread(rest, chat_formats.main_columns(rest, chat_format))


class AnswerEncoder(PairEncoder):
    """Encodes judged answers, each beside its prompt with an answer to another prompt."""

    unit = "answer"

    def encode(self, split: str, rows: Corpus) -> dict[str, Column]:
        counts, width = RowCounts(), self.settings.max_length
        rendered = [*render_rows(rows, split, self.template, counts)]
        parts = [part for prompt, answer, _ in rendered for part in (prompt, answer)]
        encoded = [*token_rows(parts, self.settings.tokenizer, self.template.end_id, self.settings.dtype)]
        prompts, answers = encoded[::2], encoded[1::2]
        others = _with_another_prompt([row.tokens.tobytes() for row in prompts])
        if rendered and not others:
            raise UserError(
                f"--data {self.name}: all answers of the {split} split are to one prompt: KTO's baseline"
                " needs answers to others"
            )
        kept, hashes = list[tuple[TokenRow, TokenRow]](), list[int]()
        for (texts, answer, is_good), prompt, own, number in zip(
            rendered, prompts, answers, others, strict=True
        ):
            find_questions = partial(droppable_tokens, texts, self.settings.tokenizer)
            (mine, _), cuts = fit_pair(prompt.tokens, (own, own), find_questions, width)
            other = answers[number]
            kept.append((mine, fit_pair(prompt.tokens, (other, other), find_questions, width)[0][0]))
            counts.update(cuts, rows=1)
            if split == "valid" and len(self.shown) < SHOWN_PROMPTS and not cuts and is_good:
                self.shown.append(["".join(segment.text for segment in texts), answer[0].text.strip()])
            hashes.append(text_hash(mine.tokens.tobytes()))
        self._conclude(split, counts, hashes)
        labels = np.array([is_good for *_, is_good in rendered], np.uint8)
        good = int(labels.sum())
        self.notes.append(f"{split}: {good:,} good answers, {len(labels) - good:,} bad ones")
        return {**self._columns(kept, ROWS), "label": labels}


def _with_another_prompt(prompts: Sequence[bytes]) -> list[int]:
    """For each row the next one, behind the last the first, of another prompt; empty if all have one."""
    count = len(prompts)
    last = next((n for n in range(count) if prompts[n] != prompts[(n + 1) % count]), None)
    if last is None:
        return []
    found = [0] * count
    for n in (place % count for place in range(last, last - count, -1)):
        after = (n + 1) % count
        found[n] = after if prompts[n] != prompts[after] else found[after]
    return found
