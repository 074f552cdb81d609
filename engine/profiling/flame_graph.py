"""Folded stacks and the flame graph made of them: an SVG file that needs no script and no network."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from isobatch.core.measures import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WIDTH, ROW, CHARACTER = 1200, 18, 6.6
"""Pixels of the picture, of a row, and of a letter."""
LEAST = 0.0005
"""Share of the whole below which a box is not drawn."""
Stacks = dict[tuple[str, ...], float]
"""Names from the outermost to the innermost -> seconds of the innermost itself."""


@dataclass(slots=True)
class _Box:
    seconds: float = 0.0
    inner: dict[str, _Box] = field(default_factory=dict)


def folded_text(stacks: Mapping[tuple[str, ...], float]) -> str:
    """Brendan Gregg's folded format: `outer;inner microseconds` a line; other tools draw it, too."""
    lines = [
        f"{';'.join(name.replace(';', ':') for name in stack)} {round(seconds * 1e6)}"
        for stack, seconds in sorted(stacks.items())
        if seconds >= 1e-6
    ]
    return "".join(f"{line}\n" for line in lines)


def flame_graph(stacks: Mapping[tuple[str, ...], float], title: str) -> str:
    """The flame graph as SVG: the outermost at the top, widths as seconds. A box tells its share."""
    root = _Box()
    for stack, seconds in stacks.items():
        box = root
        box.seconds += seconds
        for name in stack:
            box = box.inner.setdefault(name, _Box())
            box.seconds += seconds
    boxes = list(_boxes(root, 0.0, 0, max(root.seconds, 1e-12)))
    height = ROW * (3 + max((level for _, _, level, _, _ in boxes), default=0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' font-family="monospace" font-size="11"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
        f'<text x="4" y="14">{escape(printable(title))}</text>'
    ]
    for left, width, level, name, seconds in boxes:
        text = escape(printable(name))
        share = seconds / max(root.seconds, 1e-12)
        shown = printable(name)[: max(0, int(width / CHARACTER) - 1)]
        top = ROW * (level + 1)
        parts.append(
            f'<g><title>{text}: {seconds * 1e3:.3g} ms, {share:.1%}</title><rect x="{left:.1f}" y="{top}"'
            f' width="{width:.1f}" height="{ROW - 1}" fill="{_colour(name)}" rx="1"/>'
            f'<text x="{left + 2:.1f}" y="{top + 13}">{escape(shown)}</text></g>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _boxes(
    box: _Box, left: float, level: int, whole: float
) -> Iterator[tuple[float, float, int, str, float]]:
    """(left, width, level, name, seconds) of every box within `box` that is wide enough to be seen."""
    for name, inner in sorted(box.inner.items()):
        width = WIDTH * inner.seconds / whole
        if inner.seconds >= LEAST * whole:
            yield left, width, level, name, inner.seconds
            yield from _boxes(inner, left, level + 1, whole)
        left += width


def _colour(name: str) -> str:
    """A warm colour that a name always has."""
    drawn = zlib.crc32(name.encode())
    return f"rgb({205 + drawn % 50},{110 + drawn // 50 % 110},{60 + drawn // 5500 % 60})"
