"""Conversations as rows of tokens, with a mask of the tokens to be learnt."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from isobatch.core.errors import UserError
from isobatch.data import chat_formats
from isobatch.data.base import Column, NoSamplesError, Ragged
from isobatch.data.cleaning import CleaningPipeline, CleaningStep
from isobatch.data.corpora import TrainingRows
from isobatch.data.preparation.encoding import EncodedShard, ShardEncoder, encode_whole, text_hash
from isobatch.data.readers import LocatedRows
from isobatch.data.text import chat_templates, row_fields
from isobatch.data.text.chat_templates import ChatSegment, ChatTemplate, Texts, render_ahead
from isobatch.data.text.plain_text import TokenizationSettings, count_lines
from isobatch.data.text.row_fields import RowCounts

SHOWN_PROMPTS = 3
"""Validation prompts that facts keep, to be answered by the trained model."""
BATCH_CONVERSATIONS = 32
"""Conversations that are tokenized together."""


SPLIT = (
    "the chat template writes an earlier answer otherwise, mostly without its thought, once the conversation"
    " goes on: each such answer is a sample of its own"
)


class TokenRow(NamedTuple):
    """A conversation as tokens."""

    tokens: np.ndarray
    """(tokens,) ids."""
    answer_mask: np.ndarray
    """(tokens,) 1 where a token belongs to an answer, else 0."""


TOKENIZATION_VERSION = 8
"""Part of the cache key: raise it when the same rows become other tokens."""


@dataclass(frozen=True, kw_only=True)
class ConversationEncoder(ShardEncoder):
    """Renders, tokenizes and truncates conversations, each given as the JSON of [where, messages, values].

    A shard has `tokens` and `learn` (all tokens,), and `lengths`, `weights` and `hashes` of rows. Its facts:
    `counts`; the most `turns`; the first [prompt, answer] that are not truncated, `prompts`.
    """

    template: ChatTemplate
    max_length: int
    response_only: bool
    version: int = TOKENIZATION_VERSION

    def __call__(self, texts: list[str]) -> EncodedShard:
        counts, turns = RowCounts(), 0
        prompts: list[list[str]] = []
        hashes: list[int] = []
        tokens: list[np.ndarray] = [np.empty(0, self.dtype)]
        masks = [np.empty(0, np.uint8)]
        for conversation, row in self._rows(texts, counts):
            find_questions = partial(question_mask, conversation, self.tokenizer)
            kept, cuts = fit_turns(row, find_questions, self.max_length, self.response_only)
            learn = learn_mask(kept, self.response_only)
            if not learn.any():
                counts.leave_out("no token to learn")
                continue
            counts.update(self._counts(conversation, kept, learn, bool(cuts)), rows=1)
            counts.update(cuts)
            if len(prompts) < SHOWN_PROMPTS and not cuts and conversation[1].is_learnt:
                prompts.append([conversation[0].text, conversation[1].text.strip()])
            turns = max(turns, sum(part.is_answer for part in conversation))
            hashes.append(text_hash(row.tokens.tobytes()))
            tokens.append(kept.tokens)
            masks.append(learn)
        arrays = {
            "tokens": np.concatenate(tokens),
            "learn": np.concatenate(masks),
            "lengths": np.array([len(mask) for mask in masks[1:]], np.uint32),
            "weights": np.array([mask.sum() for mask in masks[1:]], np.int32),
            "hashes": np.array(hashes, np.uint64),
        }
        return EncodedShard(arrays, {"counts": counts, "turns": turns, "prompts": prompts})

    def _rows(self, given: list[str], counts: RowCounts) -> Iterator[tuple[list[ChatSegment], TokenRow]]:
        """Yield each sample of each conversation with its tokens; count what became of its fields."""
        for conversations in self._rendered(map(json.loads, given)):
            samples: list[list[ChatSegment]] = []
            for texts in conversations:
                found = texts.samples() if self.response_only else [texts.segments()]
                counts.add_fields(texts.notes([part for one in found for part in one]))
                counts.add_fields([SPLIT] * (len(found) > 1))
                samples += found
            rows = token_rows(samples, self.tokenizer, self.template.end_id, self.dtype)
            yield from zip(samples, rows, strict=True)

    def _rendered(self, given: Iterator[Any]) -> Iterator[list[Texts]]:
        """Yield the conversations, some at a time: while these are tokenized, the next ones are rendered."""

        def render_next() -> list[Texts]:
            some = islice(given, BATCH_CONVERSATIONS)
            found = [self.template.texts(messages, where, values) for where, messages, values in some]
            render_ahead(found)
            return found

        with ThreadPoolExecutor(1, "render") as thread:
            following = thread.submit(render_next)
            while some := following.result():
                following = thread.submit(render_next)
                yield some

    def _counts(
        self, conversation: list[ChatSegment], row: TokenRow, learn: np.ndarray, is_cut: bool
    ) -> dict[str, int]:
        """The sizes of a row that is learnt from; words and bytes are those of the texts that are learnt."""
        answers = int(row.answer_mask.sum())
        kept = row.answer_mask.astype(bool) if self.response_only else np.ones(len(learn), bool)
        if is_cut:
            texts = [self.tokenizer.decode(row.tokens[kept].tolist())]
        elif self.response_only:
            texts = [p.text for p in conversation if p.is_learnt]
        else:
            texts = ["".join(p.text for p in conversation)]
        return {
            "prompt_tokens": len(learn) - answers,
            "response_tokens": answers,
            "predicted": int(learn.sum()),
            "tokens": int(kept.sum()),
            "words": sum(len(text.split()) for text in texts),
            "lines": sum(map(count_lines, texts)),
            "bytes": sum(len(text.encode()) for text in texts),
        }


def token_rows(
    conversations: Sequence[Sequence[ChatSegment]], tokenizer: Tokenizer, end_id: int, dtype: Any
) -> Iterator[TokenRow]:
    """Yield each conversation as tokens; `end_id` ends an answer.

    Segments are tokenized separately, so that no token spans the border of prompt and answer.
    """
    texts = [text for segments in conversations for one in segments for text in (one.text, one.end or "")]
    encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    for conversation in conversations:
        ids: list[int] = []
        answer_mask: list[int] = []
        for segment in conversation:
            found, end = next(encodings).ids, next(encodings).ids
            found += [end_id] * segment.is_answer if segment.end is None else end
            ids += found
            answer_mask += [int(segment.is_learnt)] * len(found)
        yield TokenRow(np.array(ids, dtype), np.array(answer_mask, np.uint8))


def question_mask(conversation: Sequence[ChatSegment], tokenizer: Tokenizer) -> np.ndarray:
    """(tokens,) bool: True where a token of a prompt is a message's and not the template's."""
    found: list[bool] = []
    for segment in conversation:
        encoding = tokenizer.encode(segment.text, add_special_tokens=False)
        found += [any(a <= start < b for a, b in segment.messages) for start, _ in encoding.offsets]
        if segment.is_answer:  # the tokens that end it
            end = segment.end
            found += [False] * (1 if end is None else len(tokenizer.encode(end, add_special_tokens=False)))
    return np.array(found)


def fit_turns(
    row: TokenRow, find_questions: Callable[[], np.ndarray], max_length: int, response_only: bool
) -> tuple[TokenRow, set[str]]:
    """(the row with at most `max_length` tokens, the names of CUTS that this took).

    Questions are cut before templates, and answers last.

    Turns are kept from the first on while they fit, each with its whole answer. To make room a question loses
    its beginning, and keeps its end and its template; the first also loses its template, from the left, where
    that leaves no room for a question. A first answer that alone fills the row loses its end, and its prompt
    keeps at most half of the row.

    `find_questions` gives (tokens,) bool, True where a token of a prompt is not the template's.
    """
    # After the last answer there is nothing to learn.
    stop = len(row.answer_mask) - int(row.answer_mask[::-1].argmax()) if response_only else None
    whole = TokenRow(*(part[:stop] for part in row))
    if len(whole.tokens) <= max_length:
        return whole, set()
    is_question = find_questions()
    kept: list[np.ndarray] = []
    room, cuts = max_length, set()
    for number, (prompt, answer) in enumerate(_turns(whole.answer_mask)):
        if number == 0 and len(answer) >= max_length:  # something must precede what is learnt
            kept_answer = answer[: max_length - min(len(prompt), max_length // 2)]
            cuts |= {"answers_cut"} if len(kept_answer) < len(answer) else set()
            answer = kept_answer
        shorter = cut_question(prompt, is_question, room - len(answer))
        if shorter is None and number > 0:
            cuts.add("turns_left_out")
            break
        if shorter is None:
            shorter = prompt[len(prompt) - (room - len(answer)) :]
        cuts |= {"prompts_cut"} if len(shorter) < len(prompt) else set()
        kept += [shorter, answer]
        room -= len(shorter) + len(answer)
    places = np.concatenate(kept)
    return TokenRow(*(part[places] for part in whole)), cuts


def _turns(answer_mask: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The places of each turn's prompt and answer; what follows the last answer has an empty one."""
    borders = np.flatnonzero(np.diff(answer_mask, prepend=0, append=0 if answer_mask[-1] else 1))
    parts = np.split(np.arange(len(answer_mask)), borders)
    return zip(parts[::2], parts[1::2], strict=False)


