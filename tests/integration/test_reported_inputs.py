"""Inputs after public reports, one of each kind: what goes in is learnt, or said.

Each case was once lost, wrong or answered with a misleading sentence, or was written down with what must come
of it before the first run. A test builds the files anew; the command is a process of its own with a cache of
its own, so that what was prepared, or half prepared, is seen.
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
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer

from isobatch.tests.integration.helpers import launch, run_code, succeed

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


ROWS = range(24)
CLICKS = clicks()
FULL_SHOP = Taken(facts={"users": 12, "items": 15, "texts": 15}, samples=72)
LABELLED = [(text(n), ("neg", "pos")[n % 2]) for n in ROWS]
ANSWERS = tuple(f"say{n:02d}x" for n in ROWS)
QUESTIONS = tuple(f"ask{n:02d}x" for n in ROWS)
OLD = tuple(f"old{n:02d}x" for n in ROWS)
NO = tuple(f"no{n:02d}x" for n in ROWS)
TOLD = Taken(samples=24, learnt=ANSWERS, read=QUESTIONS)
MENDED = Taken(samples=24, learnt=ANSWERS, read=(*QUESTIONS, *OLD), unlearnt=OLD)
READ = Taken(samples=24, labels=("neg", "pos"))


def chats(
    of: Any, taken: Taken | None = None, *refused: str, words: str = CAUSAL, unsaid: tuple[str, ...] = ()
) -> Case:
    """JSON lines with a row for each number."""
    return Case({"rows.jsonl": jsonl([of(n) for n in ROWS])}, words, taken, refused, unsaid)


def table(rows: list[Any], header: str, taken: Taken | None, *refused: str) -> Case:
    return Case({"rows.csv": csv(rows, header)}, CLASSES, taken, refused)


def shop(log: File, taken: Taken | None = FULL_SHOP, *refused: str, words: str = SHOP, **more: File) -> Case:
    """Interactions, and other tables by their names."""
    name = "interactions.parquet" if isinstance(log, pa.Table) else "interactions.csv"
    files = {f"{key}.csv": content for key, content in more.items()}
    unsaid = ("items have no text",) if more and not refused else ()
    return Case({name: log, **files}, words, taken, refused, unsaid)


def said_by(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def told(n: int) -> list[dict[str, Any]]:
    """Messages of a question and its answer."""
    return turns(("user", ask(n)), ("assistant", say(n)))


def shared(n: int, *more: tuple[str, str]) -> list[dict[str, str]]:
    """The same as ShareGPT has it."""
    return [{"from": who, "value": what} for who, what in (("human", ask(n)), *more, ("gpt", say(n)))]


def mended(n: int, off: dict[str, Any], on: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A first answer that a field of its turn takes out, and a second one that it does not."""
    first = [said_by("user", ask(n), **keys), said_by("assistant", f"old{n:02d}x", **keys | off)]
    second = [said_by("user", "what is blue", **keys), said_by("assistant", say(n), **keys | on)]
    return {"messages": [*first, *second]}


def parts(content: str, key: str = "text") -> list[dict[str, str]]:
    return [{"type": "text", key: content}]


