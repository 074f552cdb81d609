"""The cleaning pipeline of --clean: changes and drops texts before they are tokenized, and counts both.

The steps, in this order whatever order was typed: `html` (tags, scripts, entities), `unicode` (NFC),
`control` (control and zero-width characters), `short=10` (texts of so many words or fewer), `duplicates`
(white space aside), `near=0.8` (near-duplicates: the share of word pairs in common, estimated by MinHash).
Duplicates are looked for within a split, and of conversations and documents in training also among those held
out, which stay: a metric of texts that were learnt says nothing. In a .txt file every line counts as a text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.data.cleaning import steps
from isobatch.data.cleaning.steps import (
    FILTERS,
    REMEMBERING,
    TRANSFORMS,
    CleaningStep,
    make_filter,
    transform,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from isobatch.data.chat_formats import Message

CLEANING_VERSION = 2
"""Part of the cache key: raise it when the same texts come out differently."""
SAMPLE_CHARACTERS = 60
"""Most characters of a text that a note shows."""


@dataclass(slots=True)
class StepOutcome:
    """What a step did over all splits."""

    seen: int = 0
    affected: int = 0
    """Texts that it changed or dropped."""
    sample: str = ""
    """An excerpt of the first of them."""


class CleaningPipeline:
    """Runs the steps over the texts of one split after another. `unit` is what notes call a text."""

    def __init__(self, steps: Sequence[CleaningStep], unit: str = "texts") -> None:
        self.steps, self.unit = steps, unit
        self.outcomes = {step: StepOutcome() for step in steps}

    def transforms_only(self) -> CleaningPipeline:
        """A pipeline without the steps that drop texts, with its own counts; for training a tokenizer."""
        return CleaningPipeline([step for step in self.steps if step.name in TRANSFORMS], self.unit)

    def clean_texts(self, texts: Iterable[str], held_out: Iterable[str] = ()) -> Iterator[str]:
        """The documents that are kept, cleaned; a step against duplicates drops those in `held_out`."""
        is_kept = self._filter(known=map(self.transforms_only().transform_text, held_out))
        for text in texts:
            changed = self.transform_text(text)
            if changed.strip() and is_kept(changed):
                yield changed

    def clean_lines(self, chunks: Iterable[str]) -> Iterator[str]:
        """The lines of a stream that are kept, cleaned; `chunks` are whole lines.

        Blank lines that follow a dropped line are dropped with it.
        """
        is_kept = self._filter()
        dropped = False
        for chunk in self._remove_html_blocks(chunks):
            kept = []
            for line in re.findall("[^\n]*\n|[^\n]+", chunk):
                if line.isspace():
                    if not dropped:
                        kept.append(line)
                    continue
                changed = self.transform_text(line.removesuffix("\n"), " ")
                dropped = not changed.strip() or not is_kept(changed)
                if not dropped:
                    kept.append(changed + "\n" * line.endswith("\n"))
            if kept:
                yield "".join(kept)

    def conversation_cleaner(
        self, held_out: Iterable[list[Message]] = ()
    ) -> Callable[[list[Message]], list[Message] | None]:
        """A function for the conversations of one split: their cleaned messages, or None to drop them.

        With a step against duplicates those in `held_out` are dropped.
        """
        silent = self.transforms_only()
        is_kept = self._filter(skip="short", known=(_whole(silent.transform(one)) for one in held_out))

        def clean(messages: list[Message]) -> list[Message] | None:
            changed = self.transform(messages)
            return changed if is_kept(_whole(changed)) else None

        return clean

    def transform(self, messages: list[Message]) -> list[Message]:
        """A conversation after the steps that change texts."""
        return [{k: v if k == "role" else self.transform_text(v) for k, v in m.items()} for m in messages]

    def transform_text(self, text: str, line_break: str = "\n") -> str:
        """The text after the steps that change texts; `line_break` replaces the end of an HTML block."""
        for step in self.steps:
            if step.name in TRANSFORMS:
                changed = transform(step.name, text, line_break)
                outcome = self.outcomes[step]
                outcome.seen += 1
                if changed != text:
                    outcome.affected += 1
                    outcome.sample = outcome.sample or _difference(text, changed)
                text = changed
        return text

    def _remove_html_blocks(self, chunks: Iterable[str]) -> Iterator[str]:
        """The chunks of a stream without HTML scripts, styles and comments, which may span lines."""
        step = next((step for step in self.steps if step.name == "html"), None)
        if step is None:
            yield from chunks
            return
        for chunk, blocks in steps.remove_blocks(chunks):
            if blocks:
                self.outcomes[step].affected += len(blocks)
                self.outcomes[step].sample = self.outcomes[step].sample or f"{_excerpt(blocks[0])} -> nothing"
            yield chunk

    def _filter(self, skip: str = "", known: Iterable[str] = ()) -> Callable[[str], bool]:
        """A function that says whether a text is kept; to be called once for each text of a split.

        `known`: cleaned texts that count as seen; read only where a step looks for duplicates.
        """
        filters = [
            (step, make_filter(step)) for step in self.steps if step.name in FILTERS and step.name != skip
        ]

        remembering = [drops for step, drops in filters if step.name in REMEMBERING]
        for text in known if remembering else ():
            for drops in remembering:
                drops(text)

        def is_kept(text: str) -> bool:
            for step, drops in filters:
                outcome = self.outcomes[step]
                outcome.seen += 1
                if drops(text):
                    outcome.affected += 1
                    outcome.sample = outcome.sample or _excerpt(text)
                    return False
            return True

        return is_kept

    def notes(self) -> Iterator[str]:
        """What each step did, one line each."""
        chats = self.unit == "conversations"
        for step, outcome in self.outcomes.items():
            changes = step.name in TRANSFORMS
            unit = "fields" if chats and changes else self.unit
            if chats and step.name == "short":
                yield f"clean {step}: does not apply to conversations"
            elif not outcome.affected:
                yield f"clean {step}: nothing to do in {outcome.seen:,} {unit}"
            else:
                effect = f"{unit} {'changed' if changes else 'dropped'}, such as {outcome.sample}"
                yield f"clean {step}: {outcome.affected:,} of {outcome.seen:,} {effect}"


def _whole(messages: list[Message]) -> str:
    """All that is said in a conversation."""
    return "\n".join(v for m in messages for k, v in m.items() if k != "role" and v)


def _difference(before: str, after: str) -> str:
    """An excerpt of both texts around the first character where they differ."""
    pairs = enumerate(zip(before, after, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
    start = max(0, position - SAMPLE_CHARACTERS // 3)
    return f"{_excerpt(before[start:])} -> {_excerpt(after[start:])}"


def _excerpt(text: str) -> str:
    """The beginning on one line; characters that are not printable are written as their code."""
    shown = "".join(
        c if c.isprintable() else f"\\u{ord(c):04x}" for c in text[:SAMPLE_CHARACTERS].replace("\n", " ")
    )
    return f"«{shown.strip()}{'…' if len(text) > SAMPLE_CHARACTERS else ''}»"
