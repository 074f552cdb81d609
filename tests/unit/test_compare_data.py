"""Which rows of two runs' data differ, also where a changed word gave another tokenizer, and rows moved."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from isobatch.engine.loading.prepare import prepare
from isobatch.engine.registry import workload
from isobatch.launch.forensics.diff import changed_rows, verdict_of

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.core.facts import Facts
    from isobatch.data.base import Data

TEXTS = [f"film number {i} was {('bad', 'good')[i % 2]}" for i in range(60)]
LONG = "so long that it has more tokens than every other text of this file"


def rows_of(folder: Path, texts: list[str], task: str = "classifier") -> tuple[Data, Facts]:
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
    return data, prepare(data)


def changed(texts: list[str], **rows: str) -> list[str]:
    return [rows.get(f"row{n}", text) for n, text in enumerate(texts)]


def test_a_changed_word_is_found_though_the_tokenizer_changes(tmp_path: Path) -> None:
    plain = rows_of(tmp_path / "plain", TEXTS)
    found = changed_rows(plain, rows_of(tmp_path / "other", changed(TEXTS, row37="a zebra zebra film")))
    assert found == {"changed": [37], "changed_rows": 1, "tokenizers_differ": True}
    log = {"kind": "drift", "figure": "loss", "step": 0, "phase": "train", "values": [0.0, 0.0]}
    none: dict[str, Any] = {"recipe": {}, "plan": {}, "versions": {}}
    samples = {**found, "rows": [60, 60]}
    said, _ = verdict_of({"log": log, "samples": samples, "data_differs": True, **none})
    assert said == "the tokenizers differ, and with them all tokens; the text changed at sample 37"
