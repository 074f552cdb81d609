"""The steps of --clean: their names and numbers, and what each does to one text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from isobatch.core.errors import UserError
from isobatch.data.cleaning import html
from isobatch.data.cleaning.near_duplicates import NearDuplicates
from isobatch.data.readers import did_you_mean

CHANGES = ("html", "unicode", "control")
DROPS = {"short": 10.0, "duplicates": None, "near": 0.8}
"""Steps that drop whole texts, with their usual numbers."""
# Joiners shape letters of Persian or Hindi, and emoji; behind Latin letters and white space they do nothing.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]"
    "|(?<![\u0590-\U0010ffff])[\u200c\u200d]"
)
LETTER_WORDS = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]")
"""Han and kana, of which each counts as a word."""
UNSPACED = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff]")
"""Thai, Lao, Tibetan, Burmese and Khmer: no spaces between words, of about four characters each."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step, with its number where it has one."""

    name: str
    number: float | None = None

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name}={self.number:g}"


def steps_of(words: Sequence[str]) -> tuple[Step, ...]:
    """The steps that --clean names, in their order."""
    order = [*CHANGES, *DROPS]
    steps = sorted((_step(word.strip()) for word in words), key=lambda step: order.index(step.name))
    for step, following in zip(steps, steps[1:], strict=False):
        if step.name == following.name:
            raise UserError(f"--clean {','.join(words)}: {step.name} is named twice")
    return tuple(steps)


def _step(word: str) -> Step:
    name, equals, number = word.partition("=")
    if name not in (*CHANGES, *DROPS):
        hint = did_you_mean(name, [*CHANGES, *DROPS])
        raise UserError(
            f"--clean {word}: there is no such step{hint}; steps: {', '.join((*CHANGES, *DROPS))}"
        )
    usual = DROPS.get(name)
    if not equals or usual is None:
        if equals:
            raise UserError(f"--clean {word}: {name} takes no number")
        return Step(name, usual)
    try:
        value = float(number)
    except ValueError:
        raise UserError(
            f"--clean {word}: {number or 'nothing'} is not a number, as in {name}={usual:g}"
        ) from None
    if name == "short" and not (value >= 1 and value.is_integer()):
        raise UserError(f"--clean {word}: must be a whole number of words, as in short=10")
    if name == "near" and not 0 < value <= 1:
        raise UserError(f"--clean {word}: must be a share above 0 and at most 1, as in near=0.8")
    return Step(name, value)


def changed(name: str, text: str, gap: str) -> str:
    if name == "html":
        return html.plain(text, gap)
    if name == "unicode":
        return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
    return CONTROL.sub("", text)


def dropping(step: Step) -> Callable[[str], bool]:
    """A function that says whether to drop a text; it may remember those it was asked before."""
    if step.name == "short":
        assert step.number is not None
        most = step.number
        return lambda text: count_words(text) <= most
    if step.name == "duplicates":
        return Duplicates()
    assert step.number is not None
    return NearDuplicates(step.number)


def count_words(text: str) -> int:
    """Words separated by white space; where a script has none between words, by its characters."""
    if text.isascii():
        return len(text.split())
    letters, unspaced = len(LETTER_WORDS.findall(text)), len(UNSPACED.findall(text))
    if not letters and not unspaced:
        return len(text.split())
    rest = UNSPACED.sub(" ", LETTER_WORDS.sub(" ", text)).split()
    return letters + -(-unspaced // 4) + sum(any(c.isalnum() for c in word) for word in rest)


class Duplicates:
    """Whether a text was seen before, by 8 bytes of a hash: 97 % to tell a billion apart."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, text: str) -> bool:
        digest = blake2b(" ".join(text.split()).encode("utf-8", "replace"), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        known = key in self.seen
        self.seen.add(key)
        return known
