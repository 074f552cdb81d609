"""The steps of --clean: parsing them, and what each does to one text."""

from __future__ import annotations

import html
import importlib.metadata
import itertools
import math
import re
import unicodedata
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.core.flags import nearest_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np

NUM_HASHES = 128
"""Hashes of a text. The share of equal ones estimates the Jaccard index, standard error at most 0.044."""
MIN_RECALL = 0.97
"""The share of the pairs exactly at the threshold that the buckets must find."""
_WORD = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]|\\w+")


def require_datasketch() -> str:
    """The version of datasketch, read without importing it: another version may hash differently.

    Raises UserError where it is not installed.
    """
    need("datasketch", "--clean near")
    return importlib.metadata.version("datasketch")


class NearDuplicates:
    """Says of each text whether it is a near-duplicate of an earlier one that was not.

    It is if the Jaccard index of their word pairs (pairs in both texts over pairs in either), estimated by
    MinHash, is at least `threshold`.
    """

    def __init__(self, threshold: float) -> None:
        require_datasketch()
        from datasketch import MinHash, MinHashLSH

        self.threshold = threshold
        self.empty_minhash = MinHash(num_perm=NUM_HASHES, hashfunc=zlib.crc32)
        self.buckets = MinHashLSH(num_perm=NUM_HASHES, params=choose_bands(threshold))
        self.kept: list[np.ndarray] = []

    def __call__(self, text: str) -> bool:
        minhash: Any = self.empty_minhash.copy()
        minhash.update_batch(word_pairs(text))
        for number in self.buckets.query(minhash):
            if (self.kept[number] == minhash.hashvalues).mean() >= self.threshold:
                return True
        self.buckets.insert(len(self.kept), minhash, check_duplication=False)
        self.kept.append(minhash.hashvalues)
        return False


def word_pairs(text: str) -> list[bytes]:
    """The pairs of neighbouring words, lower case, each once; every Han or kana character is a word.

    A text of one word gives that text.
    """
    words = _WORD.findall(text.lower())
    return [f"{a} {b}".encode() for a, b in set(itertools.pairwise(words))] or [text.strip().encode()]