ARROW = pa.list_(
    pa.struct(
        [
            *(("role", pa.string()), ("content", pa.string())),
            ("tool_calls", pa.list_(pa.struct([("id", pa.string())]))),
            ("weight", pa.float64()),
        ]
    )
)
FROM_ARROW = [mended(n, {"weight": 0.0}, {"weight": 1.0}, tool_calls=None, weight=None) for n in ROWS]
MARKS = [
    ({key: off}, {key: on})
    for key, off, on in (
        *(("weight", 0, 1), ("loss_weight", 0.0, 1.0), ("train", False, True), ("loss_mask", 0, 1)),
        *(("training", False, True), ("loss", False, True)),
    )
]
"""By each name: a turn that is not learnt, and one that is."""
LINE_1 = r"rows\.jsonl.*line 1\b"
TALK = {
    # An answer that is marked was learnt.
    "a turn that is marked": chats(lambda n: mended(n, *MARKS[n % len(MARKS)]), MENDED),
    # datasets.to_parquet() gives every message the keys of all: null is no tool call, and no weight 0.
    "messages from Arrow": Case(
        {"rows.parquet": pa.table({"messages": pa.array([r["messages"] for r in FROM_ARROW], ARROW)})},
        CAUSAL,
        MENDED,
    ),
    # ShareGPT dumps hold an answer that goes on. ChatML can write two turns; both are answers.
    "two answers in a row": chats(
        lambda n: {"conversations": shared(n, ("gpt", f"old{n:02d}x"))},
        Taken(samples=24, learnt=(*OLD, *ANSWERS), read=QUESTIONS),
    ),
    # It is no text.
    "a picture among the parts": chats(
        lambda n: {
            "messages": turns(("user", [*parts(ask(n)), {"type": "image_url"}]), ("assistant", say(n)))
        },
        None,
        *(LINE_1, "image"),
    ),
    # Told of messages, which these rows have not.
    "an answer that is a list": chats(
        lambda n: {"question": ask(n), "answer": [say(n), "the bird"]},
        None,
        *(LINE_1, r"\banswer\b", r"\blist\b"),
        unsaid=("message 1",),
    ),
    # A traceback of zip().
    "one message for chosen and for rejected": chats(
        lambda n: {
            "conversations": [{"from": "human", "value": ask(n)}],
            "chosen": {"from": "gpt", "value": say(n)},
            "rejected": {"from": "gpt", "value": f"no{n:02d}x"},
        },
        Taken(samples=24, learnt=(*ANSWERS, *NO), read=QUESTIONS),
        words=PAIRS,
    ),
    # Rows were learnt without their pairs.
    "pairs of another task": chats(
        lambda n: {"prompt": ask(n), "chosen": say(n), "rejected": "no"},
        None,
        *(r"rows\.jsonl", r"\bchosen\b", r"\bdpo\b"),
    ),
    # HuggingFaceH4/ultrafeedback_binarized: the prompt in four columns, and scores that are not learnt from.
    "the columns of ultrafeedback": chats(
        lambda n: {
            **{"prompt": ask(n), "prompt_id": f"{n:064x}", "messages": told(n), "chosen": told(n)},
            "rejected": turns(("user", ask(n)), ("assistant", f"no{n:02d}x")),
            **{"score_chosen": 8.5, "score_rejected": 2.0},
        },
        Taken(samples=24, learnt=(*ANSWERS, *NO), read=QUESTIONS, said=(r"\b24\b.*score_chosen",)),
        words=PAIRS,
    ),
    # Bad answers were learnt as if they were good.
    "answers marked as bad": chats(
        lambda n: {"messages": told(n), "label": n % 2 == 0},
        Taken(samples=12, learnt=ANSWERS[::2], unlearnt=ANSWERS[1::2], said=(r"\b12\b.*\blabel\b",)),
        *(r"rows\.jsonl", r"\blabel\b"),
    ),
    # grpo is no misspelt orpo.
    "the name of a method that is none here": chats(
        lambda n: {"prompt": ask(n)},
        None,
        "grpo",
        words="auto --task grpo --data {data} --model {models}/qwen2",
        unsaid=(r"did you mean \S*orpo",),
    ),
    # Lines cut out of a JSON array. Python says "Extra data", which tells nobody of the comma.
    "a comma at the end of JSON lines": Case(
        {
            "rows.jsonl": ",\n".join(json.dumps({"instruction": ask(n), "output": say(n)}) for n in ROWS)
            + "\n"
        },
        CAUSAL,
        Taken(samples=24, learnt=ANSWERS),
        (LINE_1, r"comma|JSON"),
    ),
    # json.dump(rows, file, indent=2) is common. It is read, or --format json is offered.
    "an indented JSON array that is called jsonl": Case(
        {"rows.jsonl": json.dumps([{"instruction": ask(n), "output": say(n)} for n in ROWS], indent=2)},
        CAUSAL,
        Taken(samples=24, learnt=ANSWERS),
        (r"rows\.jsonl", r"--format json\b|\.json\b.*(list|array)|(list|array).*\.json\b"),
    ),
}
TABLES = {
    # A Mac's Excel saves "CSV (Macintosh)" so: the file is one line to whoever looks for line feeds.
    "line ends of one CR": Case({"rows.csv": csv(LABELLED).replace("\n", "\r").encode()}, CLASSES, READ),
    # Excel's "Unicode text": UTF-16, tabs, and people call it .csv. Encoding and delimiter are in the file.
    "UTF-16 with tabs in a csv": Case(
        {
            "rows.csv": csv([(f"{t}, caf\u00e9", c) for t, c in LABELLED], "text\tlabel", "\t").encode(
                "utf-16"
            )
        },
        CLASSES,
        Taken(samples=24, labels=("neg", "pos"), said=(r"rows\.csv.*\btabs?\b|\btabs?\b.*rows\.csv",)),
    ),
    # JSON has true and false; pandas writes the same column to CSV as True and False: two classes, not four.
    "booleans in JSON and in CSV": Case(
        {
            "rows.jsonl": jsonl([{"text": text(n), "label": n % 2 == 0} for n in ROWS]),
            "held.csv": csv([(text(n + 30), n % 2 == 0) for n in range(6)]),
        },
        CLASSES.format(data="{folder}/rows.jsonl", models="{models}") + " --valid {folder}/held.csv",
        Taken(samples=30, labels=("False", "True")),
    ),
    # df.label.astype("category").to_parquet(): a dictionary of names, not the codes 0 and 1.
    "categories of pandas in Parquet": Case(
        {
            "rows.parquet": pa.table(
                {
                    "text": [t for t, _ in LABELLED],
                    "label": pa.array([c for _, c in LABELLED]).dictionary_encode(),
                }
            )
        },
        CLASSES,
        READ,
    ),
    # A review of "10" that a JSON writer made a number. It is a text, or the row is named; never lost.
    "a number where a text belongs": chats(
        lambda n: {"text": 10 if n == 6 else text(n), "label": "ab"[n % 2]},
        Taken(samples=24, labels=("a", "b")),
        *(r"rows\.jsonl.*line 7\b", r"\btext\b"),
        words=CLASSES,
    ),
    # NaN, as json.dumps writes pandas' rows, became a class.
    "labels that are missing": chats(
        lambda n: {"text": text(n), "label": float("nan") if n in (4, 13) else n % 2},
        Taken(samples=22, labels=("0", "1"), said=(r"\b2\b.*\blabel",)),
        *(r"rows\.jsonl.*line 5\b", r"\blabel"),
        words=CLASSES,
    ),
    # Left out and counted, or refused by its line; never a text.
    "NaN where a text belongs": Case(
        {"rows.jsonl": jsonl([{"text": float("nan") if n in (5, 17) else text(n)} for n in range(40)])},
        CAUSAL,
        Taken(
            learnt=tuple(t for n, t in enumerate(texts(40)) if n not in (5, 17)),
            unlearnt=("nan", "NaN"),
            said=(r"\b2\b.*\b(text|rows?)\b",),
        ),
        (r"rows\.jsonl.*line 6\b", r"\btext\b"),
    ),
    # SetFit's data sets: both name classes; the one not read is named.
    "a label and the name of the label": table(
        [(text(n), n % 2, ("negative", "positive")[n % 2]) for n in ROWS],
        "text,label,label_text",
        Taken(samples=24, labels=("0", "1"), said=("label_text",)),
    ),
    # A JSON whose splits hold [text, label].
    "splits of lists": Case(
        {
            "rows.json": json.dumps(
                {
                    name: [[text(n), "xy"[n % 2]] for n in numbers]
                    for name, numbers in (("train", ROWS), ("val", range(30, 34)), ("test", range(40, 46)))
                }
            )
        },
        f"{CLASSES} --text-column 1 --label-column 2",
        Taken(samples=34, labels=("x", "y")),
    ),
    # Half of the rows vanished, and the sentence blamed the validation split.
    "rows without the text": Case(
        {"rows.jsonl": jsonl([{"text" if n < 20 else "content": text(n)} for n in range(40)])},
        CAUSAL,
        Taken(learnt=texts(20), said=(r"\b20\b.*\btext\b",)),
        (r"rows\.jsonl.*line 39\b", r"\btext\b"),
    ),
}
SHOPS = {
    # Zip codes, SKUs, shop numbers: 007 is not 7. Read as numbers, two items would be one.
    "ids that begin with zeros": shop(
        interactions([(f"u{u}", f"{i:03d}" if u % 2 else i, t) for u, i, t in clicks() if i < 10]),
        Taken(facts={"users": 12, "items": 20, "texts": 20}),
        items=titles([*range(10), *(f"{n:03d}" for n in range(10))]),
    ),
    # The catalogue has ASINs, the log the shop's own numbers. Three examples of each side show it at once.
    "a catalogue of other ids": shop(
        interactions(CLICKS),
        Taken(said=(r"(B00\d{4}X\b.*){3}",)),
        *(r"items\.csv", r"(B00\d{4}X\b.*){3}"),
        items=titles([f"B00{n:04d}X" for n in range(15)]),
    ),
    # The same pair twice is one interaction here: how many went is said.
    "clicks that come again": shop(
        interactions([*CLICKS, *((u, i, t + 50) for u, i, t in CLICKS if t % 100 == 2)]),
        Taken(
            facts={"users": 12, "items": 15},
            samples=72,
            said=(r"\b12\b.*(repeat|again|twice|more than once|duplicate|several times|same)",),
        ),
    ),
    # hr@10 was 1.0 of users who were ranked against nobody.
    "nobody has an unseen item": shop(
        interactions(clicks(items=6)),
        None,
        *(r"\busers?\b", r"unseen|every item|all (the |of the )?\d* ?items|took all"),
        words="auto --task recommender --data {data} --preset ids --epochs 1 --least-steps 0 --name r",
    ),
}
CASES = TALK | TABLES | SHOPS


