"""Twenty more inputs that users meet, written down with what must come of them before the first run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from isobatch.tests.integration.reported import (
    CAUSAL,
    CLASSES,
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
    titles,
    turns,
)

if TYPE_CHECKING:
    from pathlib import Path

ROWS = range(24)
CLICKS = clicks()
LABELLED = [(text(n), ("neg", "pos")[n % 2]) for n in ROWS]
READ = Taken(samples=24, labels=("neg", "pos"))
ANSWERS = tuple(f"say{n:02d}x" for n in ROWS)
QUESTIONS = tuple(f"ask{n:02d}x" for n in ROWS)
INSTRUCTIONS = [{"instruction": ask(n), "input": "", "output": say(n)} for n in ROWS]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
FROM_ARROW = [
    {
        "messages": [
            {"role": "user", "content": ask(n), "tool_calls": None, "weight": None},
            {"role": "assistant", "content": f"old{n:02d}x", "tool_calls": None, "weight": 0.0},
            {"role": "user", "content": "what is blue", "tool_calls": None, "weight": None},
            {"role": "assistant", "content": say(n), "tool_calls": None, "weight": 1.0},
        ]
    }
    for n in ROWS
]
MESSAGES = pa.list_(
    pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("tool_calls", pa.list_(pa.struct([("id", pa.string())]))),
            ("weight", pa.float64()),
        ]
    )
)
OLD = tuple(f"old{n:02d}x" for n in ROWS)
CASES = {
    # A Mac's Excel saves "CSV (Macintosh)" so; pandas reads it as 24 rows.
    "line ends of one CR": Case(
        "the file is one line to whoever looks for line feeds",
        {"rows.csv": csv(LABELLED).replace("\n", "\r").encode()},
        CLASSES,
        READ,
    ),
    # Excel's "Unicode text": UTF-16, tabs, and people call it .csv. Encoding and delimiter are in the file.
    "UTF-16 with tabs in a csv": Case(
        "two surprises at once",
        {
            "rows.csv": csv([(f"{t}, caf\u00e9", c) for t, c in LABELLED], "text\tlabel", "\t").encode(
                "utf-16"
            )
        },
        CLASSES,
        Taken(samples=24, labels=("neg", "pos"), said=(r"\btabs?\b",)),
    ),
    # Excel and many data portals write both; the first column is then called \ufeff"text".
    "a byte order mark before a quoted header": Case(
        "the quote is no longer the first character",
        {"rows.csv": csv([(f'"{t}, or not"', c) for t, c in LABELLED], '"text","label"').encode("utf-8-sig")},
        CLASSES,
        READ,
    ),
    # Excel in most of Europe. Each text has more commas than the row has semicolons.
    "semicolons, and commas in the texts": Case(
        "a guess by the commonest mark cuts the texts",
        {"rows.csv": csv([(f"{t}, a dog, a bird, a roof", c) for t, c in LABELLED], "text;label", ";")},
        CLASSES,
        Taken(samples=24, labels=("neg", "pos"), said=(r"semicolon|[\"'`(];",)),
    ),
    # JSON has true and false; pandas writes the same column to CSV as True and False: two classes, not four.
    "booleans in JSON and in CSV": Case(
        "one class is one class in every format",
        {
            "rows.jsonl": jsonl([{"text": text(n), "label": n % 2 == 0} for n in ROWS]),
            "held.csv": csv([(text(n + 30), n % 2 == 0) for n in range(6)]),
        },
        CLASSES.format(data="{folder}/rows.jsonl", models="{models}") + " --valid {folder}/held.csv",
        Taken(samples=30, labels=("False", "True")),
    ),
    # df.label.astype("category").to_parquet(): a dictionary of names, not the codes 0 and 1.
    "categories of pandas in Parquet": Case(
        "the names are the classes",
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
    "a number where a text belongs": Case(
        "one row of 24 has another type",
        {"rows.jsonl": jsonl([{"text": 10 if n == 6 else text(n), "label": "ab"[n % 2]} for n in ROWS])},
        CLASSES,
        Taken(samples=24, labels=("a", "b")),
        refused=(r"rows\.jsonl.*line 7\b", r"\btext\b"),
    ),
    # OpenAI's fine-tuning files: the turn that calls has no content. The cause is the call, not the null.
    "null content beside a tool call": Case(
        "told of content that is no text",
        {
            "rows.jsonl": jsonl(
                [
                    {
                        "messages": [
                            *turns(("user", ask(n))),
                            {"role": "assistant", "content": None, "tool_calls": [CALL]},
                            {"role": "tool", "tool_call_id": "1", "content": "7"},
                            *turns(("assistant", say(n))),
                        ]
                    }
                    for n in ROWS
                ]
            )
        },
        CAUSAL,
        refused=(r"rows\.jsonl.*line 1\b", r"\btool"),
        unsaid=("did you mean",),
    ),
    # ShareGPT dumps hold an answer that goes on ("continue"). ChatML can write two turns; both are answers.
    "two answers in a row": Case(
        "neither of them may be lost or become a question",
        {
            "rows.jsonl": jsonl(
                [
                    {
                        "conversations": [
                            {"from": "human", "value": ask(n)},
                            {"from": "gpt", "value": f"old{n:02d}x"},
                            {"from": "gpt", "value": say(n)},
                        ]
                    }
                    for n in ROWS
                ]
            )
        },
        CAUSAL,
        Taken(samples=24, learnt=(*OLD, *ANSWERS), read=QUESTIONS),
    ),
    # Filters set all weights of a bad conversation to 0. It has nothing to learn: left out, and counted.
    "weight 0 on every answer of a row": Case(
        "a sample without a target makes no loss, and a row may not vanish unsaid",
        {
            "rows.jsonl": jsonl(
                [
                    {
                        "messages": [
                            *turns(("user", ask(n))),
                            {"role": "assistant", "content": say(n), "weight": 0 if n in (3, 9, 12) else 1},
                        ]
                    }
                    for n in ROWS
                ]
            )
        },
        CAUSAL,
        Taken(
            samples=21,
            learnt=tuple(a for n, a in enumerate(ANSWERS) if n not in (3, 9, 12)),
            unlearnt=(ANSWERS[3], ANSWERS[9], ANSWERS[12]),
            said=(r"\b3\b.*(left out|nothing|no answer|weight|skipped)",),
        ),
    ),
    # datasets.to_parquet() gives every message the keys of all: null is no tool call, and no weight 0.
    "messages from Arrow, keys that are null": Case(
        "a refusal of tool_calls must not be one of an empty cell; weight 0.0 still counts",
        {"rows.parquet": pa.table({"messages": pa.array([r["messages"] for r in FROM_ARROW], MESSAGES)})},
        CAUSAL,
        Taken(samples=24, learnt=ANSWERS, read=(*QUESTIONS, *OLD), unlearnt=OLD),
    ),
    # HuggingFaceH4/ultrafeedback_binarized: all of it at once. The scores are not learnt from: said.
    "the columns of ultrafeedback": Case(
        "the prompt stands in four columns, the scores in two that are not learnt from",
        {
            "rows.jsonl": jsonl(
                [
                    {
                        "prompt": ask(n),
                        "prompt_id": f"{n:064x}",
                        "chosen": turns(("user", ask(n)), ("assistant", say(n))),
                        "rejected": turns(("user", ask(n)), ("assistant", f"no{n:02d}x")),
                        "messages": turns(("user", ask(n)), ("assistant", say(n))),
                        "score_chosen": 8.5,
                        "score_rejected": 2.0,
                    }
                    for n in ROWS
                ]
            )
        },
        PAIRS,
        Taken(
            samples=24,
            learnt=(*ANSWERS, *(f"no{n:02d}x" for n in ROWS)),
            read=QUESTIONS,
            said=(r"\b24\b.*score_chosen",),
        ),
    ),
    # Zip codes, SKUs, shop numbers: 007 is not 7. Read as numbers, two items would be one.
    "ids that begin with zeros": Case(
        "whole floats are integers, but a text of digits stays as it is",
        {
            "interactions.csv": interactions(
                [(f"u{u}", f"{i:03d}" if u % 2 else i, t) for u, i, t in clicks() if i < 10]
            ),
            "items.csv": titles([*range(10), *(f"{n:03d}" for n in range(10))]),
        },
        SHOP,
        Taken(facts={"users": 12, "items": 20, "texts": 20}),
        unsaid=("items have no text",),
    ),
    # The catalogue has ASINs, the log the shop's own numbers. Three examples of each side show it at once.
    "a catalogue of other ids": Case(
        "nothing joins, and training on ids alone is not what was meant",
        {
            "interactions.csv": interactions(CLICKS),
            "items.csv": titles([f"B00{n:04d}X" for n in range(15)]),
        },
        SHOP,
        Taken(said=(r"(B00\d{4}X\b.*){3}",)),
        refused=(r"items\.csv", r"(B00\d{4}X\b.*){3}"),
    ),
    # A log of clicks, not of purchases. The same pair twice is one interaction here: how many went is said.
    "clicks that come again": Case(
        "12 of 84 rows go, and which time is kept decides what is held out",
        {
            "interactions.csv": interactions(
                [*CLICKS, *((u, i, t + 50) for u, i, t in CLICKS if t % 100 == 2)]
            )
        },
        SHOP,
        Taken(
            facts={"users": 12, "items": 15},
            samples=72,
            said=(
                r"\b12\b.*(repeat|again|twice|more than once|"
                r"duplicate|several times|same)",
            ),
        ),
    ),
    # Lines cut out of a JSON array. Python says "Extra data", which tells nobody of the comma.
    "a comma at the end of JSON lines": Case(
        "the line and the cause",
        {"rows.jsonl": ",\n".join(json.dumps(row) for row in INSTRUCTIONS) + "\n"},
        CAUSAL,
        Taken(samples=24, learnt=ANSWERS),
        refused=(r"rows\.jsonl.*line 1\b", r"comma|JSON"),
    ),
    # json.dump(rows, open("train.jsonl", "w"), indent=2) is common. It is read, or --format json is offered.
    "an indented JSON array that is called jsonl": Case(
        "line 1 is `[`, which says nothing",
        {"rows.jsonl": json.dumps(INSTRUCTIONS, indent=2)},
        CAUSAL,
        Taken(samples=24, learnt=ANSWERS),
        refused=(r"rows\.jsonl", r"--format json\b|\.json\b.*(list|array)|(list|array).*\.json\b"),
    ),
    # df.to_json writes null, json.dumps of its rows NaN: a text is missing. Nobody wrote the word "nan".
    "NaN where a text belongs": Case(
        "left out and counted, or refused by its line; never a text",
        {"rows.jsonl": jsonl([{"text": float("nan") if n in (5, 17) else text(n)} for n in range(40)])},
        CAUSAL,
        Taken(
            learnt=tuple(t for n, t in enumerate(texts(40)) if n not in (5, 17)),
            unlearnt=("nan", "NaN"),
            said=(r"\b2\b.*\b(text|rows?)\b",),
        ),
        refused=(r"rows\.jsonl.*line 6\b", r"\btext\b"),
    ),
    # SetFit's data sets: label 0/1 and label_text beside it. Both name classes; the one not read is named.
    "a label and the name of the label": Case(
        "a second column of labels is not dropped in silence",
        {
            "rows.csv": csv(
                [(text(n), n % 2, ("negative", "positive")[n % 2]) for n in ROWS], "text,label,label_text"
            )
        },
        CLASSES,
        Taken(samples=24, labels=("0", "1"), said=("label_text",)),
    ),
    # LLaMA-Factory's KTO in Alpaca form: the mark is called kto_tag, and half of the answers are bad.
    "instructions with a kto_tag": Case(
        "bad answers are not learnt as if they were good",
        {"rows.jsonl": jsonl([{**row, "kto_tag": n % 2 == 0} for n, row in enumerate(INSTRUCTIONS)])},
        CAUSAL,
        Taken(samples=12, learnt=ANSWERS[::2], unlearnt=ANSWERS[1::2], said=(r"\b12\b.*kto_tag",)),
        refused=(r"rows\.jsonl", "kto_tag"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_unseen_input(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path / "case")
