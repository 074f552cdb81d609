"""HTML out of text: scripts, styles, comments, tags of known elements, entities.

By known names, because other texts hold `<unk>`, `List<int>` and `a < b` too.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

LONGEST_BLOCK = 1 << 20
"""Characters after which a script that was not closed is taken for text."""

_NAMES = """address article aside blockquote body br caption center dd details dialog div dl dt fieldset
figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav ol optgroup
option p pre section summary table tbody td tfoot th thead title tr ul"""
_BREAKS = frozenset(_NAMES.split())
"""Elements that end a line."""
_NAMES = """a abbr acronym applet area audio b base basefont bdi bdo big button canvas cite code col
colgroup data datalist del dfn dir em embed font frame frameset i iframe img input ins kbd label link map
mark marquee meta meter noframes noscript object output param path picture progress q rp rt ruby s samp
script select slot small source span strike strong style sub sup svg template textarea time track tt u
var video wbr"""
_ELEMENTS = _BREAKS | frozenset(_NAMES.split())
_END = "\0"
"""Where an element ended a line."""
_TAG = re.compile(r"""</?([a-zA-Z][a-zA-Z0-9]*)(?:[\s/](?:"[^"]*"|'[^']*'|[^<>"'])*)?>""")
_OPEN = re.compile(r"<(script|style)\b[^<>]*>|<(!--)", re.I)
_CLOSE = {
    "script": re.compile(r"</script\s*>", re.I),
    "style": re.compile(r"</style\s*>", re.I),
    "!--": re.compile("-->"),
}
_DECLARATION = re.compile(r"<!doctype\b[^<>]*>|<\?xml\b[^<>]*>", re.I)
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")


def plain(text: str, gap: str = "\n") -> str:
    """The text that a page shows; `gap` stands where an element ends a line."""
    found = text
    if "<" in text:
        found = _TAG.sub(_in_place, _DECLARATION.sub("", _cut(text)[0]))
        if _END in found:
            found = _tidy(found).replace(_END, gap)
    return _ENTITY.sub(_character, found) if "&" in found else found


def _in_place(tag: re.Match[str]) -> str:
    name = tag[1].lower()
    return tag[0] if name not in _ELEMENTS else _END if name in _BREAKS else ""


def _tidy(text: str) -> str:
    """A page's text with one end between two lines, and without the spaces that set out its source."""
    lines = (" ".join(line.split()) for line in text.replace("\n", _END).split(_END))
    return _END.join(line for line in lines if line)


def _character(entity: re.Match[str]) -> str:
    return html.unescape(entity[0]).replace("\xa0", " ")


def without_blocks(pieces: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """The pieces of a stream without scripts, styles and comments; and those that went, of each.

    What was opened and not closed waits for the next piece.
    """
    held = ""
    for piece in pieces:
        text, blocks = _cut(held + piece)
        held = ""
        unclosed = _OPEN.search(text)
        if unclosed is not None and len(text) - unclosed.start() < LONGEST_BLOCK:
            # From the beginning of its line, so that no line is cut in two.
            start = text.rfind("\n", 0, unclosed.start()) + 1
            text, held = text[:start], text[start:]
        yield text, blocks
    if held:
        yield held, []


def _cut(text: str) -> tuple[str, list[str]]:
    """The text without its closed blocks, and those. One search for what closes a kind fails at most."""
    if "<" not in text:
        return text, []
    kept, blocks, place, unclosed = [], [], 0, set()
    for begin in _OPEN.finditer(text):
        kind = (begin[1] or begin[2]).lower()
        if begin.start() >= place and kind not in unclosed:
            end = _CLOSE[kind].search(text, begin.end())
            if end is None:
                unclosed.add(kind)
            else:
                kept.append(text[place : begin.start()])
                blocks.append(text[begin.start() : end.end()])
                place = end.end()
    return "".join([*kept, text[place:]]), blocks
