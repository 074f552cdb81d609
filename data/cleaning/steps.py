"""The steps of --clean: parsing them, and what each does to one text."""

from __future__ import annotations

import itertools
import re
import unicodedata
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.data.cleaning import html
from isobatch.data.cleaning.near_duplicates import NearDuplicates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TRANSFORMS = ("html", "unicode", "control")
"""Steps that change texts."""
FILTERS = {"short": 10.0, "duplicates": None, "near": 0.8}
"""Steps that drop whole texts, with the default of their number; None where they take none."""
REMEMBERING = ("duplicates", "near")
"""Steps that drop a text for others that were seen."""
# The zero-width joiners matter between letters of Persian or Hindi and in emoji; after Latin letters and
# white space they have no effect.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]"
    "|(?<![\u0590-\U0010ffff])[\u200c\u200d]"
)
CHARACTER_WORDS = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]")
"""Han and kana characters: each counts as a word."""
UNSPACED_SCRIPTS = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff]")
"""Thai, Lao, Tibetan, Burmese and Khmer: no spaces between words; four characters count as a word."""


@dataclass(frozen=True, slots=True)
class CleaningStep:
    """One step of --clean."""

    name: str
    number: float | None = None
    """Most words of a text that `short` drops; the threshold of `near`; other steps have none."""

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name}={self.number:g}"


def parse_steps(words: Sequence[str]) -> tuple[CleaningStep, ...]:
    """The steps that --clean names, in the order in which they run.

    Raises UserError for an unknown step, one that is named twice, or a wrong number.
    """
    order = [*TRANSFORMS, *FILTERS]
    steps = sorted((_parse_step(word.strip()) for word in words), key=lambda step: order.index(step.name))
    for step, following in itertools.pairwise(steps):
        if step.name == following.name:
            raise UserError(f"--clean {','.join(words)}: {step.name} is named twice")
    return tuple(steps)


def _parse_step(word: str) -> CleaningStep:
    name, equals, number = word.partition("=")
    if name not in (*TRANSFORMS, *FILTERS):
        hint = nearest_hint(name, [*TRANSFORMS, *FILTERS])
        raise UserError(
            f"--clean {word}: there is no such step{hint}; steps: {', '.join((*TRANSFORMS, *FILTERS))}"
        )
    default = FILTERS.get(name)
    if not equals or default is None:
        if equals:
            raise UserError(f"--clean {word}: {name} takes no number")
        return CleaningStep(name, default)
    try:
        value = float(number)
    except ValueError:
        raise UserError(
            f"--clean {word}: {number or 'nothing'} is not a number, as in {name}={default:g}"
        ) from None
    if name == "short" and not (value >= 1 and value.is_integer()):
        raise UserError(f"--clean {word}: must be a whole number of words, as in short=10")
    if name == "near" and not 0 < value <= 1:
        raise UserError(f"--clean {word}: must be a share above 0 and at most 1, as in near=0.8")
    return CleaningStep(name, value)


def transform(name: str, text: str, line_break: str) -> str:
    """The text after a step of TRANSFORMS; `line_break` is written where an HTML element ends a line."""
    if name == "html":
        return html.to_text(text, line_break)
    if name == "unicode":
        return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
    return CONTROL.sub("", text)


def make_filter(step: CleaningStep) -> Callable[[str], bool]:
    """A function that says whether a step of FILTERS drops a text; `duplicates` and `near` remember texts."""
    if step.name == "short":
        assert step.number is not None
        most_words = step.number
        return lambda text: count_words(text) <= most_words
    if step.name == "duplicates":
        return ExactDuplicates()
    assert step.number is not None
    return NearDuplicates(step.number)


def count_words(text: str) -> int:
    """Words separated by white space; of scripts without spaces they are estimated from the characters."""
    if text.isascii():
        return len(text.split())
    letters, unspaced = len(CHARACTER_WORDS.findall(text)), len(UNSPACED_SCRIPTS.findall(text))
    if not letters and not unspaced:
        return len(text.split())
    rest = UNSPACED_SCRIPTS.sub(" ", CHARACTER_WORDS.sub(" ", text)).split()
    return letters + -(-unspaced // 4) + sum(any(c.isalnum() for c in word) for word in rest)


class ExactDuplicates:
    """Says of each text whether it was seen before, white space aside.

    It keeps 8 bytes of a hash of each: among a billion different texts the chance of any collision is 3 %.
    """

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, text: str) -> bool:
        digest = blake2b(" ".join(text.split()).encode("utf-8", "replace"), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        known = key in self.seen
        self.seen.add(key)
        return known