@pytest.mark.parametrize("name", CASES)
def test_a_reported_input(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path / "case")


BY_TRANSFORMERS = """
import json, sys
import torch, transformers
folder, *texts = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
with torch.no_grad():
    together = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
print(json.dumps([list(together.shape), float((together - alone).abs().max())]))
"""
SINGLE = {"rows.csv": csv(LABELLED)}


def trained(model: str, files: dict[str, str], folder: Path) -> str:
    """The run of a classifier after four steps."""
    data = write(files, folder / "data")
    sizes = ["--steps", "4", "--batch-size", "8", "--max-length", "32", "--precision", "fp32"]
    words = ["--data", str(data), "--model", f"{tiny_models()}/{model}", "--name", "r", "--quiet"]
    succeed("auto", "--task", "classifier", *words, *sizes, cwd=folder)
    return f"{folder}/runs/r"


def test_a_model_without_a_pad_token_becomes_a_classifier(tmp_path: Path) -> None:
    """Plain transformers open it and answer a padded batch as they answer each text alone."""
    run = trained("gpt2", SINGLE, tmp_path)
    looked = run_code(BY_TRANSFORMERS, f"{run}/final", "the cat", "a dog sat on the mat", cwd=tmp_path)
    assert looked.returncode == 0, looked.stderr
    shape, difference = json.loads(looked.stdout.splitlines()[-1])
    assert shape == [2, 2]
    assert difference < 1e-4
