"""Counts of conversations: what is learnt, left out and cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import counted

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class ConversationCounts:
    """Counts of a split's conversations."""

    rows: int = 0
    """Conversations that are learnt from."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> rows that are not."""
    fields: Counter[str] = field(default_factory=Counter)
    """What became of a field -> rows of which this is so."""
    leading_answers: int = 0
    """Conversations that began with an answer before any question; it is dropped."""
    prompts_cut: int = 0
    answers_cut: int = 0
    turns_left_out: int = 0
    tokens: int = 0
    response_tokens: int = 0
    learnt: int = 0
    """Tokens of the texts that are learnt."""
    predicted: int = 0
    """Those of them that are predicted: without the first of a row."""
    words: int = 0
    lines: int = 0
    """Ends of lines in the texts that are learnt; an answer's end is one."""
    bytes: int = 0

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add those of a part of the split, by the names of the fields."""
        for name, count in counts.items():
            if isinstance(count, Mapping):
                getattr(self, name).update(count)
            else:
                setattr(self, name, getattr(self, name) + count)

    def to_dict(self) -> dict[str, Any]:
        """The fields, as `add` takes them; `dataclasses.asdict` would count the items of a Counter."""
        return {name: getattr(self, name) for name in self.__slots__}

    def sizes(self) -> dict[str, int]:
        """The counts that facts keep, by the names they have there."""
        return {
            "tokens": self.learnt,
            "predicted": self.predicted,
            "words": self.words,
            "bytes": self.bytes,
            "lines": self.lines,
            "conversations": self.rows,
            "prompt_tokens": self.tokens - self.response_tokens,
            "response_tokens": self.response_tokens,
        }

    def notes(self, split: str, max_length: int) -> Iterator[str]:
        """What the user should know, one line each."""
        if self.left_out:
            reasons = ", ".join(f"{count:,} with {reason}" for reason, count in self.left_out.most_common())
            yield f"{split}: rows left out: {reasons}"
        if self.leading_answers:
            what = "conversations began with an answer to nothing: it is left out"
            yield f"{split}: {self.leading_answers:,} {what}"
        for count, what in (
            (self.prompts_cut, "the prompt loses its beginning"),
            (self.answers_cut, "answers are cut"),
            (self.turns_left_out, "later turns are left out"),
        ):
            if count:
                yield f"{split}: in {count:,} of {self.rows:,} rows {what} to fit --max-length {max_length}"

    def field_notes(self) -> Iterator[str]:
        """What became of the rows' fields, one line each; of all splits together."""
        yield from (f"{counted(count, 'row')}: {what}" for what, count in self.fields.most_common())
