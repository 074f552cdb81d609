"""The recommender's demo: made-up loans of a library, in which the texts of readers and books predict taste.

All is drawn as whole numbers from a seeded generator, so that every machine makes the same data.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from isobatch.data.interactions.formats import ItemText, RawInteractions
from isobatch.data.interactions.tables import Table

READERS, BOOKS, LOANS = 600, 400, 24
"""LOANS is the average number of loans of a reader."""
GENRES = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Of each the `name`, `words` of its books, and `jobs`: the occupations of its readers."""
TITLE_PATTERNS = ["The {} and the {}", "A {} without {}", "{} of the {}", "Notes on {} and {}"]
TITLE_PATTERNS += ["The last {}, the {}"]
AGES = ("young", "middle-aged", "old")


def demo_interactions() -> RawInteractions:
    """600 readers, 400 books; three loans of four are of the reader's two genres; a few books are popular."""
    import pyarrow as pa

    rng = np.random.Generator(np.random.PCG64(0))
    genre = rng.integers(len(GENRES), size=BOOKS)
    taste = rng.integers(len(GENRES), size=(READERS, 2))
    user = np.repeat(np.arange(READERS), rng.integers(LOANS // 2, LOANS * 3 // 2 + 1, size=READERS))
    kind = np.where(
        rng.integers(4, size=len(user)) > 0,
        taste[user, rng.integers(2, size=len(user))],
        rng.integers(len(GENRES), size=len(user)),
    )
    books_of_genre = [np.flatnonzero(genre == g) for g in range(len(GENRES))]
    # The least of three draws makes the first books of each genre the popular ones.
    position = rng.integers(1 << 16, size=(len(user), 3)).min(1)
    item = np.array(
        [books_of_genre[k][len(books_of_genre[k]) * p >> 16] for k, p in zip(kind, position, strict=True)]
    )
    made = pa.table({"user": user, "item": item, "time": rng.permutation(len(user))})
    table = Table("demo", dict(zip(made.column_names, made.column_names, strict=True)), made.to_batches)
    jobs = ((GENRES[one]["jobs"][rng.integers(2)], AGES[rng.integers(len(AGES))]) for one, _ in taste)
    readers = {str(reader): f"{age} {job}" for reader, (job, age) in enumerate(jobs)}
    found = RawInteractions({"all": table}, readers)
    for book, number in enumerate(genre):
        pattern, words = TITLE_PATTERNS[rng.integers(len(TITLE_PATTERNS))], GENRES[number]["words"]
        title = pattern.format(*(words[w] for w in rng.choice(8, 2, replace=False)))
        shown = title[0].upper() + title[1:]
        found.items[str(book)] = ItemText(shown, f"{shown}. {GENRES[number]['name']}")
    return found
