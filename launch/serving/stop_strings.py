"""Stop strings: text that ends before the first of them, though it comes in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """Passes text on, but holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._starts = [stop[:length] for stop in self._stops for length in range(1, len(stop))]
        self._held = ""
        self.found = False
        """Whether a stop string came."""

    def push(self, piece: str) -> str:
        """The text that may be shown after this piece."""
        self._held += piece
        places = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            return self._release(min(places))
        return self._release(len(self._held) - self._open_length())

    def rest(self) -> str:
        """What was held back, once no more text comes."""
        return "" if self.found else self._release(len(self._held))

    def _open_length(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        return max((len(start) for start in self._starts if self._held.endswith(start)), default=0)

    def _release(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown
