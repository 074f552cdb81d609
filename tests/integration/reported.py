"""Inputs as users report them: files, a command, and what comes of it: the right result or a right sentence.

A test builds the files anew; the command is a process of its own with a cache of its own, so that what was
prepared, or half prepared, is seen.
"""

from __future__ import annotations

import atexit
import functools
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from tokenizers import Tokenizer

from isobatch.tests.integration.helpers import launch, run_code

if TYPE_CHECKING:
    import subprocess

File = str | bytes | pa.Table
CAUSAL = "prepare --task causal-lm --data {data} --model {models}/qwen2 --max-length 200"
CLASSES = "prepare --task classifier --data {data} --model {models}/bert --max-length 64"
PAIRS = "prepare --task dpo --data {data} --model {models}/qwen2 --max-length 200"
SHOP = "prepare --task recommender --data {data}"
COLOURS = ("red", "green", "blue", "bad")
STORED = (("tokens", "learn"), ("chosen", "chosen.learn"), ("rejected", "rejected.learn"))
"""Columns of prepared texts, and what is learnt of them."""


@dataclass(frozen=True)
class Taken:
    """What a command makes of an input that it reads."""

    samples: int | None = None
    """Of all splits together."""
    labels: tuple[str, ...] = ()
    facts: Mapping[str, int] = field(default_factory=dict)
    """Numbers that the prepared data names, such as its items and how many of them have a text."""
    learnt: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    """Stands in the samples, not learnt."""
    unlearnt: tuple[str, ...] = ()
    """Is learnt nowhere."""
    said: tuple[str, ...] = ()
    """Patterns, each found in a line of the command's output."""


@dataclass(frozen=True)
class Case:
    """One input. Where it may be taken as well as refused, both outcomes are given."""

    files: Mapping[str, File]
    words: str
    taken: Taken | None = None
    refused: tuple[str, ...] = ()
    """Patterns that the one line of a refusal has."""
    unsaid: tuple[str, ...] = ()


def jsonl(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv(rows: list[Any], header: str = "text,label", mark: str = ",") -> str:
    return "\n".join([header, *(mark.join(map(str, row)) for row in rows)]) + "\n"


def text(n: int) -> str:
    """A text that no other row has."""
    return f"the {COLOURS[n % 4]} cat sat mark{n:02d}x"


def texts(count: int) -> tuple[str, ...]:
    """What tells each of these texts."""
    return tuple(f"mark{n:02d}x" for n in range(count))


def ask(n: int) -> str:
    return f"what is ask{n:02d}x"


def say(n: int) -> str:
    return f"the {COLOURS[n % 4]} say{n:02d}x"


def turns(*pairs: tuple[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Messages of (role, content)."""
    return [{"role": role, "content": content, **more} for role, content in pairs]


def clicks(items: int = 15, of_each: int = 6) -> list[tuple[int, int, int]]:
    """(user, item, time) of 12 users; each of 15 items is taken by somebody."""
    return [
        (user, (user * 5 + k * 2) % items if items == 15 else k, 1_700_000_000 + user * 100 + k)
        for user in range(12)
        for k in range(of_each)
    ]


def interactions(rows: list[Any], header: str = "user_id,item_id,timestamp") -> str:
    return csv(rows, header)


def titles(names: list[Any], header: str = "item_id,title") -> str:
    return csv([(name, f"book {name}") for name in names], header)


@functools.cache
def tiny_models() -> Path:
    """The folder of models, made once for all tests of this process."""
    made = tempfile.TemporaryDirectory(prefix="models-")
    atexit.register(made.cleanup)
    build = "import sys; from isobatch.tests.tiny_models import build; build(sys.argv[1])"
    done = run_code(build, made.name, cwd=Path(made.name))
    assert done.returncode == 0, done.stderr
    return Path(made.name)


def write(files: Mapping[str, File], folder: Path) -> Path:
    """Make the files; returns what --data names: the only file, or the folder of several."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, pa.Table):
            parquet.write_table(content, folder / name)
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / next(iter(files)) if len(files) == 1 else folder


def run(case: Case, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in an empty folder `work`, with an empty cache beside it."""
    data = write(case.files, folder / "data")
    (folder / "work").mkdir()
    values = {"data": data, "folder": folder / "data", "models": tiny_models()}
    words = [word.format(**values) for word in case.words.split()]
    return launch(*words, cwd=folder / "work", ISOBATCH_CACHE=str(folder / "cache"))


def check(case: Case, folder: Path) -> None:
    """Run it and compare what comes of it."""
    before = sorted(case.files)
    done = run(case, folder)
    out = (done.stdout + done.stderr).replace(str(folder), "").replace(str(tiny_models()), "")
    assert "Traceback" not in out, out
    for pattern in case.unsaid:
        assert not re.search(pattern, out, re.IGNORECASE), out
    if case.taken is None or (done.returncode == 2 and case.refused):
        _check_refused(case, done, out, folder)
    else:
        assert done.returncode == 0, out
        _check_taken(case.taken, out, folder)
    assert sorted(p.name for p in (folder / "data").iterdir()) == before


def _check_refused(case: Case, done: subprocess.CompletedProcess[str], out: str, folder: Path) -> None:
    assert done.returncode == 2, f"exit {done.returncode}: {out}"
    sentences = [line for line in out.splitlines() if line.startswith("isobatch: ")]
    assert len(sentences) == 1, out
    for pattern in case.refused:
        assert re.search(pattern, sentences[0], re.IGNORECASE), f"{pattern!r} is not in: {sentences[0]}"
    assert list((folder / "work").iterdir()) == []
    assert [p for p in folder.glob("cache/prepared/*") if p.is_dir()] == []


def _check_taken(taken: Taken, out: str, folder: Path) -> None:
    for pattern in taken.said:
        found = any(re.search(pattern, line, re.IGNORECASE) for line in out.splitlines())
        assert found, f"{pattern!r} is in no line of: {out}"
    prepared = [p.parent for p in folder.glob("cache/prepared/*/facts.json")]
    assert len(prepared) == 1, out
    facts = json.loads((prepared[0] / "facts.json").read_text())
    if taken.samples is not None:
        assert sum(facts["samples"].values()) == taken.samples, (facts["samples"], out)
    if taken.labels:
        found = [str(label).casefold() for label in facts["extra"]["labels"]]
        assert found == [label.casefold() for label in taken.labels], out
    assert {name: facts["extra"][name] for name in taken.facts} == taken.facts, out
    if taken.learnt or taken.read or taken.unlearnt:
        learnt, other = stored_texts(prepared[0])
        assert [part for part in taken.learnt if part not in learnt] == [], out
        assert [part for part in taken.read if part not in other or part in learnt] == [], out
        assert [part for part in taken.unlearnt if part in learnt] == [], out


def stored_texts(folder: Path) -> tuple[str, str]:
    """(what is learnt, all other text) of the prepared texts of all splits; of plain text all is learnt."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts: dict[bool, list[str]] = {True: [], False: []}
    for index in folder.glob("*/index.json"):
        for tokens, learn in STORED:
            if (ids := _column(index.parent, tokens)) is None:
                continue
            mask = _column(index.parent, learn)
            mask = np.ones(len(ids), bool) if mask is None else mask.astype(bool)
            for piece in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1):
                parts[bool(mask[piece[0]])].append(tokenizer.decode(ids[piece].tolist()))
    return "|".join(parts[True]), "|".join(parts[False])


def _column(folder: Path, name: str) -> np.ndarray | None:
    files = [folder / f"{name}-values.npy", folder / f"{name}.npy"]
    return next((np.load(file).ravel() for file in files if file.exists()), None)
