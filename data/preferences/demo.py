"""The demo: functions of Python's standard library, whose lines are in order or turned round."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from isobatch.data import corpora
from isobatch.data.corpora import RowCorpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LINES = 4
"""Lines of an answer."""
_HEADER = re.compile(r"^ *def .*:$")


def demo_pairs() -> RowCorpus:
    """Pairs with the head of a function as prompt: its next lines are chosen, the same turned round rejected.

    Of every other file; every tenth of those is validation.
    """
    files = corpora.demo_files()[::2]
    valid = files[9::10]
    train = [file for file in files if file not in valid]
    splits = {name: partial(_pairs_of_files, part) for name, part in (("train", train), ("valid", valid))}
    return RowCorpus(splits, ("prompt", "chosen", "rejected"))


def _pairs_of_files(files: list[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in files:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        for number, line in enumerate(lines):
            body = lines[number + 1 : number + 1 + LINES]
            if _HEADER.match(line) and len(body) == LINES:
                chosen, rejected = ("".join(f"\n{one}" for one in way) for way in (body, body[::-1]))
                where = f"{file.name} line {number + 1}"
                yield where, {"prompt": line, "chosen": chosen, "rejected": rejected}
