"""Prepared samples as text, with what is learnt set apart: what a wrong chat template or mask looks like."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.measures import printable
from isobatch.data.tokenized import TokenizedData

if TYPE_CHECKING:
    from isobatch.core.facts import Facts

COLOURS, BRACKETS = ("\x1b[32m", "\x1b[0m"), ("[[", "]]")
"""What stands around a text that is learnt, on a terminal and elsewhere."""


def shown_samples(data: Any, facts: Facts, count: int, on_terminal: bool, most: int = 1 << 20) -> list[str]:
    """The first `count` training samples, the last `most` tokens of each, of a pair both; none where samples
    are no text that is learnt in parts.
    """
    if not isinstance(data, TokenizedData) or "train" not in facts.samples:
        return []
    source = data.open(Path(facts.folder), "train")
    batch = source.fetch(np.arange(min(count, len(source))))
    if "learn" not in batch:
        return []
    tokenizer, (begin, end) = data.prepared_tokenizer(facts), COLOURS if on_terminal else BRACKETS
    width = batch["tokens"].shape[-1]
    lengths = np.ravel(batch.get("row_length", batch["length"]))
    lines = []
    for number, (row, mask) in enumerate(
        zip(batch["tokens"].reshape(-1, width), batch["learn"].reshape(-1, width), strict=True)
    ):
        kept = slice(max(0, lengths[number] - most), lengths[number])
        pairs = zip(row[kept].tolist(), mask[kept].tolist(), strict=True)
        text = ""
        for is_learnt, part in itertools.groupby(pairs, lambda pair: bool(pair[1])):
            said = "\n".join(
                printable(line)
                for line in tokenizer.decode([t for t, _ in part], skip_special_tokens=False).split("\n")
            )
            text += f"{begin}{said}{end}" if is_learnt else said
        lines.append(
            f"--- sample {number + 1}, learnt is {'coloured' if on_terminal else 'in [[ ]]'}\n{text}"
        )
    return lines
