"""Single answers of which each is good or bad, for KTO: rows with `label`, or pairs, which give two each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import chat_formats
from isobatch.data.preferences import pairs
from isobatch.data.preferences.dataset import PairSource, Preferences
from isobatch.data.preferences.encoder import Tokens, render, tokenize
from isobatch.data.text.chat_templates import ChatTemplate
from isobatch.data.text.plain_text import TokenizationSettings
from isobatch.data.text.row_fields import JUDGED, JUDGEMENTS, check_fields, notes_of_unread


def parse_answer(row: Mapping[str, Any], where: str) -> pairs.AnsweredPrompt[chat_formats.Message]:
    """The prompt in a row of any form that `causal-lm` reads, and the answer that it ends with.

    Raises UserError for a row of another shape, SkippedRowError for one without a prompt or an answer.
    """
    rest = _unjudged(row)
    check_fields(rest, where)
    messages = chat_formats.parse_messages(rest, where, _chat_format(rest, where))
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    start = len(messages)
    while start and messages[start - 1]["role"] == "assistant":
        start -= 1
    if not any(map(chat_formats.asks_something, messages[:start])):
        raise chat_formats.SkippedRowError("an empty prompt")
    return pairs.AnsweredPrompt(messages[:start], [messages[start:]])


def encode_answer(
    answered: pairs.AnsweredPrompt[chat_formats.Message],
    template: ChatTemplate,
    settings: TokenizationSettings,
    where: str,
    values: Mapping[str, Any],
) -> np.ndarray:
    """(tokens,) of a prompt and its answer, cut as in training. `values`: the template's variables."""
    (found,) = tokenize(iter([render(answered, template, where, values)]), template.end_id, settings)
    ((rows, _),) = found.fit(settings)
    return rows[0].tokens


def _unjudged(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in JUDGED}


def _judgement(row: Mapping[str, Any], where: str) -> bool:
    name, value = next(((name, row[name]) for name in JUDGED if row.get(name) is not None), (pairs.LABEL, ""))
    text = str(value).strip().lower()
    if not text:
        raise chat_formats.SkippedRowError("no label")
    known = {**dict.fromkeys(("1", "1.0"), True), **dict.fromkeys(("0", "0.0"), False), **JUDGEMENTS}
    if text not in known:
        raise UserError(f"{where}: {name} is {value!r}: it says whether the answer is good: true or false")
    return known[text]


def _chat_format(row: Mapping[str, Any], where: str) -> str:
    if (found := chat_formats.detect_chat_format([*row])) is None:
        raise UserError(f"{where}: has no prompt and completion, and no messages; it has: {', '.join(row)}")
    return found


def _holds_pair(names: Iterable[str]) -> bool:
    return {pairs.CHOSEN, pairs.REJECTED} <= {*names}


def require_columns(names: Sequence[str], where: str) -> None:
    """Raise UserError unless rows with these columns hold judged answers. `where` names their file."""
    names = [*chat_formats.known_names(dict.fromkeys(names))]
    if not _holds_pair(names) and {*JUDGED}.isdisjoint(names):
        raise UserError(
            f"{where}: has no column label, which says whether an answer is good, and no chosen and rejected;"
            f" it has: {', '.join(names[:20]) or 'nothing'}"
        )


class AnswerSource(PairSource):
    """Rows of tokens in twos, a prompt with its own answer and with another prompt's.

    The model reads the second without gradients, at another time.
    """

    names: ClassVar[tuple[str, str]] = ("answer", "other")
    rows_at_once: ClassVar[int] = 1


class JudgedAnswers(Preferences):
    """Rows with an answer and `label`, or pairs. The demo is that of preferences.

    Columns: `answer` (n, up to max_length), a prompt and its answer; `other`, the same prompt with the answer
    of the next row that has another prompt, the last with the first; `answer.learn` and `other.learn`, 1
    where a token is an answer's; `label` (n,) uint8, 1 where the answer is good.
    """

    version: ClassVar[int] = 3
    wanted: ClassVar[tuple[str, str]] = ("judged answer", "prompt, completion and label")
    source: ClassVar[type[PairSource]] = AnswerSource
    require_columns = staticmethod(require_columns)

    def read_row(self, row: Mapping[str, Any], where: str) -> pairs.ReadRow:
        if _holds_pair(row):
            (pair,), notes = super().read_row(row, where)
            judged = zip(pair.answers, (True, False), strict=True)
            return [pairs.AnsweredPrompt(pair.prompt, [answer], is_good) for answer, is_good in judged], notes
        found, rest = parse_answer(row, where), _unjudged(row)
        found = found._replace(is_good=_judgement(row, where))
        return [found], notes_of_unread(rest, chat_formats.main_columns(rest, _chat_format(rest, where)))

    def completed(self, found: Iterator[Tokens], split: str) -> Iterable[Tokens]:
        """With another prompt's answer beside its own."""
        rows = [*found]
        others = _with_another_prompt([one.prompt.tobytes() for one in rows])
        if rows and not others:
            raise UserError(
                f"--data {self.recipe.data}: all answers of the {split} split are to one prompt: KTO's"
                " baseline needs answers to others"
            )
        return (
            one._replace(groups=[*one.groups, *rows[other].groups])
            for one, other in zip(rows, others, strict=True)
        )


def _with_another_prompt(prompts: Sequence[bytes]) -> list[int]:
    """For each row the next one, behind the last the first, of another prompt; empty if all have one."""
    if len({*prompts}) < 2:
        return []
    found = [0] * len(prompts)
    for n in [*range(len(prompts))][::-1] * 2:  # twice: the last row's is known only after the first ones'
        after = (n + 1) % len(prompts)
        found[n] = after if prompts[n] != prompts[after] else found[after]
    return found
