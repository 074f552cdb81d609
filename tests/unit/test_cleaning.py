"""Tests of data/cleaning.py: what each step of --clean does to texts, what it counts, and what is refused."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import UserError
from isobatch.data import cleaning, tokenizers
from isobatch.data.cleaning import CONTROL, CleaningPipeline, count_words, parse_steps
from isobatch.data.text.dataset import Text, TextOptions

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER = {"model": "tiny", "tokenizer": None, "revision": None, "format": None, "max_length": 64}


def make(data: Path, *clean: str, **changes: Any) -> Text:
    options = {k: changes.pop(k) for k in list(changes) if k in TextOptions.__dataclass_fields__}
    recipe = SimpleNamespace(data=str(data), **{**TOKENIZER, **changes})
    return Text(recipe, TextOptions(clean=clean or None, vocab_size=300, **options))


def cleaned(texts: list[str], *clean: str) -> tuple[list[str], list[str]]:
    """The texts that are left, and the notes."""
    found = CleaningPipeline(parse_steps(clean))
    return list(found.clean_texts(texts)), list(found.notes())


def test_steps_have_one_order_and_their_usual_numbers() -> None:
    typed = ["duplicates", " html", "short", "unicode", "control"]
    assert " ".join(map(str, parse_steps(typed))) == "html unicode control short=10 duplicates"
    assert str(parse_steps(["short=3"])[0]) == "short=3"
    assert parse_steps([]) == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["htlm"], r"--clean htlm: .*html\?.*steps: html, unicode, "),
        (["near=0.8"], "--clean near=0.8: there is no such step"),
        *(
            ([word], f"--clean {word}: only short takes")
            for word in ("html=3", "short=ten", "short=0", "short=2.5")
        ),
        (["short=3", "html", "short=4"], "--clean short=3,html,short=4: short is named twice"),
    ],
)
def test_what_is_no_step_is_refused_in_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "train.txt").write_text("words\n")
    with pytest.raises(UserError, match=message) as error:
        make(tmp_path, *words).check()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("a <b>bold</b> word", "a bold word"),
        ("<a href=\"x?a>b\" title='q'>link</a>", "link"),
        ("<div>\n  <p>one</p>\n\n  <p>two   words</p>\n</div>", "one\ntwo words"),
        ("a<!-- no\nmore -->b<!DOCTYPE html>", "ab"),
        ("R&amp;D &lt;b&gt; &#233;&#xE9;&nbsp;x", "R&D <b> éé x"),
        ("AT&T ?a=1&copy=2 &unknown; &", "AT&T ?a=1&copy=2 &unknown; &"),
        ("a < b and b > c, List<int>, <unk>, <|end|>, 1 <2", None),
        ("  if x:\n      y <i>z</i>", "  if x:\n      y z"),
    ],
)
def test_html_leaves_what_a_page_shows(page: str, text: str | None) -> None:
    assert cleaning.to_text(page) == (page if text is None else text)


def test_html_is_quick_on_hostile_text() -> None:
    began = time.perf_counter()
    for hostile in ("<a " * 20000, "<a '" * 20000, "<script>" * 5000, "<!--" * 20000, "&a" * 50000):
        cleaning.to_text(hostile)
        list(cleaning.remove_blocks([hostile]))
    assert time.perf_counter() - began < 3


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a\x00b\x1bc\rd\x7f\x85", "abcd"),
        ("zero\u200bwidth\ufeff \u2060\u202esoft\xadhyphen", "zerowidth softhyphen"),
        ("la\u200dtin \u200dspace", "latin space"),
        ("می\u200cخواهم", "می\u200cخواهم"),  # a joiner that spells Persian
        ("👩\u200d💻", "👩\u200d💻"),
    ],
)
def test_control_and_zero_width_characters_go(text: str, left: str) -> None:
    assert CONTROL.sub("", text) == left


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("three short words", 3),
        ("你好世界", 4),
        # signs are no words
        ("GPT-2 很好 用", 4),
        ("ひらがなカタカナ", 8),
        ("한국어 문장", 2),  # Korean has spaces
        ("สวัสดีชาวโลก", 3),  # twelve characters without a space
    ],
)
def test_words_are_counted_in_any_script(text: str, count: int) -> None:
    assert count_words(text) == count


def test_short_texts_are_dropped_and_counted() -> None:
    left, notes = cleaned(["one two", "one two three", "你好", "你好世界", "x"], "short=2")
    assert left == ["one two three", "你好世界"]
    assert notes == ["clean short=2: 3 of 5 texts dropped"]


def test_duplicates_are_dropped_white_space_aside() -> None:
    left, notes = cleaned(["a  b", "A b", "a b\n", "b", "a\tb"], "duplicates")
    assert left == ["a  b", "A b", "b"]
    assert notes == ["clean duplicates: 2 of 5 texts dropped"]


def lines(text: str, *clean: str, cut: int = 1 << 20) -> str:
    pieces = text.splitlines(keepends=True)
    groups = ["".join(pieces[i : i + cut]) for i in range(0, len(pieces), cut)]
    return "".join(CleaningPipeline(parse_steps(clean), "lines").clean_lines(groups))


@pytest.mark.parametrize("cut", [1, 2, 1000])
def test_scripts_that_span_lines_go_however_the_stream_is_cut(cut: int) -> None:
    text = "one\n<script>\nlet x\n</script>two\nthree <!-- a\n\nb --> four\nfive <br> six\n"
    assert lines(text, "html", cut=cut) == "one\ntwo\nthree  four\nfive six\n"
    assert lines("one\n<script>\nnever closed\n", "html", cut=cut) == "one\nnever closed\n"


def test_a_script_that_is_never_closed_waits_no_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "MAX_BLOCK_CHARACTERS", 30)
    found = list(cleaning.remove_blocks(["a <!-- b\n", "c\n", "d" * 30 + "\n", "e\n"]))
    assert found == ["", "", "a <!-- b\nc\n" + "d" * 30 + "\n", "e\n"]


def test_prepared_text_is_clean_and_the_notes_say_so(tmp_path: Path) -> None:
    data = tmp_path / "d"
    data.mkdir()
    body = "".join(f"a line with the number {i} in <b>bold</b>\n" for i in range(60))
    (data / "train.txt").write_text(body + "short\n" + body)
    (data / "valid.txt").write_text(body[:400])
    text = make(data, "duplicates", "short=1", "html")
    extra = text.prepare(tmp_path / "out")
    tokenizer = tokenizers.open_tokenizer(tmp_path / "out" / "tokenizer.json")
    tokens = text.open(tmp_path / "out", "train").columns["tokens"].values  # type: ignore[attr-defined]
    assert tokenizer.decode(tokens.tolist()) == body.replace("<b>", "").replace("</b>", "")
    assert [note for note in extra["notes"] if note.startswith("clean")] == [
        "clean html: 130 of 131 lines changed",  # 121 lines of train, 10 of valid
        "clean short=1: 1 of 131 lines dropped",
        "clean duplicates: 60 of 130 lines dropped",
    ]
    assert extra["prompt"] == "a line with the number 0 in bold"
    assert text.identity() != make(data).identity()
    assert text.identity() == make(data, "html", "short=1", "duplicates").identity()


CHATS = [
    {"instruction": "Say <b>hi</b>", "output": "h\u200bi"},
    {"instruction": "Say hi", "output": "hi"},
    {"instruction": "Say what", "output": "<br>"},
    {"instruction": "Say e\u0301", "output": "é"},
]


def test_fields_of_conversations_are_cleaned_and_the_whole_compared(tmp_path: Path) -> None:
    valid = "".join(json.dumps(row) + "\n" for row in CHATS)
    (tmp_path / "valid.jsonl").write_text(valid)
    (tmp_path / "train.jsonl").write_text(valid.replace("Say", "Tell"))
    text = make(tmp_path, "html", "unicode", "control", "short", "duplicates", template="plain")
    extra = text.prepare(tmp_path / "out")
    assert extra["splits"]["train"]["conversations"] == 2
    assert extra["prompts"] == [["Say hi\n", "hi"], ["Say é\n", "é"]]
    notes = "\n".join(extra["notes"])
    assert "train: rows left out: 1 with an empty answer" in notes
    assert "clean short=10: 0 of 0 conversations dropped" in notes
    # Per split: eight fields; of the four conversations the first two are one text then.
    assert "clean html: 4 of 16 fields changed" in notes
    assert "clean duplicates: 2 of 8 conversations dropped" in notes


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {n}", "output": str(n)} for n in (0, 1, 2, 3, 0, 1)]
    for split, chosen in (("train", rows), ("valid", [*rows[1:3], {**rows[3], "instruction": " Say  3"}])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    extra = make(tmp_path, "duplicates", template="plain").prepare(tmp_path / "out")
    assert {split: sizes["conversations"] for split, sizes in extra["splits"].items()} == {
        "train": 1,
        "valid": 3,
    }
    assert not any("are in train too" in note for note in extra["notes"])
    leaking = make(tmp_path, template="plain").prepare(tmp_path / "leaking")["notes"]
    assert "valid: 2 of 3 rows are in train too: leave them out of one of the two" in leaking
    assert "--clean duplicates leaves such rows out of training" in leaking
