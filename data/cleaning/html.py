"""HTML to plain text: removes scripts, styles, comments and the tags of known elements, decodes entities.

Only known elements count as tags, because texts also contain `<unk>`, `List<int>` and `a < b`.
"""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
