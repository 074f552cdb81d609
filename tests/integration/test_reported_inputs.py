"""Inputs after public reports, one of each kind: what goes in is learnt, or said.

Each case was once lost, wrong or answered with a misleading sentence.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from isobatch.tests.integration.helpers import launch, run_code, summary
from isobatch.tests.integration.reported import (
    CAUSAL,
    CLASSES,
    COLOURS,
    PAIRS,
    SHOP,
    Case,
    Taken,
    ask,
    check,
    clicks,
    csv,
    interactions,
    jsonl,
    say,
    text,
    texts,
    tiny_models,
    titles,
    turns,
    write,
)

if TYPE_CHECKING:
    from pathlib import Path

ROWS = range(24)
TWICE = r"\b(twice|two|both|same|several|more than one|repeat\w*|duplicate\w*)\b"
CLICKS = clicks()
FULL_SHOP = Taken(facts={"users": 12, "items": 15, "texts": 15}, samples=72)
LABELLED = [(text(n), ("neg", "pos")[n % 2]) for n in ROWS]
EVERY_ANSWER = tuple(f"say{n:02d}x" for n in ROWS)
EVERY_QUESTION = tuple(f"ask{n:02d}x" for n in ROWS)
TOLD = Taken(samples=24, learnt=EVERY_ANSWER, read=EVERY_QUESTION)


def weighed(key: str, off: Any, on: Any) -> Case:
    """The first of two answers is taken out by a field of its turn."""
    rows = [
        {
            "messages": [
                *turns(("user", ask(n))),
                {"role": "assistant", "content": f"old{n:02d}x", key: off},
                *turns(("user", "what is blue")),
                {"role": "assistant", "content": say(n), key: on},
            ]
        }
        for n in ROWS
    ]
    left_out = tuple(f"old{n:02d}x" for n in ROWS)
    taken = Taken(samples=24, learnt=EVERY_ANSWER, read=(*EVERY_QUESTION, *left_out), unlearnt=left_out)
    return Case(f"an answer with {key} {off} was learnt", {"rows.jsonl": jsonl(rows)}, CAUSAL, taken)


def chats(of: Any) -> dict[str, str]:
    """A file with a row for each number."""
    return {"rows.jsonl": jsonl([of(n) for n in ROWS])}


def parts(content: str, key: str = "text") -> list[dict[str, str]]:
    return [{"type": "text", key: content}]


SYSTEM = Taken(samples=24, learnt=EVERY_ANSWER, read=("always in red", *EVERY_QUESTION))
TALK = {
    "a system text beside ShareGPT conversations": Case(
        "the column was not read, without a word",
        chats(
            lambda n: {
                "system": "always in red",
                "conversations": [{"from": "human", "value": ask(n)}, {"from": "gpt", "value": say(n)}],
            }
        ),
        CAUSAL,
        SYSTEM,
    ),
    "a system text beside prompt and response": Case(
        "the column was not read, without a word",
        chats(lambda n: {"system": "always in red", "prompt": ask(n), "response": say(n)}),
        CAUSAL,
        SYSTEM,
    ),
    "a passage beside question and answer": Case(
        "answers were learnt without the passage they are about",
        chats(lambda n: {"context": "always in red", "question": ask(n), "answer": say(n)}),
        CAUSAL,
        SYSTEM,
    ),
    "weight 0 of a turn": weighed("weight", 0, 1),
    "loss_weight 0.0 of a turn": weighed("loss_weight", 0.0, 1.0),
    "train false of a turn": weighed("train", False, True),
    "loss_mask 0 of a turn": weighed("loss_mask", 0, 1),
    "thoughts of an earlier turn": Case(
        "the template drops them: the first answer was learnt without, not a word",
        chats(
            lambda n: {
                "messages": turns(
                    ("user", "what is sky"),
                    ("assistant", "<think>\nfirst thought\n</think>\n\nblue"),
                    ("user", ask(n)),
                    ("assistant", f"<think>\nlast thought\n</think>\n\n{say(n)}"),
                )
            }
        ),
        CAUSAL.replace("qwen2", "qwen3"),
        Taken(
            samples=24,
            learnt=(*EVERY_ANSWER, "last thought"),
            said=(r"\b24\b.*(template|left out|leaves out)",),
        ),
    ),
    "content in parts": Case(
        "parts of text alone were refused",
        chats(lambda n: {"messages": turns(("user", parts(ask(n))), ("assistant", parts(say(n))))}),
        CAUSAL,
        TOLD,
    ),
    "content in parts called value": Case(
        "another tool's name of the text in a part",
        chats(
            lambda n: {
                "messages": turns(("user", parts(ask(n), "value")), ("assistant", parts(say(n), "value")))
            }
        ),
        CAUSAL,
        TOLD,
    ),
    "prompt and completion in parts": Case(
        "as TRL writes them",
        chats(
            lambda n: {
                "prompt": turns(("user", parts(ask(n)))),
                "completion": turns(("assistant", parts(say(n)))),
            }
        ),
        CAUSAL,
        TOLD,
    ),
    "turns that call functions": Case(
        "refused by a list of roles, which does not say that tools are not learnt",
        chats(
            lambda n: {
                "conversations": [
                    {"from": "human", "value": ask(n)},
                    {"from": "function_call", "value": '{"name": "look"}'},
                    {"from": "observation", "value": "7"},
                    {"from": "gpt", "value": say(n)},
                ]
            }
        ),
        CAUSAL,
        refused=(r"rows\.jsonl.*line 1\b", "function_call", r"\btools?\b"),
        unsaid=("did you mean",),
    ),
    "a turn by a tool": Case(
        "a role of another kind was offered: did you mean model?",
        chats(lambda n: {"messages": turns(("user", ask(n)), ("tool", "7"), ("assistant", say(n)))}),
        CAUSAL,
        refused=(r"rows\.jsonl.*line 1\b", r"\btool"),
        unsaid=("did you mean",),
    ),
    "a column of tools": Case(
        "a model that calls tools was learnt without them",
        chats(
            lambda n: {
                "messages": turns(("user", ask(n)), ("assistant", say(n))),
                "tools": [{"type": "function", "function": {"name": "look"}}],
            }
        ),
        CAUSAL,
        refused=(r"rows\.jsonl.*line 1\b", r"\btools\b"),
    ),
    "reasoning beside an answer": Case(
        "the reasoning was lost",
        chats(
            lambda n: {
                "messages": [
                    *turns(("user", ask(n))),
                    {"role": "assistant", "content": say(n), "reasoning_content": "because"},
                ]
            }
        ),
        CAUSAL,
        refused=(r"rows\.jsonl.*line 1\b", "reasoning_content"),
    ),
    "a picture among the parts": Case(
        "it is no text",
        chats(
            lambda n: {
                "messages": turns(
                    ("user", [*parts(ask(n)), {"type": "image_url", "image_url": {"url": "a.png"}}]),
                    ("assistant", say(n)),
                )
            }
        ),
        CAUSAL,
        refused=(r"rows\.jsonl.*line 1\b", "image"),
    ),
    "a column of images": Case(
        "pictures were dropped and their marks learnt as text",
        chats(
            lambda n: {
                "messages": turns(("user", f"<image>{ask(n)}"), ("assistant", say(n))),
                "images": ["a.png"],
            }
        ),
        CAUSAL,
        refused=(r"rows\.jsonl", "image"),
    ),
    "an answer that is a list": Case(
        "told of messages, which these rows have not",
        chats(lambda n: {"question": ask(n), "answer": [say(n), "the bird"]}),
        CAUSAL,
        refused=(r"rows\.jsonl.*line 1\b", r"\banswer\b", r"\blist\b"),
        unsaid=("message 1",),
    ),
    "a key of a message that nobody reads": Case(
        "what is not read is named once, with its count",
        chats(
            lambda n: {"messages": [*turns(("user", ask(n)), annotator="ann"), *turns(("assistant", say(n)))]}
        ),
        CAUSAL,
        Taken(samples=24, learnt=EVERY_ANSWER, said=(r"\b24\b.*annotator",)),
    ),
    "a column that nobody reads": Case(
        "what is not read is named once, with its count",
        chats(lambda n: {"prompt": ask(n), "response": say(n), "origin": "web"}),
        CAUSAL,
        Taken(samples=24, learnt=EVERY_ANSWER, said=(r"\b24\b.*\borigin\b",)),
    ),
    "one message for chosen and for rejected": Case(
        "a traceback of zip()",
        chats(
            lambda n: {
                "conversations": [{"from": "human", "value": ask(n)}],
                "chosen": {"from": "gpt", "value": say(n)},
                "rejected": {"from": "gpt", "value": f"no{n:02d}x"},
            }
        ),
        PAIRS,
        Taken(
            samples=24,
            learnt=(*EVERY_ANSWER, *(f"no{n:02d}x" for n in ROWS)),
            read=EVERY_QUESTION,
        ),
    ),
    "several rejected answers": Case(
        "told of messages, which these rows have not",
        chats(lambda n: {"prompt": ask(n), "chosen": say(n), "rejected": ["the bird", "a dog"]}),
        PAIRS,
        refused=(r"rows\.jsonl.*line 1\b", r"\brejected\b", r"\blist\b"),
        unsaid=("message 1",),
    ),
    "pairs of another task": Case(
        "rows were learnt without their pairs",
        chats(
            lambda n: {
                "conversations": [{"from": "human", "value": ask(n)}],
                "chosen": {"from": "gpt", "value": say(n)},
                "rejected": {"from": "gpt", "value": "no"},
            }
        ),
        CAUSAL,
        refused=(r"rows\.jsonl", r"\bchosen\b", r"\bdpo\b"),
    ),
    "answers marked as bad": Case(
        "bad answers were learnt as if they were good",
        chats(lambda n: {"messages": turns(("user", ask(n)), ("assistant", say(n))), "label": n % 2 == 0}),
        CAUSAL,
        Taken(
            samples=12, learnt=EVERY_ANSWER[::2], unlearnt=EVERY_ANSWER[1::2], said=(r"\b12\b.*\blabel\b",)
        ),
        refused=(r"rows\.jsonl", r"\blabel\b"),
    ),
    "the name of a method that is none here": Case(
        "grpo is no misspelt orpo",
        {"rows.jsonl": jsonl([{"prompt": ask(n)} for n in ROWS])},
        "auto --task grpo --data {data} --model {models}/qwen2",
        refused=("grpo",),
        unsaid=(r"did you mean \S*orpo",),
    ),
}
TABLES = {
    "labels that are missing": Case(
        "NaN, as json.dumps writes pandas' rows, became a class",
        {
            "rows.jsonl": jsonl(
                [{"text": text(n), "label": float("nan") if n in (4, 13) else n % 2} for n in ROWS]
            )
        },
        CLASSES,
        Taken(samples=22, labels=("0", "1"), said=(r"\b2\b.*\blabel",)),
        refused=(r"rows\.jsonl.*line 5\b", r"\blabel"),
    ),
    "1.0 in one file and 1 in another": Case(
        "pandas wrote one of them with a gap: one class, not two",
        {
            "train.csv": csv([(text(n), f"{n % 2}.0") for n in ROWS]),
            "valid.csv": csv([(text(n + 30), n % 2) for n in range(6)]),
        },
        CLASSES,
        Taken(samples=30, labels=("0", "1")),
    ),
    "scores of pairs": Case(
        "every score became a class",
        {
            "rows.csv": csv(
                [(text(n), text(n + 30), f"{n * 0.19:.2f}") for n in ROWS], "sentence1,sentence2,label"
            )
        },
        CLASSES,
        refused=(r"rows\.csv", r"line \d|0\.\d\d", r"regression|decimal|score"),
    ),
    "scores of one decimal": Case(
        "51 classes from 0.0 to 5.0",
        {
            "rows.csv": csv(
                [(text(n % 90), text(n % 89), f"{n % 51 / 10:.1f}") for n in range(120)],
                "sentence1,sentence2,score",
            )
        },
        f"{CLASSES} --label-column score",
        refused=(r"rows\.csv", r"\bscore\b", r"regression|decimal"),
    ),
    "several labels a row": Case(
        "a list is no class",
        {"rows.jsonl": jsonl([{"text": text(n), "label": ["joy", "fear"][: 1 + n % 2]} for n in ROWS])},
        CLASSES,
        refused=(r"rows\.jsonl.*line 1\b", r"\blabel", r"multi|several|list"),
    ),
    "a quote that is never closed": Case(
        "39 rows became part of one text",
        {
            "rows.csv": csv(
                [("xy"[n % 2], ('"' if n == 20 else "") + text(n)) for n in range(40)], "label,text"
            )
        },
        CLASSES,
        refused=(r"rows\.csv.*line 22\b", r"\bquote"),
    ),
    "a text with lines in quotes": Case(
        "a quote that is closed lines later is one row, as always",
        {"rows.csv": csv([(f'"{text(n)}\n{text(n + 30)}"', "xy"[n % 2]) for n in ROWS])},
        CLASSES,
        Taken(samples=24, labels=("x", "y")),
    ),
    "two columns of one name": Case(
        "the last was taken, without a word",
        {"rows.csv": csv([(text(n), f"other {n}", "xy"[n % 2]) for n in ROWS], "text,text,label")},
        CLASSES,
        Taken(samples=24, labels=("x", "y"), said=(rf"\btext\b.*{TWICE}|{TWICE}.*\btext\b",)),
        refused=(r"rows\.csv", r"\btext\b", TWICE),
    ),
    "a blank in a header": Case(
        "asked for a column that it showed",
        {"rows.csv": csv([(text(n), (" neg", " pos")[n % 2]) for n in ROWS], "text, label")},
        CLASSES,
        Taken(samples=24, labels=("neg", "pos")),
    ),
    "tabs in a csv": Case(
        "the delimiter is what the file has, and said",
        {"rows.csv": csv([(f"{text(n)}, or not", "xy"[n % 2]) for n in ROWS], "text\tlabel", "\t")},
        CLASSES,
        Taken(samples=24, labels=("x", "y"), said=(r"rows\.csv.*\btabs?\b|\btabs?\b.*rows\.csv",)),
    ),
    "columns by number": Case(
        "of a table without a header the first row was taken for names",
        {"rows.tsv": csv([(text(n), f"id{n}", "xy"[n % 2]) for n in ROWS[1:]], f"{text(0)}\tid0\tx", "\t")},
        f"{CLASSES} --text-column 1 --label-column 3",
        Taken(samples=24, labels=("x", "y")),
    ),
    "no header and no number": Case(
        "the way out is the columns' numbers",
        {"rows.csv": csv([(text(n), "xy"[n % 2]) for n in ROWS[1:]], f"{text(0)},x")},
        CLASSES,
        refused=(r"rows\.csv", r"--(text|label)-column", r"header|number|\b1\b"),
    ),
    "splits of lists": Case(
        "a JSON whose splits hold [text, label]",
        {
            "rows.json": json.dumps(
                {
                    "train": [[text(n), "xy"[n % 2]] for n in ROWS],
                    "val": [[text(n + 30), "xy"[n % 2]] for n in range(4)],
                    "test": [[text(n + 40), "xy"[n % 2]] for n in range(6)],
                }
            )
        },
        f"{CLASSES} --text-column 1 --label-column 2",
        Taken(samples=34, labels=("x", "y")),
    ),
    "columns in an object": Case(
        "an object of lists of one length is columns",
        {
            "rows.json": json.dumps(
                {"text": [text(n) for n in ROWS], "label": ["xy"[n % 2] for n in ROWS]},
            )
        },
        CLASSES,
        Taken(samples=24, labels=("x", "y")),
    ),
    "rows under a key": Case(
        "the first list of the object was taken for them: its tags",
        {
            "rows.json": json.dumps(
                {"version": "1", "tags": ["x", "y"], "data": [{"text": text(n)} for n in ROWS]}
            )
        },
        CAUSAL,
        Taken(learnt=texts(24)),
        refused=(r"rows\.json", r"\bdata\b"),
    ),
    "a column of words and tags": Case(
        "CoNLL has a class for each word",
        {"rows.conll": "".join("the\tO\nred\tO\ncat\tB-animal\n\n" for _ in ROWS)},
        CLASSES,
        refused=(r"rows\.conll", "--format"),
    ),
    "rows without the text": Case(
        "half of the rows vanished, and the sentence blamed the validation split",
        {"rows.jsonl": jsonl([{"text" if n < 20 else "content": text(n)} for n in range(40)])},
        CAUSAL,
        Taken(learnt=texts(20), said=(r"\b20\b.*\btext\b",)),
        refused=(r"rows\.jsonl.*line 39\b", r"\btext\b"),
    ),
    "a packed file": Case(
        "--format was offered, which cannot help",
        {"rows.jsonl.gz": gzip.compress(jsonl([{"text": text(n)} for n in ROWS]).encode())},
        CAUSAL,
        Taken(learnt=texts(24)),
        refused=(r"rows\.jsonl\.gz", r"gunzip|unpack|compress"),
        unsaid=("--format",),
    ),
}
SHOPS = {
    "ids that became decimal": Case(
        "3.0 in one table and 3 in the other: no title joined, and twice the items",
        {
            "interactions.csv": interactions([(u, f"{i}.0", t) for u, i, t in CLICKS]),
            "items.csv": titles(list(range(15))),
        },
        SHOP,
        FULL_SHOP,
        unsaid=("items have no text",),
    ),
    "ids that became decimal in Parquet": Case(
        "a float64 column, as pandas has after a merge",
        {
            "interactions.parquet": pa.table(
                {
                    "user_id": [u for u, _, _ in CLICKS],
                    "item_id": [float(i) for _, i, _ in CLICKS],
                    "timestamp": [t for _, _, t in CLICKS],
                }
            ),
            "items.csv": titles(list(range(15))),
        },
        SHOP,
        FULL_SHOP,
        unsaid=("items have no text",),
    ),
    "an id that is missing": Case(
        "named neither file nor line",
        {
            "interactions.csv": interactions(
                [("" if n == 40 else u, i, t) for n, (u, i, t) in enumerate(CLICKS)]
            )
        },
        SHOP,
        refused=(r"interactions\.csv.*line 42\b", r"\buser"),
    ),
    "bad ratings": Case(
        "1 of 5 counted as taken, and nothing told of --min-rating",
        {
            "interactions.csv": interactions(
                [(u, i, 1 + i % 5) for u, i, _ in CLICKS], "user_id,item_id,rating"
            )
        },
        SHOP,
        Taken(facts={"users": 12, "items": 15}, said=("--min-rating",)),
    ),
    "an item with two rows": Case(
        "the last title won, without a word",
        {
            "interactions.csv": interactions(CLICKS),
            "items.csv": titles(list(range(15))) + "3,another book\n",
        },
        SHOP,
        Taken(facts={"items": 15, "texts": 15}, said=(rf"\bitems?\b.*{TWICE}|{TWICE}.*\b(items?|ids?)\b",)),
        refused=(r"items\.csv", TWICE),
    ),
    "RecBole's files": Case(
        "the endings .inter and .item, names with types",
        {
            "shop.inter": csv(CLICKS, "user_id:token\titem_id:token\ttimestamp:float", "\t"),
            "shop.item": csv([(n, f"book {n}") for n in range(15)], "item_id:token\ttitle:token_seq", "\t"),
        },
        SHOP,
        FULL_SHOP,
        unsaid=("items have no text",),
    ),
    "nobody has an unseen item": Case(
        "hr@10 was 1.0 of users who were ranked against nobody",
        {"interactions.csv": interactions(clicks(items=6))},
        "auto --task recommender --data {data} --preset ids --epochs 1 --least-steps 0 --name r",
        refused=(r"\busers?\b", r"unseen|every item|all (the |of the )?\d* ?items|took all"),
    ),
}
CASES = TALK | TABLES | SHOPS


@pytest.mark.parametrize("name", CASES)
def test_a_reported_input(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path / "case")


def test_one_user_has_no_unseen_item(tmp_path: Path) -> None:
    """That user is left out of the ranking and counted; the figure is a mean over the 11 others."""
    rows = [(99, item, 1_700_000_000 + item) for item in range(15)] + [c for c in CLICKS if c[0]]
    words = "auto --task recommender --data {data} --preset ids --epochs 1 --least-steps 0 --name r"
    said = Taken(said=(r"\b1\b.{0,40}\busers?\b.*(unseen|every item|all items|left out|took all)",))
    check(Case("one of twelve", {"interactions.csv": interactions(rows)}, words, said), tmp_path / "case")
    hits = summary(tmp_path / "case" / "work" / "runs" / "r")["metrics"]["hr@10"] * 11
    assert hits == pytest.approx(round(hits), abs=0.01)


LIKE_THE_TOKENIZER = """
import inspect, json, pathlib, sys
import numpy as np, onnxruntime, torch, transformers
run, *texts = sys.argv[1:]
file, *_ = sorted(pathlib.Path(run).rglob("model.onnx"))
given = [text.split(" | ") for text in texts]
columns = [list(column) for column in zip(*given)]
tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent)
session = onnxruntime.InferenceSession(str(file))
logits = session.run(None, dict(tokenizer(*columns, padding=True, return_tensors="np")))[0]
model = transformers.AutoModelForSequenceClassification.from_pretrained(f"{run}/final").eval()
known = inspect.signature(model.forward).parameters
inputs = tokenizer(*columns, padding=True, return_tensors="pt")
with torch.no_grad():
    wanted = model(**{k: v for k, v in inputs.items() if k in known}).logits.numpy()
names = [one.name for one in session.get_inputs()]
print(json.dumps([sorted(names), sorted(inputs), float(np.abs(logits - wanted).max())]))
"""
"""An exported file and the tokenizer beside it, by plain onnxruntime and transformers."""
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
DOUBLE = {"rows.csv": csv([(text(n), text(n + 30), "xy"[n % 2]) for n in ROWS], "sentence1,sentence2,label")}


def trained(model: str, files: dict[str, str], folder: Path) -> str:
    """The run of a classifier after four steps."""
    data = write(files, folder / "data")
    sizes = ["--steps", "4", "--batch-size", "8", "--max-length", "32", "--precision", "fp32"]
    words = ["--data", str(data), "--model", f"{tiny_models()}/{model}", "--name", "r", "--quiet"]
    done = launch("auto", "--task", "classifier", *words, *sizes, cwd=folder)
    assert done.returncode == 0, done.stderr
    return f"{folder}/runs/r"


@pytest.mark.parametrize(
    ("model", "files"),
    [("bert", SINGLE), ("distilbert", DOUBLE), ("modernbert", SINGLE)],
    ids=["bert", "pairs of distilbert", "modernbert"],
)
def test_an_exported_file_takes_what_its_tokenizer_makes(
    model: str, files: dict[str, str], tmp_path: Path
) -> None:
    run = trained(model, files, tmp_path)
    done = launch("export", run, "--to", "onnx", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    given = ["the red cat", f"a dog sat on the {COLOURS[2]} mat"]
    given = [f"{one} | the tree" for one in given] if files is DOUBLE else given
    looked = run_code(LIKE_THE_TOKENIZER, run, *given, cwd=tmp_path)
    assert looked.returncode == 0, looked.stderr
    names, made, difference = json.loads(looked.stdout.splitlines()[-1])
    assert names == made
    assert difference < 1e-4


def test_a_model_without_a_pad_token_becomes_a_classifier(tmp_path: Path) -> None:
    """Plain transformers open it and answer a padded batch as they answer each text alone."""
    run = trained("gpt2", SINGLE, tmp_path)
    looked = run_code(BY_TRANSFORMERS, f"{run}/final", "the cat", "a dog sat on the mat", cwd=tmp_path)
    assert looked.returncode == 0, looked.stderr
    shape, difference = json.loads(looked.stdout.splitlines()[-1])
    assert shape == [2, 2]
    assert difference < 1e-4
