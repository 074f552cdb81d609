"""Prepared data has the bytes and the facts that are recorded."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.recipe import Recipe
from isobatch.data.interactions.dataset import InteractionOptions, Interactions
from isobatch.data.labelled.dataset import Labelled, LabelledOptions
from isobatch.data.text.dataset import Text, TextOptions
from isobatch.engine.loading.prepare import prepare

if TYPE_CHECKING:
    from isobatch.core.facts import Facts
    from isobatch.data.base import Data

RECORDED = Path(__file__).parents[1] / "fixtures" / "prepared.json"
"""Case -> [fingerprint, hash of the facts without their notes], recorded before preparation was parallel."""
WORDS = """the film was Good bad long, short. naïve 东京 straße 🙂
don't 1,024 re-made x=y [SEP] <|endoftext|>""".split()  # noqa: SIM905


def sentences(seed: int, count: int, most: int = 30) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, most))) for _ in range(count)]


def write(folder: Path, name: str, lines: list[Any], ends: str = "\n") -> None:
    folder.mkdir(exist_ok=True)
    rows = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    (folder / name).write_text("".join(row + ends for row in rows), encoding="utf-8")


def parquet(folder: Path, name: str, columns: dict[str, list[Any]], rows: int = 40) -> None:
    import pyarrow as pa
    from pyarrow import parquet as writer

    folder.mkdir(exist_ok=True)
    writer.write_table(pa.table(columns), folder / name, row_group_size=rows)


def vocabulary(folder: Path, *words: str) -> str:
    """A WordPiece vocabulary of letters, some words and pieces."""
    letters = [chr(c) for c in range(33, 127)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters), *words]
    write(folder, "vocab.txt", tokens)
    return str(folder / "vocab.txt")


def text(folder: Path, max_length: int = 24, **options: Any) -> Data:
    recipe = Recipe(task="causal-lm", data=str(folder), max_length=max_length)
    return Text(recipe, TextOptions(**{"vocab_size": 400, **options}))


def labelled(folder: Path, tokenizer: str | None = None, **options: Any) -> Data:
    recipe = Recipe(task="classifier", data=str(folder), max_length=12, tokenizer=tokenizer)
    return Labelled(recipe, LabelledOptions(**{"vocab_size": 300, **options}))


def interactions(folder: Path, **options: Any) -> Data:
    recipe = Recipe(task="recommender", data=str(folder), max_length=12)
    return Interactions(recipe, InteractionOptions(**{"vocab_size": 300, "eval_negatives": 5, **options}))


def running_text(folder: Path) -> Path:
    lines = [f"{line}{'  ' * (n % 3)}\n{chr(10) * (n % 7 == 0)}" for n, line in enumerate(sentences(1, 4000))]
    write(folder, "train.txt", lines, ends="")
    write(folder, "valid.txt", lines[:90], ends="")
    return folder


def documents(folder: Path) -> Path:
    found = sentences(2, 900)
    write(folder, "train.jsonl", [{"text": t, "n": n} for n, t in enumerate([*found, "", " "])])
    write(folder, "test.jsonl", [{"text": t} for t in [*found[:20], *sentences(3, 40)]])
    return folder


def instructions(folder: Path) -> Path:
    asked, answers = sentences(4, 300), sentences(5, 300, most=12)
    rows = [
        {"instruction": q, "input": q[::-1] if n % 5 == 0 else "", "output": a}
        for n, (q, a) in enumerate(zip(asked, answers, strict=True))
    ]
    write(folder, "train.jsonl", [*rows, {"instruction": "why", "output": ""}])
    write(folder, "valid.jsonl", [*rows[:9], *({"instruction": q, "output": "no"} for q in sentences(6, 20))])
    return folder


def chats(folder: Path) -> Path:
    said = iter(sentences(7, 3000, most=8))
    rows = [
        {
            "messages": [
                {"role": role, "content": next(said)}
                for _ in range(1 + n % 4)
                for role in ("user", "assistant")
            ]
        }
        for n in range(300)
    ]
    rows[5]["messages"] = [{"role": "assistant", "content": "first"}, *rows[5]["messages"]]
    rows[6]["messages"] = [{"role": "system", "content": "be brief"}, *rows[6]["messages"]]
    write(folder, "train.jsonl", rows)
    return folder


def reviews(count: int = 400) -> dict[str, list[Any]]:
    texts = sentences(8, count)
    draw = random.Random(8)
    return {"text": texts, "label": [draw.choice(["good", "bad", "so so"]) for _ in texts]}


def review_csv(folder: Path) -> Path:
    found = reviews()
    rows = [f'"{t}",{label}' for t, label in zip(*found.values(), strict=True)]
    write(folder, "train.csv", ["text,label", *rows, *rows[:3]])
    write(folder, "test.csv", ["text,label", *rows[:30]])
    return folder


