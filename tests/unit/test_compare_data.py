"""Which rows of two runs' data differ, also where a changed word gave another tokenizer, and rows moved."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from isobatch.engine.forensics.compare_data import TrainingRows, compare_data
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.registry import workload
from isobatch.launch.forensics.diff_text import data_words

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [f"film number {i} was {('bad', 'good')[i % 2]}" for i in range(60)]
LONG = "so long that it has more tokens than every other text of this file"


def rows_of(folder: Path, texts: list[str], task: str = "classifier") -> TrainingRows:
    """The prepared training rows of such texts, with a tokenizer trained on them."""
    folder.mkdir()
    for split in ("train", "valid"):
        rows = [{"text": text, "label": str(n % 2)} for n, text in enumerate(texts)]
        content = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(content)
    chosen = workload(task)
    small = {"model": "tiny", "vocab_size": 300, "batch_size": 8, "max_length": 32}
    recipe, _ = chosen.complete({"data": str(folder), **small})
    _, data = chosen.make(recipe)
    return TrainingRows(data, prepare(data))


def changed(texts: list[str], **rows: str) -> list[str]:
    return [rows.get(f"row{n}", text) for n, text in enumerate(texts)]


@pytest.fixture
def plain(tmp_path: Path) -> TrainingRows:
    return rows_of(tmp_path / "plain", TEXTS)


def test_a_changed_word_is_found_though_the_tokenizer_changes(plain: TrainingRows, tmp_path: Path) -> None:
    other = rows_of(tmp_path / "other", changed(TEXTS, row37="a zebra zebra film"))
    found = compare_data(plain, other)
    assert plain.tokenizer() != other.tokenizer()
    assert (found["changed"], found["changed_rows"], found["tokenizers_differ"]) == ([37], 1, True)
    said = data_words({**found, "rows": [60, 60]})
    assert said == "the tokenizers differ, and with them all tokens; the text changed at sample 37"


def test_rows_of_one_tokenizer_are_compared_by_content(plain: TrainingRows, tmp_path: Path) -> None:
    swapped = [*TEXTS[:7], TEXTS[8], TEXTS[7], *TEXTS[9:]]
    found = compare_data(plain, rows_of(tmp_path / "other", swapped))
    assert (found["changed"], found["tokenizers_differ"], found["alone"]) == ([7, 8], False, [2, 2])


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([*TEXTS[20:], *TEXTS[:20]], "the same rows in another order"),
        ([*TEXTS[:10], *TEXTS[12:]], "other data (A has 60 rows, B 58): A alone has 2 (10, 11)"),
        ([*TEXTS, TEXTS[4]], "other data (A has 60 rows, B 61): B alone has 1 (60)"),
        (
            [f"{text} {LONG}" if n > 40 else text for n, text in enumerate(TEXTS)],
            "the text changed at sample 41, 42, 43, 44, 45, 46, 47, 48, 49, 50 and 9 more",
        ),
    ],
    ids=["rotated", "two less", "one twice", "many"],
)
def test_rows_that_moved_are_no_changed_rows(
    texts: list[str], says: str, plain: TrainingRows, tmp_path: Path
) -> None:
    other = rows_of(tmp_path / "other", texts)
    found = compare_data(plain, other)
    assert says in data_words({**found, "rows": [len(plain), len(other)]})
