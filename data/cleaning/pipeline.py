"""--clean: what texts lose before they become tokens, and which are dropped. Every step counts what it did.

The steps, in this order whatever order was typed: `html` (tags, scripts, entities), `unicode` (NFC),
`control` (control and zero-width characters), `short=10` (texts of so many words or fewer), `duplicates`
(white space aside), `near=0.8` (near-duplicates: the share of word pairs in common, estimated by MinHash).
Duplicates are looked for within a split. The text of a .txt file is its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from isobatch.data.chat_formats import Message
from isobatch.data.cleaning import html
from isobatch.data.cleaning.steps import CHANGES, DROPS, Step, dropping
from isobatch.data.cleaning.steps import changed as changed_by

RULES = 1
"""Raise it when the same texts come out otherwise: old caches are then left alone."""
SHOWN = 60
"""Characters of a sample."""


@dataclass(slots=True)
class Outcome:
    """What a step did over all splits."""

    seen: int = 0
    touched: int = 0
    sample: str = ""


class Cleaning:
    """The steps over one split after another."""

    def __init__(self, steps: Sequence[Step], unit: str = "texts") -> None:
        self.steps, self.unit = steps, unit
        self.outcomes = {step: Outcome() for step in steps}

    def without_drops(self) -> Cleaning:
        """Only what changes texts: enough for training a tokenizer. It counts apart."""
        return Cleaning([step for step in self.steps if step.name in CHANGES], self.unit)

    def texts(self, texts: Iterable[str]) -> Iterator[str]:
        """Documents."""
        keeps = self._keeper()
        for text in texts:
            changed = self.change(text)
            if changed.strip() and keeps(changed):
                yield changed

    def lines(self, pieces: Iterable[str]) -> Iterator[str]:
        """A stream in pieces that end at lines' ends. The blank lines behind a dropped line go with it."""
        keeps = self._keeper()
        dropped = False
        for piece in self._without_blocks(pieces):
            kept = []
            for line in re.findall("[^\n]*\n|[^\n]+", piece):
                if line.isspace():
                    if not dropped:
                        kept.append(line)
                    continue
                changed = self.change(line.removesuffix("\n"), " ")
                dropped = not changed.strip() or not keeps(changed)
                if not dropped:
                    kept.append(changed + "\n" * line.endswith("\n"))
            if kept:
                yield "".join(kept)

    def conversations(self) -> Callable[[list[Message]], list[Message] | None]:
        """A function for a split's conversations: the messages cleaned, or None for one that is dropped."""
        keeps = self._keeper(without="short")

        def clean(messages: list[Message]) -> list[Message] | None:
            changed = [{k: v if k == "role" else self.change(v) for k, v in m.items()} for m in messages]
            whole = "\n".join(v for m in changed for k, v in m.items() if k != "role" and v)
            return changed if keeps(whole) else None

        return clean

    def change(self, text: str, gap: str = "\n") -> str:
        """The text after the steps that change one; `gap` stands where an element of a page ended."""
        for step in self.steps:
            if step.name in CHANGES:
                changed = changed_by(step.name, text, gap)
                outcome = self.outcomes[step]
                outcome.seen += 1
                if changed != text:
                    outcome.touched += 1
                    outcome.sample = outcome.sample or _difference(text, changed)
                text = changed
        return text

    def _without_blocks(self, pieces: Iterable[str]) -> Iterator[str]:
        """The pieces of a stream without scripts, styles and comments, which may span lines."""
        step = next((step for step in self.steps if step.name == "html"), None)
        if step is None:
            yield from pieces
            return
        for piece, blocks in html.without_blocks(pieces):
            if blocks:
                self.outcomes[step].touched += len(blocks)
                self.outcomes[step].sample = self.outcomes[step].sample or f"{_short(blocks[0])} -> nothing"
            yield piece

    def _keeper(self, without: str = "") -> Callable[[str], bool]:
        """Whether a text stays, asked once for each text of a split."""
        tests = [(step, dropping(step)) for step in self.steps if step.name in DROPS and step.name != without]

        def keeps(text: str) -> bool:
            for step, drops in tests:
                outcome = self.outcomes[step]
                outcome.seen += 1
                if drops(text):
                    outcome.touched += 1
                    outcome.sample = outcome.sample or _short(text)
                    return False
            return True

        return keeps

    def notes(self) -> Iterator[str]:
        """A line for each step."""
        chats = self.unit == "conversations"
        for step, outcome in self.outcomes.items():
            changes = step.name in CHANGES
            unit = "fields" if chats and changes else self.unit
            if chats and step.name == "short":
                yield f"clean {step}: does not apply to conversations"
            elif not outcome.touched:
                yield f"clean {step}: nothing to do in {outcome.seen:,} {unit}"
            else:
                did = f"{unit} {'changed' if changes else 'dropped'}, such as {outcome.sample}"
                yield f"clean {step}: {outcome.touched:,} of {outcome.seen:,} {did}"


def _difference(before: str, after: str) -> str:
    """Both texts around the first place where they differ."""
    pairs = enumerate(zip(before, after, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
    start = max(0, place - SHOWN // 3)
    return f"{_short(before[start:])} -> {_short(after[start:])}"


def _short(text: str) -> str:
    """The beginning, on one line, with a code in place of what does not show."""
    shown = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text[:SHOWN].replace("\n", " "))
    return f"«{shown.strip()}{'…' if len(text) > SHOWN else ''}»"
