"""The recommender's demo: a library whose readers have tastes that their and the books' words tell of.

Whole numbers from a seeded generator only, so that every machine makes the same.
"""

from __future__ import annotations

import numpy as np

from isobatch.data.interactions.formats import Found, Item

READERS, BOOKS, LOANS = 600, 400, 24
"""LOANS: on average, of each reader."""
GENRES = ("cooking", "crime", "fantasy", "gardens", "history", "poems", "science", "travel")
THINGS = {
    "cooking": "bread kitchen pepper table oven salt feast broth",
    "crime": "murder knife alibi detective corpse theft witness trial",
    "fantasy": "dragon sword wizard crown spell quest giant castle",
    "gardens": "rose hedge orchard seed spade moss pond lawn",
    "history": "empire king siege treaty bronze abbey revolt archive",
    "poems": "moon sorrow swallow silence autumn verse mirror shore",
    "science": "atom comet enzyme proof orbit neuron crystal wave",
    "travel": "harbour desert railway border island caravan monsoon map",
}
FORMS = ("The {} and the {}", "A {} without {}", "{} of the {}", "Notes on {} and {}", "The last {}, the {}")
JOBS = {
    "cooking": ("baker", "nurse"),
    "crime": ("clerk", "lawyer"),
    "fantasy": ("student", "programmer"),
    "gardens": ("teacher", "retired"),
    "history": ("teacher", "lawyer"),
    "poems": ("student", "nurse"),
    "science": ("engineer", "programmer"),
    "travel": ("engineer", "retired"),
}
"""The two trades that like a genre best."""
AGES = ("young", "middle-aged", "old")


def demo() -> Found:
    """600 readers, 400 books; three loans of four follow a reader's taste, most go to well-known books."""
    import pyarrow as pa

    draw = np.random.Generator(np.random.PCG64(0))
    genre = draw.integers(len(GENRES), size=BOOKS)
    taste = draw.integers(len(GENRES), size=(READERS, 2))
    counts = draw.integers(LOANS // 2, LOANS * 3 // 2 + 1, size=READERS)
    user = np.repeat(np.arange(READERS), counts)
    kind = np.where(
        draw.integers(4, size=len(user)) > 0,
        taste[user, draw.integers(2, size=len(user))],
        draw.integers(len(GENRES), size=len(user)),
    )
    shelves = [np.flatnonzero(genre == g) for g in range(len(GENRES))]
    # The lesser of three draws: the front of a shelf is lent most.
    place = draw.integers(1 << 16, size=(len(user), 3)).min(1)
    item = np.array([shelves[k][len(shelves[k]) * p >> 16] for k, p in zip(kind, place, strict=True)])
    time = draw.permutation(len(user))
    table = pa.table({"user": user, "item": item, "time": time})
    return Found({"all": table}, _readers(taste, draw), _books(genre, draw))


def _readers(taste: np.ndarray, draw: np.random.Generator) -> dict[str, str]:
    found = {}
    for reader, (first, _) in enumerate(taste):
        job = JOBS[GENRES[first]][draw.integers(2)]
        found[str(reader)] = f"{AGES[draw.integers(len(AGES))]} {job}"
    return found


def _books(genre: np.ndarray, draw: np.random.Generator) -> dict[str, Item]:
    found = {}
    for book, number in enumerate(genre):
        words = THINGS[GENRES[number]].split()
        title = FORMS[draw.integers(len(FORMS))].format(*(words[w] for w in draw.choice(8, 2, replace=False)))
        shown = title[0].upper() + title[1:]
        found[str(book)] = Item(shown, f"{shown}. {GENRES[number]}")
    return found
