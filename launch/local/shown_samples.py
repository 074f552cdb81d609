"""Prepared samples as text, with what is learnt set apart: what a wrong chat template or mask looks like."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.facts import Facts
from isobatch.core.measures import printable
from isobatch.data.preferences.dataset import PairSource
from isobatch.data.tokenized import TokenizedData

COLOURS, BRACKETS = ("\x1b[32m", "\x1b[0m"), ("[[", "]]")
"""What stands around a text that is learnt, on a terminal and elsewhere."""


def shown_samples(data: Any, facts: Facts, count: int, on_terminal: bool, most: int = 1 << 20) -> list[str]:
    """The first `count` training samples, the last `most` tokens of each row, of a pair both; labelled texts
    behind their labels; none where samples are no text that is learnt in parts.
    """
    if not isinstance(data, TokenizedData) or "train" not in facts.samples:
        return []
    source = data.open(Path(facts.folder), "train")
    batch = source.fetch(np.arange(min(count, len(source))))
    if "learn" not in batch:
        described = data.describe_rows(facts, batch) if "label" in batch else []
        return [printable(text[: 4 * most]) + "…" * (len(text) > 4 * most) for text in described]
    tokenizer, (begin, end) = data.prepared_tokenizer(facts), COLOURS if on_terminal else BRACKETS
    names = source.names[: source.rows_at_once] if isinstance(source, PairSource) else ("conversation",)
    columns = (batch["tokens"], batch["learn"], batch.get("row_length", batch["length"])[..., None])
    samples = zip(*(c.reshape(len(c), -1, c.shape[-1]).tolist() for c in columns), strict=True)
    learnt, lines = "coloured" if on_terminal else "in [[ ]]", []
    for number, rows in enumerate(samples, 1):
        for name, tokens, learn, (length,) in zip(names, *rows, strict=False):  # KTO learns the first alone
            row, text = [*zip(tokens, learn, strict=True)][:length][-most:], "…" * (length > most)
            for is_learnt, part in itertools.groupby(row, lambda pair: pair[1] != 0):
                said = tokenizer.decode([token for token, _ in part], skip_special_tokens=False)
                said = "\n".join(map(printable, said.split("\n")))
                text += f"{begin}{said}{end}" if is_learnt else said
            lines.append(f"--- sample {number}, {name}, learnt is {learnt}\n{text}")
    return lines
