"""Inputs after public reports, one of each kind: what goes in is learnt, or said.

Each case was once lost, wrong or answered with a misleading sentence, or was written down with what must come
of it before the first run.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from isobatch.tests.integration.helpers import run_code, succeed, summary
from isobatch.tests.integration.reported import (
    CAUSAL,
    CLASSES,
    COLOURS,
    PAIRS,
    SHOP,
    Case,
    File,
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
ANSWERS = tuple(f"say{n:02d}x" for n in ROWS)
QUESTIONS = tuple(f"ask{n:02d}x" for n in ROWS)
OLD = tuple(f"old{n:02d}x" for n in ROWS)
NO = tuple(f"no{n:02d}x" for n in ROWS)
TOLD = Taken(samples=24, learnt=ANSWERS, read=QUESTIONS)
SYSTEM = Taken(samples=24, learnt=ANSWERS, read=("always in red", *QUESTIONS))
MENDED = Taken(samples=24, learnt=ANSWERS, read=(*QUESTIONS, *OLD), unlearnt=OLD)
TWO = Taken(samples=24, labels=("x", "y"))
READ = Taken(samples=24, labels=("neg", "pos"))
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def chats(
    of: Any, taken: Taken | None = None, *refused: str, words: str = CAUSAL, unsaid: tuple[str, ...] = ()
) -> Case:
    """JSON lines with a row for each number."""
    return Case({"rows.jsonl": jsonl([of(n) for n in ROWS])}, words, taken, refused, unsaid)


def table(
    rows: list[Any],
    header: str = "text,label",
    taken: Taken | None = READ,
    *refused: str,
    mark: str = ",",
    words: str = CLASSES,
) -> Case:
    return Case({"rows.csv": csv(rows, header, mark)}, words, taken, refused)


def shop(log: File, taken: Taken | None = FULL_SHOP, *refused: str, words: str = SHOP, **more: File) -> Case:
    """Interactions, and other tables by their names."""
    name = "interactions.parquet" if isinstance(log, pa.Table) else "interactions.csv"
    files = {f"{key}.csv": content for key, content in more.items()}
    return Case(
        {name: log, **files}, words, taken, refused, ("items have no text",) if more and not refused else ()
    )


def said_by(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def told(n: int, *more: tuple[str, Any]) -> list[dict[str, Any]]:
    """Messages of a question, `more`, and its answer."""
    return turns(("user", ask(n)), *more, ("assistant", say(n)))


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
    # The column was not read, without a word.
    "a system text": chats(lambda n: {"system": "always in red", "conversations": shared(n)}, SYSTEM),
    # Answers were learnt without the passage that they are about.
    "a passage": chats(lambda n: {"context": "always in red", "question": ask(n), "answer": say(n)}, SYSTEM),
    # An answer that is marked was learnt.
    "a turn that is marked": chats(lambda n: mended(n, *MARKS[n % len(MARKS)]), MENDED),
    # datasets.to_parquet() gives every message the keys of all: null is no tool call, and no weight 0.
    "messages from Arrow": Case(
        {"rows.parquet": pa.table({"messages": pa.array([r["messages"] for r in FROM_ARROW], ARROW)})},
        CAUSAL,
        MENDED,
    ),
    # Filters set all weights of a bad conversation to 0. It has nothing to learn: left out, and counted.
    "weight 0 on every answer": chats(
        lambda n: {
            "messages": [
                *turns(("user", ask(n))),
                said_by("assistant", say(n), weight=0 if n in (3, 9, 12) else 1),
            ]
        },
        Taken(
            samples=21,
            learnt=tuple(a for n, a in enumerate(ANSWERS) if n not in (3, 9, 12)),
            unlearnt=(ANSWERS[3], ANSWERS[9], ANSWERS[12]),
            said=(r"\b3\b.*(left out|nothing|no answer|weight|skipped)",),
        ),
    ),
    # ShareGPT dumps hold an answer that goes on. ChatML can write two turns; both are answers.
    "two answers in a row": chats(
        lambda n: {"conversations": shared(n, ("gpt", f"old{n:02d}x"))},
        Taken(samples=24, learnt=(*OLD, *ANSWERS), read=QUESTIONS),
    ),
    # The template drops them: the first answer was learnt without, and not a word said.
    "thoughts of an earlier turn": chats(
        lambda n: {
            "messages": turns(
                ("user", "what is sky"),
                ("assistant", "<think>\nfirst thought\n</think>\n\nblue"),
                ("user", ask(n)),
                ("assistant", f"<think>\nlast thought\n</think>\n\n{say(n)}"),
            )
        },
        Taken(
            samples=24,
            learnt=(*ANSWERS, "last thought"),
            said=(r"\b24\b.*(template|left out|leaves out)",),
        ),
        words=CAUSAL.replace("qwen2", "qwen3"),
    ),
    # Another tool's name of the text in a part.
    "parts called value": chats(
        lambda n: {
            "messages": turns(("user", parts(ask(n), "value")), ("assistant", parts(say(n), "value")))
        },
        TOLD,
    ),
    # As TRL writes them.
    "prompt and completion in parts": chats(
        lambda n: {
            "prompt": turns(("user", parts(ask(n)))),
            "completion": turns(("assistant", parts(say(n)))),
        },
        TOLD,
    ),
    # Refused by a list of roles, which does not say that tools are not learnt.
    "turns that call functions": chats(
        lambda n: {"conversations": shared(n, ("function_call", '{"name": "look"}'), ("observation", "7"))},
        None,
        *(LINE_1, "function_call", r"\btools?\b"),
        unsaid=("did you mean",),
    ),
    # OpenAI's files: the turn that calls has no content. The cause is the call, not the null.
    "null content beside a tool call": chats(
        lambda n: {
            "messages": [
                said_by("user", ask(n)),
                said_by("assistant", None, tool_calls=[CALL]),
                said_by("tool", "7", tool_call_id="1"),
                said_by("assistant", say(n)),
            ]
        },
        None,
        *(LINE_1, r"\btool"),
        unsaid=("did you mean",),
    ),
    # A model that calls tools was learnt without them.
    "a column of tools": chats(
        lambda n: {"messages": told(n), "tools": [{"type": "function", "function": {"name": "look"}}]},
        None,
        *(LINE_1, r"\btools\b"),
    ),
    # The reasoning was lost.
    "reasoning beside an answer": chats(
        lambda n: {
            "messages": [
                *turns(("user", ask(n))),
                said_by("assistant", say(n), reasoning_content="because"),
            ]
        },
        None,
        *(LINE_1, "reasoning_content"),
    ),
    # It is no text.
    "a picture among the parts": chats(
        lambda n: {
            "messages": turns(("user", [*parts(ask(n)), {"type": "image_url"}]), ("assistant", say(n)))
        },
        None,
        *(LINE_1, "image"),
    ),
    # Pictures were dropped and their marks learnt as text.
    "a column of images": chats(
        lambda n: {
            "messages": turns(("user", f"<image>{ask(n)}"), ("assistant", say(n))),
            "images": ["a.png"],
        },
        None,
        *(r"rows\.jsonl", "image"),
    ),
    # Told of messages, which these rows have not.
    "an answer that is a list": chats(
        lambda n: {"question": ask(n), "answer": [say(n), "the bird"]},
        None,
        *(LINE_1, r"\banswer\b", r"\blist\b"),
        unsaid=("message 1",),
    ),
    # What is not read is named once, with its count.
    "a key of a message that nobody reads": chats(
        lambda n: {"messages": [*turns(("user", ask(n)), annotator="ann"), *turns(("assistant", say(n)))]},
        Taken(samples=24, learnt=ANSWERS, said=(r"\b24\b.*annotator",)),
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
    # LLaMA-Factory's KTO in Alpaca form.
    "instructions with a kto_tag": chats(
        lambda n: {"instruction": ask(n), "output": say(n), "kto_tag": n % 2 == 0},
        Taken(samples=12, learnt=ANSWERS[::2], unlearnt=ANSWERS[1::2], said=(r"\b12\b.*kto_tag",)),
        *(r"rows\.jsonl", "kto_tag"),
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
    # Excel and many data portals write both; the first column is then called \ufeff"text".
    "a byte order mark before a quoted header": Case(
        {"rows.csv": csv([(f'"{t}, or not"', c) for t, c in LABELLED], '"text","label"').encode("utf-8-sig")},
        CLASSES,
        READ,
    ),
    # Excel in most of Europe. Each text has more commas than the row has semicolons.
    "semicolons, and commas in the texts": table(
        [(f"{t}, a dog, a bird, a roof", c) for t, c in LABELLED],
        "text;label",
        Taken(samples=24, labels=("neg", "pos"), said=(r"semicolon|[\"'`(];",)),
        mark=";",
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
    # pandas wrote one of them with a gap: one class, not two.
    "1.0 in one file and 1 in another": Case(
        {
            "train.csv": csv([(text(n), f"{n % 2}.0") for n in ROWS]),
            "valid.csv": csv([(text(n + 30), n % 2) for n in range(6)]),
        },
        CLASSES,
        Taken(samples=30, labels=("0", "1")),
    ),
    # 51 classes from 0.0 to 5.0.
    "scores of one decimal": table(
        [(text(n % 90), text(n % 89), f"{n % 51 / 10:.1f}") for n in range(120)],
        "sentence1,sentence2,score",
        None,
        *(r"rows\.csv", r"\bscore\b", r"regression|decimal"),
        words=f"{CLASSES} --label-column score",
    ),
    # A list is no class.
    "several labels a row": chats(
        lambda n: {"text": text(n), "label": ["joy", "fear"][: 1 + n % 2]},
        None,
        *(LINE_1, r"\blabel", r"multi|several|list"),
        words=CLASSES,
    ),
    # SetFit's data sets: both name classes; the one not read is named.
    "a label and the name of the label": table(
        [(text(n), n % 2, ("negative", "positive")[n % 2]) for n in ROWS],
        "text,label,label_text",
        Taken(samples=24, labels=("0", "1"), said=("label_text",)),
    ),
    # 39 rows became part of one text.
    "a quote that is never closed": table(
        [("xy"[n % 2], ('"' if n == 20 else "") + text(n)) for n in range(40)],
        "label,text",
        None,
        *(r"rows\.csv.*line 22\b", r"\bquote"),
    ),
    # A quote that is closed lines later is one row, as always.
    "a text with lines in quotes": table([(f'"{t}\n{text(30)}"', c) for t, c in LABELLED]),
    # The last was taken, without a word.
    "two columns of one name": table(
        [(text(n), f"other {n}", "xy"[n % 2]) for n in ROWS],
        "text,text,label",
        Taken(samples=24, labels=("x", "y"), said=(rf"\btext\b.*{TWICE}|{TWICE}.*\btext\b",)),
        *(r"rows\.csv", r"\btext\b", TWICE),
    ),
    # Asked for a column that it showed.
    "a blank in a header": table([(t, f" {c}") for t, c in LABELLED], "text, label"),
    # Of a table without a header the first row was taken for names.
    "columns by number": Case(
        {"rows.tsv": csv([(text(n), f"id{n}", "xy"[n % 2]) for n in ROWS[1:]], f"{text(0)}\tid0\tx", "\t")},
        f"{CLASSES} --text-column 1 --label-column 3",
        TWO,
    ),
    # The way out is the columns' numbers.
    "no header and no number": table(
        [(text(n), "xy"[n % 2]) for n in ROWS[1:]],
        f"{text(0)},x",
        None,
        *(r"rows\.csv", r"--(text|label)-column", r"header|number|\b1\b"),
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
    # An object of lists of one length is columns.
    "columns in an object": Case(
        {"rows.json": json.dumps({"text": [*map(text, ROWS)], "label": ["xy"[n % 2] for n in ROWS]})},
        CLASSES,
        TWO,
    ),
    # The first list of the object was taken for them: its tags.
    "rows under a key": Case(
        {"rows.json": json.dumps({"tags": ["x", "y"], "data": [{"text": text(n)} for n in ROWS]})},
        CAUSAL,
        Taken(learnt=texts(24)),
        (r"rows\.json", r"\bdata\b"),
    ),
    # CoNLL has a class for each word.
    "a column of words and tags": Case(
        {"rows.conll": "".join("the\tO\nred\tO\ncat\tB-animal\n\n" for _ in ROWS)},
        CLASSES,
        refused=(r"rows\.conll", "--format"),
    ),
    # Half of the rows vanished, and the sentence blamed the validation split.
    "rows without the text": Case(
        {"rows.jsonl": jsonl([{"text" if n < 20 else "content": text(n)} for n in range(40)])},
        CAUSAL,
        Taken(learnt=texts(20), said=(r"\b20\b.*\btext\b",)),
        (r"rows\.jsonl.*line 39\b", r"\btext\b"),
    ),
    # --format was offered, which cannot help.
    "a packed file": Case(
        {"rows.jsonl.gz": gzip.compress(jsonl([{"text": text(n)} for n in ROWS]).encode())},
        CAUSAL,
        Taken(learnt=texts(24)),
        (r"rows\.jsonl\.gz", r"gunzip|unpack|compress"),
        ("--format",),
    ),
}
BOOKS = titles(list(range(15)))
SHOPS = {
    # A float64 column, as pandas has after a merge: no title joined, and twice the items.
    "ids that became decimal": shop(
        pa.table(
            {
                "user_id": [u for u, _, _ in CLICKS],
                "item_id": [float(i) for _, i, _ in CLICKS],
                "timestamp": [t for _, _, t in CLICKS],
            }
        ),
        items=BOOKS,
    ),
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
    # Named neither file nor line.
    "an id that is missing": shop(
        interactions([("" if n == 40 else u, i, t) for n, (u, i, t) in enumerate(CLICKS)]),
        None,
        *(r"interactions\.csv.*line 42\b", r"\buser"),
    ),
    # 1 of 5 counted as taken, and nothing told of --min-rating.
    "bad ratings": shop(
        interactions([(u, i, 1 + i % 5) for u, i, _ in CLICKS], "user_id,item_id,rating"),
        Taken(facts={"users": 12, "items": 15}, said=("--min-rating",)),
    ),
    # The last title won, without a word.
    "an item with two rows": shop(
        interactions(CLICKS),
        Taken(facts={"items": 15, "texts": 15}, said=(rf"\bitems?\b.*{TWICE}|{TWICE}.*\b(items?|ids?)\b",)),
        *(r"items\.csv", TWICE),
        items=BOOKS + "3,another book\n",
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
    # The endings .inter and .item, names with types.
    "RecBole's files": Case(
        {
            "shop.inter": csv(CLICKS, "user_id:token\titem_id:token\ttimestamp:float", "\t"),
            "shop.item": csv([(n, f"book {n}") for n in range(15)], "item_id:token\ttitle:token_seq", "\t"),
        },
        SHOP,
        FULL_SHOP,
        unsaid=("items have no text",),
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


def test_one_user_has_no_unseen_item(tmp_path: Path) -> None:
    """That user is left out of the ranking and counted; the figure is a mean over the 11 others."""
    rows = [(99, item, 1_700_000_000 + item) for item in range(15)] + [c for c in CLICKS if c[0]]
    words = "auto --task recommender --data {data} --preset ids --epochs 1 --least-steps 0 --name r"
    said = Taken(said=(r"\b1\b.{0,40}\busers?\b.*(unseen|every item|all items|left out|took all)",))
    check(Case({"interactions.csv": interactions(rows)}, words, said), tmp_path / "case")
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
    succeed("auto", "--task", "classifier", *words, *sizes, cwd=folder)
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
    succeed("export", run, "--to", "onnx", cwd=tmp_path)
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
