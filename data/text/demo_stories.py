"""The demo: short stories with plots, names and things that change, the same on every machine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from isobatch.data.corpora import Corpus

VERSION = 1
"""Raised where a text changes."""
PROMPT = "Once upon a time"
STORIES = {"train": 9000, "valid": 500}
_SEEDS = {"train": 1, "valid": 2}

_TEXTS = json.loads(Path(__file__).with_suffix(".json").read_text())
"""`words` of each kind, the `beginning` of all stories, and the `plots`, of which one follows."""
_SLOT = re.compile(r"\{([a-z]+)(2?)\}")


def demo_stories() -> Corpus:
    """Stories of both splits; each is a document. No story of `valid` is in `train`."""
    held_out = set(_stories("valid"))
    splits = {split: partial(_stories, split) for split in STORIES}
    return Corpus(splits | {"train": lambda: (s for s in _stories("train") if s not in held_out)})


def _stories(split: str) -> Iterator[str]:
    draws = random.Random(_SEEDS[split])
    return (_story(draws) for _ in range(STORIES[split]))


def _story(draws: random.Random) -> str:
    """One story: a word is drawn for a slot where it stands first; `{name2}` differs from `{name}`."""
    drawn: dict[tuple[str, str], str] = {}

    def fill(slot: re.Match[str]) -> str:
        kind, second = slot.groups()
        if (kind, second) not in drawn:
            taken = drawn.get((kind, "" if second else "2"))
            drawn[kind, second] = _draw(draws, [word for word in _TEXTS["words"][kind] if word != taken])
        return drawn[kind, second]

    return _SLOT.sub(fill, f"{_TEXTS['beginning']} {_draw(draws, _TEXTS['plots'])}")


def _draw(draws: random.Random, choices: list[str]) -> str:
    """`random()` alone is promised to stay as it is in later versions of Python."""
    return choices[int(draws.random() * len(choices))]