def pairs(folder: Path) -> Path:
    first, second = sentences(9, 200, most=9), sentences(10, 200, most=20)
    rows = [f"{a}\t{b}\t{n % 3 - 1}" for n, (a, b) in enumerate(zip(first, second, strict=True)) if n % 3]
    write(folder, "train.tsv", ["sentence1\tsentence2\tlabel", *rows])
    write(folder, "dev.tsv", ["sentence1\tsentence2\tlabel", *rows[::9]])
    return folder


def events(count: int = 3000, text_ids: bool = False) -> list[tuple[str, str, int, int]]:
    """(user, item, rating, time), with repeats and with equal times."""
    draw = random.Random(11)
    name = (lambda n: f"u{n:x}") if text_ids else str
    return [
        (name(draw.randint(1, 150)), name(draw.randint(1, 80)), draw.randint(1, 5), draw.randint(1, 400))
        for _ in range(count)
    ]


def shop(folder: Path, text_ids: bool = False, times: bool = True) -> Path:
    header = "user,item,rating,timestamp" if times else "user,item,rating"
    rows = [",".join(map(str, event if times else event[:3])) for event in events(text_ids=text_ids)]
    write(folder, "interactions.csv", [header, *rows])
    write(folder, "items.csv", ["item,title,kind", *(f"{n},thing {n},kind {n % 5}" for n in range(1, 70))])
    return folder


def shop_parquet(folder: Path) -> Path:
    import numpy as np

    users, items, ratings, times = zip(*events(), strict=True)
    numbers = {"user_id": [int(u) for u in users], "item_id": [int(i) for i in items]}
    columns = {**numbers, "score": [r / 2 for r in ratings], "ts": np.array(times, np.float64) / 7}
    parquet(folder, "ratings.parquet", columns, rows=700)
    return folder


def split_shop(folder: Path, valid: bool = False) -> Path:
    rows = ["\t".join(map(str, event)) for event in events()]
    head = "user\titem\trating\ttimestamp"
    write(folder, "train.tsv", [head, *rows[:2500]])
    write(folder, "test.tsv", [head, *rows[2500:]])
    if valid:
        write(folder, "valid.tsv", [head, *rows[2400:2600]])
    return folder


CASES: dict[str, Any] = {
    "text": lambda f: text(running_text(f)),
    "text in windows": lambda f: text(running_text(f), stride=10),
    "text, cleaned": lambda f: text(running_text(f), clean=("unicode", "control", "short=3", "duplicates")),
    "documents": lambda f: text(documents(f)),
    "documents, cleaned": lambda f: text(documents(f), clean=("short=2", "duplicates")),
    "instructions": lambda f: text(instructions(f)),
    "chats": lambda f: text(chats(f), max_length=64),
    "chats, cleaned": lambda f: text(chats(f), clean=("duplicates",), template="plain"),
    "mixture": lambda f: text(Path(f"{documents(f / 'a')},{chats(f / 'b')}"), mix=(0.5, 0.5)),
    "labels in csv": lambda f: labelled(review_csv(f), class_weights="balanced"),
    "labels, vocabulary": lambda f: labelled(review_csv(f), tokenizer=vocabulary(f / "v", "film", "##ong")),
    "pairs": lambda f: labelled(pairs(f)),
    "pairs held out": lambda f: labelled(pairs(f) / "train.tsv"),
    "leave one out": lambda f: interactions(shop(f)),
    "leave one out, no times": lambda f: interactions(shop(f, text_ids=True, times=False)),
    "leave one out, ratings": lambda f: interactions(shop(f, text_ids=True), min_rating=3.0),
    "by time": lambda f: interactions(shop_parquet(f), split="time", min_rating=1.0),
    "given": lambda f: interactions(split_shop(f)),
    "given, three": lambda f: interactions(split_shop(f, valid=True), split="given"),
}


def prepared(case: str, folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    return described(prepare(CASES[case](folder)), folder)


def described(found: Facts, folder: Path) -> list[str]:
    """[fingerprint, hash of the facts] of data that was prepared from `folder`."""
    facts = found.to_dict()
    facts.pop("folder")
    for name in ("notes", "held_out"):  # words for people, and a digest of the same bytes
        facts["extra"].pop(name, None)
    known = json.dumps(facts, sort_keys=True).replace(str(folder), "")
    return [facts["fingerprint"], hashlib.sha256(known.encode()).hexdigest()[:16]]


@pytest.mark.parametrize("case", CASES)
def test_prepared_data_is_what_it_was(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))
    assert prepared(case, tmp_path / "data") == json.loads(RECORDED.read_text())[case]