def choose_bands(threshold: float) -> tuple[int, int]:
    """(bands, hashes in each): the longest bands that find pairs at the threshold with MIN_RECALL.

    Two texts share some bucket with probability 1 - (1 - threshold^hashes)^bands.
    """
    candidates = [(NUM_HASHES // r, r) for r in range(1, NUM_HASHES // 2 + 1)]
    return max(
        (c for c in candidates if 1 - (1 - threshold ** c[1]) ** c[0] >= MIN_RECALL),
        key=lambda c: c[1],
        default=candidates[0],
    )


MAX_BLOCK_CHARACTERS = 1 << 20
"""A script, style or comment that is not closed within so many characters is kept as text."""

_BLOCK_NAMES = """address article aside blockquote body br caption center dd details dialog div dl dt fieldset
figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav ol optgroup
option p pre section summary table tbody td tfoot th thead title tr ul"""
_BLOCK_ELEMENTS = frozenset(_BLOCK_NAMES.split())
"""Elements that end a line."""
_INLINE_NAMES = """a abbr acronym applet area audio b base basefont bdi bdo big button canvas cite code col
colgroup data datalist del dfn dir em embed font frame frameset i iframe img input ins kbd label link map
mark marquee meta meter noframes noscript object output param path picture progress q rp rt ruby s samp
script select slot small source span strike strong style sub sup svg template textarea time track tt u
var video wbr"""
_ELEMENTS = _BLOCK_ELEMENTS | frozenset(_INLINE_NAMES.split())
_LINE_BREAK = "\0"
"""Stands where an element ends a line, until the text is put together."""
_TAG = re.compile(r"""</?([a-zA-Z][a-zA-Z0-9]*)(?:[\s/](?:"[^"]*"|'[^']*'|[^<>"'])*)?>""")
_REMOVED_START = re.compile(r"<(script|style)\b[^<>]*>|<(!--)", re.I)
_REMOVED_END = {
    "script": re.compile(r"</script\s*>", re.I),
    "style": re.compile(r"</style\s*>", re.I),
    "!--": re.compile("-->"),
}
_DECLARATION = re.compile(r"<!doctype\b[^<>]*>|<\?xml\b[^<>]*>", re.I)
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")


def to_text(text: str, line_break: str = "\n") -> str:
    """The text that a browser would show; `line_break` is written where an element ends a line."""
    found = text
    if "<" in text:
        found = _TAG.sub(_replace_tag, _DECLARATION.sub("", _split_blocks(text)[0]))
        if _LINE_BREAK in found:
            found = _collapse_spaces(found).replace(_LINE_BREAK, line_break)
    return _ENTITY.sub(_decode_entity, found) if "&" in found else found


def _replace_tag(tag: re.Match[str]) -> str:
    name = tag[1].lower()
    return tag[0] if name not in _ELEMENTS else _LINE_BREAK if name in _BLOCK_ELEMENTS else ""


def _collapse_spaces(text: str) -> str:
    """The text without empty lines, and with single spaces between words."""
    lines = (" ".join(line.split()) for line in text.replace("\n", _LINE_BREAK).split(_LINE_BREAK))
    return _LINE_BREAK.join(line for line in lines if line)


def _decode_entity(entity: re.Match[str]) -> str:
    return html.unescape(entity[0]).replace("\xa0", " ")


def remove_blocks(chunks: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (text without scripts, styles and comments; those that were removed) for chunks of a stream.

    A block that is still open at the end of a chunk is kept back until the next.
    """
    pending = ""
    for chunk in chunks:
        text, blocks = _split_blocks(pending + chunk)
        pending = ""
        unclosed = _REMOVED_START.search(text)
        if unclosed is not None and len(text) - unclosed.start() < MAX_BLOCK_CHARACTERS:
            # Keep back its whole line, so that the lines that are yielded are whole.
            start = text.rfind("\n", 0, unclosed.start()) + 1
            text, pending = text[:start], text[start:]
        yield text, blocks
    if pending:
        yield pending, []


def _split_blocks(text: str) -> tuple[str, list[str]]:
    """(the text without scripts, styles and comments that are closed; those).

    A closing tag that was searched for in vain is not searched for again, so that the time stays linear.
    """
    if "<" not in text:
        return text, []
    kept, blocks, position, unclosed = [], [], 0, set()
    for opening in _REMOVED_START.finditer(text):
        kind = (opening[1] or opening[2]).lower()
        if opening.start() >= position and kind not in unclosed:
            closing = _REMOVED_END[kind].search(text, opening.end())
            if closing is None:
                unclosed.add(kind)
            else:
                kept.append(text[position : opening.start()])
                blocks.append(text[opening.start() : closing.end()])
                position = closing.end()
    return "".join([*kept, text[position:]]), blocks


TRANSFORMS = ("html", "unicode", "control")
"""Steps that change texts."""
FILTERS = ("short", "duplicates", "near")
"""Steps that drop whole texts."""
NUMBERS: dict[str, tuple[float, Callable[[float], bool], str]] = {
    "short": (10.0, lambda n: n >= 1 and n.is_integer(), "a whole number of words, as in short=10"),
    "near": (0.8, lambda n: 0 < n <= 1, "a share above 0 and at most 1, as in near=0.8"),
}
"""Step -> its usual number, which others it takes, and what is said of those that it does not."""
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
    if name not in NUMBERS:
        if equals:
            raise UserError(f"--clean {word}: {name} takes no number")
        return CleaningStep(name)
    value, is_allowed, what = NUMBERS[name]
    if equals:
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not is_allowed(value):
            raise UserError(f"--clean {word}: must be {what}")
    return CleaningStep(name, value)


def transform(name: str, text: str, line_break: str) -> str:
    """The text after a step of TRANSFORMS; `line_break` is written where an HTML element ends a line."""
    if name == "html":
        return to_text(text, line_break)
    if name == "unicode":
        return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
    return CONTROL.sub("", text)


def make_filter(step: CleaningStep) -> Callable[[str], bool]:
    """A function that says whether a step of FILTERS drops a text; `duplicates` and `near` remember texts."""
    if step.number is None:
        return ExactDuplicates()
    if step.name == "near":
        return NearDuplicates(step.number)
    most_words = step.number
    return lambda text: count_words(text) <= most_words


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
