"""Conversations become rows of tokens with a mask of what is learnt; in any process."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.data.preparation.encoding import EncodedShard, text_hash
from isobatch.data.text.chat_templates import ChatSegment, ChatTemplate
from isobatch.data.text.plain_text import count_lines
from isobatch.data.text.row_fields import ConversationCounts
from isobatch.data.text.truncation import TokenRow, TruncatedRow, fit_turns, learn_mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tokenizers import Tokenizer

SHOWN_PROMPTS = 3
"""Validation prompts that facts keep, to be answered by the trained model."""
BATCH_CONVERSATIONS = 512
"""Conversations that are tokenized together."""


class ConversationEncoder:
    """Renders, tokenizes and truncates conversations, each given as the JSON of [where, messages].

    A shard has `tokens` and `learn` (all tokens,), and `lengths`, `weights` and `hashes` of rows. Its facts:
    `counts`; the most `turns`; the first [prompt, answer] that are not truncated, `prompts`.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        self.tokenizer, self.dtype = tokenizer, np.dtype(settings["dtype"])
        self.template = ChatTemplate.from_dict(settings["template"])
        self.max_length = settings["max_length"]
        self.response_only, self.ends_with_answer = settings["response_only"], settings["ends_with_answer"]

    def __call__(self, texts: list[str]) -> EncodedShard:
        counts, turns = ConversationCounts(), 0
        prompts: list[list[str]] = []
        hashes: list[int] = []
        tokens, masks = [np.empty(0, self.dtype)], [np.empty(0, np.uint8)]
        for conversation, row in self._rows(texts, counts):
            cut = self._truncate(conversation, row)
            learn = learn_mask(cut.row, self.response_only)
            if not learn.any():
                counts.left_out["no token to learn"] += 1
                continue
            self._add_counts(counts, conversation, cut, learn)
            if len(prompts) < SHOWN_PROMPTS and not cut.is_cut:
                prompts.append([conversation[0].text, conversation[1].text.strip()])
            turns = max(turns, sum(part.is_answer for part in conversation))
            hashes.append(text_hash(row.tokens.tobytes()))
            tokens.append(cut.row.tokens)
            masks.append(learn)
        arrays = {
            "tokens": np.concatenate(tokens),
            "learn": np.concatenate(masks),
            "lengths": np.array([len(mask) for mask in masks[1:]], np.uint32),
            "weights": np.array([mask.sum() for mask in masks[1:]], np.int32),
            "hashes": np.array(hashes, np.uint64),
        }
        return EncodedShard(arrays, {"counts": counts.to_dict(), "turns": turns, "prompts": prompts})

    def _rows(
        self, texts: list[str], counts: ConversationCounts
    ) -> Iterator[tuple[list[ChatSegment], TokenRow]]:
        """Yield each conversation with its tokens; count what became of its fields.

        Segments are tokenized separately, so that no token spans the border of prompt and answer.
        """
        for start in range(0, len(texts), BATCH_CONVERSATIONS):
            batch = [json.loads(text) for text in texts[start : start + BATCH_CONVERSATIONS]]
            conversations = [self.template.segments(messages, where) for where, messages in batch]
            parts = [segment.text for conversation in conversations for segment in conversation]
            encodings = iter(self.tokenizer.encode_batch_fast(parts, add_special_tokens=False))
            for (_, messages), conversation in zip(batch, conversations, strict=True):
                ids: list[int] = []
                answer_mask: list[int] = []
                for segment in conversation:
                    found = next(encodings).ids + ([self.template.end_id] if segment.is_answer else [])
                    ids += found
                    answer_mask += [int(segment.is_learnt)] * len(found)
                counts.fields.update(self.template.notes_of_fields(messages, conversation))
                yield conversation, TokenRow(np.array(ids, self.dtype), np.array(answer_mask, np.uint8))

    def _truncate(self, conversation: list[ChatSegment], row: TokenRow) -> TruncatedRow:
        find_questions = partial(question_mask, conversation, self.tokenizer)
        return fit_turns(row, find_questions, self.max_length, self.ends_with_answer)

    def _add_counts(
        self,
        counts: ConversationCounts,
        conversation: list[ChatSegment],
        cut: TruncatedRow,
        learn: np.ndarray,
    ) -> None:
        """Count a row that is learnt from; words and bytes are those of the texts that are learnt."""
        counts.rows += 1
        counts.prompts_cut += cut.prompt_cut
        counts.answers_cut += cut.answer_cut
        counts.turns_left_out += cut.turns_left_out
        counts.tokens += len(learn)
        counts.response_tokens += int(cut.row.answer_mask.sum())
        counts.predicted += int(learn.sum())
        kept = cut.row.answer_mask.astype(bool) if self.response_only else np.ones(len(learn), bool)
        counts.learnt += int(kept.sum())
        if cut.is_cut:
            texts = [self.tokenizer.decode(cut.row.tokens[kept].tolist())]
        elif self.response_only:
            texts = [p.text for p in conversation if p.is_learnt]
        else:
            texts = ["".join(p.text for p in conversation)]
        counts.words += sum(len(text.split()) for text in texts)
        counts.lines += sum(map(count_lines, texts))
        counts.bytes += sum(len(text.encode()) for text in texts)


def question_mask(conversation: Sequence[ChatSegment], tokenizer: Tokenizer) -> np.ndarray:
    """(tokens,) bool: True where a token of a prompt is a message's and not the template's."""
    found: list[bool] = []
    for segment in conversation:
        encoding = tokenizer.encode(segment.text, add_special_tokens=False)
        found += [any(a <= start < b for a, b in segment.messages) for start, _ in encoding.offsets]
        found += [False] * segment.is_answer  # the token that ends an answer
    return np.array(found)
