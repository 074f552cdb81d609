"""The cleaning of --clean: changes and drops texts before they are tokenized, and counts both.

The steps, in this order whatever order was typed: `html` (tags, scripts, entities), `unicode` (NFC),
`control` (control and zero-width characters), `short=10` (texts of so many words or fewer), `duplicates`
(white space aside). Duplicates are looked for within a split, and of conversations and documents in training
also among those held out, which stay: a metric of texts that were learnt says nothing. In a .txt file every
line counts as a text.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.core.package import table_beside
from isobatch.data.chat_formats import THOUGHT, Message
from isobatch.data.preparation.encoding import text_hash

CLEANING_VERSION = 2
"""Part of the cache key: raise it when the same texts come out differently."""
MAX_BLOCK_CHARACTERS = 1 << 20
"""A script, style or comment that is not closed within so many characters is kept as text."""

_HTML = table_beside(__file__, "html_elements")
_BLOCK_ELEMENTS = frozenset(_HTML["block"].split())
"""Elements that end a line."""
_ELEMENTS = _BLOCK_ELEMENTS | frozenset(_HTML["inline"].split())
_LINE_BREAK = "\0"
"""Stands where an element ends a line, until the text is put together."""
_TAG = re.compile(r"""</?([a-zA-Z][a-zA-Z0-9]*)(?:[\s/](?:"[^"]*"|'[^']*'|[^<>"'])*)?>""")
_REMOVED_START = re.compile(r"<(script|style)\b[^<>]*>|<(!--)", re.I)
_REMOVED_END = {kind: re.compile(rf"</{kind}\s*>", re.I) for kind in ("script", "style")}
_REMOVED_END["!--"] = re.compile("-->")
_DECLARATION = re.compile(r"<!doctype\b[^<>]*>|<\?xml\b[^<>]*>", re.I)
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")


def to_text(text: str, line_break: str = "\n") -> str:
    """The text that a browser would show; `line_break` is written where an element ends a line."""
    found = text
    if "<" in text:
        found = _TAG.sub(_replace_tag, _DECLARATION.sub("", _without_blocks(text)))
        if _LINE_BREAK in found:  # no empty lines, and single spaces between words
            lines = (" ".join(line.split()) for line in found.replace("\n", _LINE_BREAK).split(_LINE_BREAK))
            found = line_break.join(filter(None, lines))
    return _ENTITY.sub(lambda e: html.unescape(e[0]).replace("\xa0", " "), found) if "&" in found else found


def _replace_tag(tag: re.Match[str]) -> str:
    name = tag[1].lower()
    return tag[0] if name not in _ELEMENTS else _LINE_BREAK if name in _BLOCK_ELEMENTS else ""


def remove_blocks(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the chunks of a stream without HTML scripts, styles and comments, which may span lines.

    A block that is still open at the end of a chunk is kept back until the next.
    """
    pending = ""
    for chunk in chunks:
        text, pending = _without_blocks(pending + chunk), ""
        unclosed = _REMOVED_START.search(text)
        if unclosed is not None and len(text) - unclosed.start() < MAX_BLOCK_CHARACTERS:
            # Keep back its whole line, so that the lines that are yielded are whole.
            start = text.rfind("\n", 0, unclosed.start()) + 1
            text, pending = text[:start], text[start:]
        yield text
    if pending:
        yield pending


def _without_blocks(text: str) -> str:
    """The text without scripts, styles and comments that are closed.

    A closing tag that was searched for in vain is not searched for again, so that the time stays linear.
    """
    if "<" not in text:
        return text
    kept, position, unclosed = [], 0, set()
    for opening in _REMOVED_START.finditer(text):
        kind = (opening[1] or opening[2]).lower()
        if opening.start() >= position and kind not in unclosed:
            closing = _REMOVED_END[kind].search(text, opening.end())
            if closing is None:
                unclosed.add(kind)
            else:
                kept.append(text[position : opening.start()])
                position = closing.end()
    return "".join([*kept, text[position:]])


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


def count_words(text: str) -> int:
    """Words separated by white space; of scripts without spaces they are estimated from the characters."""
    if text.isascii():
        return len(text.split())
    letters, unspaced = len(CHARACTER_WORDS.findall(text)), len(UNSPACED_SCRIPTS.findall(text))
    if not letters and not unspaced:
        return len(text.split())
    rest = UNSPACED_SCRIPTS.sub(" ", CHARACTER_WORDS.sub(" ", text)).split()
    return letters + -(-unspaced // 4) + sum(any(c.isalnum() for c in word) for word in rest)


TRANSFORMS: dict[str, Callable[[str, str], str]] = {
    "html": to_text,
    "unicode": lambda text, _: unicodedata.normalize("NFC", text),
    "control": lambda text, _: CONTROL.sub("", text),
}
"""Steps that change texts."""
STEPS = (*TRANSFORMS, "short", "duplicates")
"""All of them, in the order in which they run; the last two drop whole texts."""
SHORT_WORDS = 10


@dataclass(frozen=True, slots=True)
class CleaningStep:
    """One step of --clean."""

    name: str
    most_words: int = 0
    """Of a text that `short` drops; other steps have no number."""

    def __str__(self) -> str:
        return f"{self.name}={self.most_words}" if self.most_words else self.name


def parse_steps(words: Sequence[str]) -> tuple[CleaningStep, ...]:
    """The steps that --clean names, in the order in which they run.

    Raises UserError for an unknown step, one that is named twice, or a wrong number.
    """
    found: dict[str, CleaningStep] = {}
    for word in map(str.strip, words):
        name, equals, number = word.partition("=")
        if name not in STEPS:
            hint = nearest_hint(name, STEPS)
            raise UserError(f"--clean {word}: there is no such step{hint}; steps: {', '.join(STEPS)}")
        if name in found:
            raise UserError(f"--clean {','.join(words)}: {name} is named twice")
        if equals and not (name == "short" and number.isdecimal() and int(number)):
            raise UserError(f"--clean {word}: only short takes a number, a whole one, as in short=10")
        found[name] = CleaningStep(name, int(number or SHORT_WORDS) if name == "short" else 0)
    return tuple(found[name] for name in STEPS if name in found)


class CleaningPipeline:
    """Runs the steps over the texts of one split after another. `unit` is what notes call a text."""

    def __init__(self, steps: Sequence[CleaningStep], unit: str = "texts") -> None:
        self.steps, self.unit = {step.name: step for step in steps}, unit
        self.seen, self.affected = Counter[str](), Counter[str]()
        """Step -> texts that it saw, that it changed or dropped."""

    def transforms_only(self) -> CleaningPipeline:
        """A pipeline without the steps that drop texts, with its own counts; for training a tokenizer."""
        return CleaningPipeline([s for s in self.steps.values() if s.name in TRANSFORMS], self.unit)

    def clean_texts(self, texts: Iterable[str], held_out: Iterable[str] = ()) -> Iterator[str]:
        """The documents that are kept, cleaned; `duplicates` drops those in `held_out`."""
        is_kept = self._filter(map(self.transforms_only().transform_text, held_out))
        for text in texts:
            changed = self.transform_text(text)
            if changed.strip() and is_kept(changed):
                yield changed

    def clean_lines(self, chunks: Iterable[str]) -> Iterator[str]:
        """The lines of a stream that are kept, cleaned; `chunks` are whole lines.

        Blank lines that follow a dropped line are dropped with it.
        """
        is_kept = self._filter(())
        dropped = False
        for chunk in remove_blocks(chunks) if "html" in self.steps else chunks:
            kept = []
            for line in re.findall("[^\n]*\n|[^\n]+", chunk):
                if line.isspace():
                    kept += [] if dropped else [line]
                    continue
                changed = self.transform_text(line.removesuffix("\n"), " ")
                dropped = not changed.strip() or not is_kept(changed)
                kept += [] if dropped else [changed + "\n" * line.endswith("\n")]
            if kept:
                yield "".join(kept)

    def conversation_cleaner(
        self, held_out: Iterable[list[Message]] = ()
    ) -> Callable[[list[Message]], list[Message] | None]:
        """A function for the conversations of one split: their cleaned messages, or None to drop them.

        `duplicates` drops those in `held_out`; `short` does not apply.
        """
        silent = self.transforms_only()
        known = (_whole(silent.transform(one)) for one in held_out)
        is_kept = self._filter(known, has_short=False)

        def clean(messages: list[Message]) -> list[Message] | None:
            changed = self.transform(messages)
            return changed if is_kept(_whole(changed)) else None

        return clean

    def transform(self, messages: list[Message]) -> list[Message]:
        """A conversation after the steps that change texts."""
        texts = ("content", "input", THOUGHT)
        return [{k: self.transform_text(v) if k in texts else v for k, v in m.items()} for m in messages]

    def transform_text(self, text: str, line_break: str = "\n") -> str:
        """The text after the steps that change texts; `line_break` replaces the end of an HTML block."""
        for name, transform in TRANSFORMS.items():
            if name in self.steps:
                changed = transform(text, line_break)
                self._count(name, changed != text)
                text = changed
        return text

    def _count(self, step: str, is_affected: bool) -> bool:
        """Whether a step changed or dropped a text, which is counted."""
        self.seen[step] += 1
        self.affected[step] += is_affected
        return is_affected

    def _filter(self, known: Iterable[str], has_short: bool = True) -> Callable[[str], bool]:
        """A function that says whether a text is kept; to be called once for each text of a split.

        `known`: cleaned texts that count as seen; read only where duplicates are looked for.
        """
        most_words = self.steps["short"].most_words if has_short and "short" in self.steps else 0
        # 8 bytes of a hash of each: among a billion different texts the chance of any collision is 3 %.
        seen = set(map(_hash, known)) if "duplicates" in self.steps else None

        def is_kept(text: str) -> bool:
            if most_words and self._count("short", count_words(text) <= most_words):
                return False
            if seen is None:
                return True
            key = _hash(text)
            is_known = self._count("duplicates", key in seen)
            seen.add(key)
            return not is_known

        return is_kept

    def notes(self) -> Iterator[str]:
        """What each step did, one line each."""
        for name, step in self.steps.items():
            changes = name in TRANSFORMS
            unit = "fields" if changes and self.unit == "conversations" else self.unit
            counts = f"{self.affected[name]:,} of {self.seen[name]:,}"
            yield f"clean {step}: {counts} {unit} {'changed' if changes else 'dropped'}"


def _hash(text: str) -> int:
    return text_hash(" ".join(text.split()))


def _whole(messages: list[Message]) -> str:
    """All that is said in a conversation."""
    return "\n".join(str(v) for m in messages for k, v in m.items() if k != "role" and v)