def cut_question(prompt: np.ndarray, is_question: np.ndarray, room: int) -> np.ndarray | None:
    """The places of a prompt without the first of its question; None where no question would be left."""
    excess, question = len(prompt) - room, prompt[is_question[prompt]]
    if excess <= 0:
        return prompt
    return np.setdiff1d(prompt, question[:excess]) if excess < len(question) else None


def learn_mask(row: TokenRow, response_only: bool) -> np.ndarray:
    """(tokens,) uint8: 1 where a token is to be predicted. The first never is: nothing precedes it."""
    learn = row.answer_mask.copy() if response_only else np.ones_like(row.answer_mask)
    learn[:1] = 0
    return learn


@dataclass
class Conversations:
    """One set of conversations.

    Columns: `tokens` (n, up to max_length); `learn`, uint8 of the same shape, 1 where a token is to be
    predicted from those before it (never a row's first); `token.weight` (n,), the number of those.
    """

    form: ClassVar[str] = "conversations"
    """What facts call the set."""
    name: str
    rows: Mapping[str, Callable[[], LocatedRows]]
    """Split -> a function that reads its rows."""
    chat_format: str
    """The columns of its rows, as `chat_formats.detect_chat_format` calls them."""
    options: Any
    """TextOptions."""
    folder: Path | None
    """The tokenizer's folder; None where it is trained."""
    steps: InitVar[Sequence[CleaningStep]] = ()
    remarks: list[str] = field(default_factory=list)
    """What the user should know of the rows."""
    total: RowCounts = field(default_factory=RowCounts)
    """Of all splits."""
    most_turns: int = 0
    """Answers of the longest training conversation."""
    known: TrainingRows = field(default_factory=TrainingRows)
    """Hashes of the training rows' tokens."""
    prompts: list[list[str]] = field(default_factory=list)
    """[prompt, answer] of the first validation conversations that are not truncated."""
    template: ChatTemplate = field(init=False)
    """Set by `bind_tokenizer`, as is `eos`."""
    eos: int | None = None

    def __post_init__(self, steps: Sequence[CleaningStep]) -> None:
        self.cleaning = CleaningPipeline(steps, "conversations")
        self.response_only = self.options.response_only
        self.default_template = "alpaca" if self.chat_format == "instruction" else "chatml"

    @property
    def notes(self) -> list[str]:
        return [*self.remarks, *self.total.field_notes(), *self.cleaning.notes()]

    @property
    def splits(self) -> Sequence[str]:
        """Training first: rows of the others are compared with it."""
        return sorted(self.rows, key=lambda split: split != "train")

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on."""
        template = chat_templates.tokenizer_training_template(self.options.template, self.default_template)
        cleaning = self.cleaning.transforms_only()
        for where, messages, values in self._messages("train", RowCounts(), cleaning):
            yield from (segment.text for segment in template.texts(messages, where, values).segments())

    def bind_tokenizer(self, settings: TokenizationSettings) -> None:
        """Choose the template for this tokenizer; to be called before `encode`."""
        self.template = chat_templates.choose_template(
            self.options.template,
            self.default_template,
            settings.tokenizer,
            settings.special_ids,
            self.folder,
            chat_templates.parse_values(self.options.template_kwargs or ()),
        )
        self.eos = settings.tokenizer.token_to_id(self.template.tokens["eos_token"])

    def encode(self, split: str, settings: TokenizationSettings) -> tuple[dict[str, Column], dict[str, int]]:
        """(columns, sizes) of a split. Raises UserError where no conversation is left to learn from."""
        counts = RowCounts()
        given = (json.dumps(found) for found in self._messages(split, counts, self.cleaning))
        encoder = ConversationEncoder(
            tokenizer=settings.tokenizer,
            dtype=settings.dtype,
            template=self.template,
            max_length=settings.max_length,
            response_only=self.response_only,
        )
        found, facts = encode_whole(encoder, f"{self.name}, {split}", given, settings.workshop)
        for of_shard in facts:
            counts.update(of_shard["counts"])
        if split == "valid":
            self.prompts = [prompt for one in facts for prompt in one["prompts"]][:SHOWN_PROMPTS]
        if split == "train":
            self.most_turns = max((one["turns"] for one in facts), default=0)
        self.total.update(counts)
        notes = [*counts.notes(split, settings.max_length)]
        if not counts["rows"]:
            reasons = "".join(f"; {note}" for note in notes)
            said = f"the {split} split has no conversation to learn from{reasons}"
            raise NoSamplesError(f"--data {self.name}: {said}")
        same = self.known.compare(split, found["hashes"])
        if same and "duplicates" not in self.cleaning.steps:
            same.append("--clean duplicates leaves such rows out of training")
        self.remarks += [*notes, *same]
        tokens = Ragged.of_lengths(found["tokens"], found["lengths"], settings.special_ids.get("pad") or 0)
        learn = Ragged(found["learn"], tokens.offsets)
        columns: dict[str, Column] = {"tokens": tokens, "learn": learn, "token.weight": found["weights"]}
        return columns, counts.sizes()

    def _messages(
        self, split: str, counts: RowCounts, cleaning: CleaningPipeline
    ) -> Iterator[tuple[str, list[chat_formats.Message], dict[str, Any]]]:
        """Yield (where, messages, template_values) of each conversation of a split, cleaned; count those that
        are skipped.
        """
        clean = cleaning.conversation_cleaner(self._held_out() if split == "train" else ())
        for where, row in chat_formats.known_rows(self.rows[split]()):
            try:
                messages, notes = self._parse(row, where)
                if (cleaned := clean(messages)) is None:
                    continue
                chat_formats.require_answers(cleaned)
            except chat_formats.SkippedRowError as reason:
                counts.leave_out(reason)
                continue
            last = max(n for n, m in enumerate(cleaned) if m["role"] == "assistant")
            behind = {m["role"] for m in cleaned[last + 1 :]}
            notes += row_fields.notes_of_unread(row, chat_formats.main_columns(row, self.chat_format))
            counts.add_fields(
                [*notes, *(f"a message by the {role} after the last answer is not learnt" for role in behind)]
            )
            yield where, cleaned[: last + 1], chat_formats.template_values(row, where)

    def _parse(self, row: Mapping[str, Any], where: str) -> tuple[list[chat_formats.Message], list[str]]:
        """The messages of a row without answers before its first question, and a note if there were any."""
        row_fields.check_fields(row, where)
        if not self.response_only and row_fields.has_weights(row):
            raise UserError(f"--response-only off: {where} says by weights what is learnt: leave one out")
        messages = chat_formats.parse_messages(row, where, self.chat_format)
        asked = next((n for n, m in enumerate(messages) if m["role"] == "user"), len(messages))
        kept = [m for m in messages[:asked] if m["role"] != "assistant"] + messages[asked:]
        if not any(m["role"] == "assistant" for m in kept):
            raise chat_formats.SkippedRowError("no question before the answer")
        return kept, ["an answer before any question is left out"] * (len(kept) < len(messages))

    def _held_out(self) -> Iterator[list[chat_formats.Message]]:
        """The conversations that are not trained on."""
        for split in self.splits:
            for where, row in chat_formats.known_rows(self.rows[split]()) if split != "train" else ():
                with contextlib.suppress(chat_formats.SkippedRowError):
                    yield self._parse(row, where)[0]

    def facts(self) -> dict[str, Any]:
        """What Facts should know of the set."""
        return {
            "form": self.form,
            "eos": self.eos,
            "template": dataclasses.asdict(self.template),
            "response_only": self.response_only,
            "prompts": self.prompts,
            "turns": self.most_turns,
        }

    def prompt(self) -> str:
        """The first prompt of the validation split; empty where there is none."""
        return self.prompts[0][0] if self.prompts else ""
