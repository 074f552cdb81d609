"""The demo: short stories with plots, names and things that change, the same on every machine."""

from __future__ import annotations

import random
import re
from functools import partial
from typing import TYPE_CHECKING

from isobatch.data.corpora import Corpus

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = 1
"""Raised where a text changes."""
PROMPT = "Once upon a time"
STORIES = {"train": 9000, "valid": 500}
_SEEDS = {"train": 1, "valid": 2}

_WORDS = {
    "name": "Ada Ben Cleo Dan Ella Finn Greta Hugo Ida Jon Kira Leo Mia Nils Olga Pia Rosa Sam Tilda Will",
    "animal": "bear cat dog duck fox frog goat hare hen horse mouse owl",
    "kind": "brave clever funny gentle happy little quick quiet shy small young",
    "colour": "black blue brown golden green grey orange red silver white yellow",
    "thing": "ball bell boat book cup drum hat key kite lamp ring scarf spoon stone",
    "home": "by the sea|near the mill|in the forest|on a hill|by the lake|in an old tower|behind the school",
    "place": "under the bed|behind the door|in the garden|on the roof|in the barn|under the bridge",
    "time": "morning|afternoon|evening|cold day|sunny day|windy night",
    "food": "apples beans carrots cherries cookies grapes nuts pears plums tomatoes",
    "number": "two three four five six seven eight nine ten",
    "end": "They laughed until the moon came up.|From that day on they were friends."
    "|Then they went home and slept well.|And that is the end of the story.",
}
_BEGINNING = "Once upon a time there was a {kind} {animal} named {name}, who lived {home}."
_PLOTS = (
    "{name} had a {colour} {thing}. One {time} the {thing} was gone. {name} looked {place}, but"
    " found nothing."
    ' "I saw it {place2}," said {name2} the {animal2}. They ran, and there was the {colour} {thing}! {end}',
    '{name} wanted to share {food}. "I like {food}," said {name2} the {animal2}, "but I have {food2}."'
    " So {name} gave {name2} the {food}, and {name2} gave {name} the {food2}. {end}",
    'One {time} {name} met a {kind2} {animal2}. "Who are you?" asked {name}. "I am {name2}," said the'
    ' {animal2}, "and I look for my {colour} {thing}." It was {place}, and {name2} gave {name}'
    " {number} {food}. {end}",
    "{name} was afraid of the dark. One {time} {name2} the {animal2} brought a {colour} lamp and put it"
    ' {place}. "Now you can see," said {name2}. {name} was not afraid any more. {end}',
    "{name} built a {thing} for {name2} the {animal2}. It took {number} days. First it was {colour}, then it"
    ' was {colour2}. "A {colour2} {thing}!" said {name2}. "I will keep it {place}." {end}',
)
_SLOT = re.compile(r"\{([a-z]+)(2?)\}")


def demo_stories() -> Corpus:
    """Stories of both splits; each is a document. No story of `valid` is in `train`."""
    held_out = set(_stories("valid"))
    return Corpus(
        {
            "train": lambda: (story for story in _stories("train") if story not in held_out),
            "valid": partial(_stories, "valid"),
        }
    )


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
            drawn[kind, second] = _draw(draws, [word for word in _choices(kind) if word != taken])
        return drawn[kind, second]

    return _SLOT.sub(fill, f"{_BEGINNING} {_draw(draws, _PLOTS)}")


def _choices(kind: str) -> list[str]:
    words = _WORDS[kind]
    return words.split("|") if "|" in words else words.split()


def _draw(draws: random.Random, choices: list[str] | tuple[str, ...]) -> str:
    """`random()` alone is promised to stay as it is in later versions of Python."""
    return choices[int(draws.random() * len(choices))]
