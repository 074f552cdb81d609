"""`generate --compare-bits`: a text written in 16, 8 and 4 bits, with the speed and memory of each."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.measures import format_bytes, printable
from isobatch.core.terminal.status import doing
from isobatch.launch.report.child_process import call_in_child
from isobatch.launch.report.tables import text_table
from isobatch.models.causal_lm.generation import Sampling, TextStream, open_for_generation

BITS = (16, 8, 4)
WARM_UP_TOKENS = 4
ROUNDS = 3
HEAD = ["bits", "tokens/s", "against 16", "first token", "weights", "text"]
WIDTH = 1000
"""Lines are cut by no terminal here: the text of each comes last."""


def print_compared_bits(folder: Path, remote_code: bool, prompt: Any, sampling: Sampling, json: bool) -> int:
    """Write with a folder's model in each precision, in a process of its own; a table, or one JSON object."""
    rows = []
    for bits in BITS:
        doing(f"writing in {bits} bits")
        rows.append(
            call_in_child(
                "launch.commands.compare_bits:measure",
                final=str(folder.resolve()),
                bits=bits,
                remote_code=remote_code,
                prompt=prompt,
                sampling=asdict(sampling),
            )
        )
    if json:
        print(atomic_files.json_text({"bits": rows}, ensure_ascii=False))
    else:
        print(printable(text_table([HEAD, *(_cells(row, rows[0]) for row in rows)], WIDTH)))
    return 0


def _cells(row: dict[str, Any], first: dict[str, Any]) -> list[str]:
    rate, base = row["tokens_per_second"], first["tokens_per_second"]
    return [
        str(row["bits"]),
        f"{rate:,.1f}",
        f"{rate / base:.2f}x" if base else "",
        f"{1000 * row['first_token_seconds']:.0f} ms",
        format_bytes(row["weight_bytes"]),
        " ".join(row["text"].split())[:200],
    ]


def measure(
    final: str, bits: int, remote_code: bool, prompt: Any, sampling: dict[str, Any]
) -> dict[str, Any]:
    """text, tokens, tokens_per_second behind the first token (the fastest of some rounds),
    first_token_seconds, and weight_bytes of the model. JSON in and out.
    """
    model, tokenizer = open_for_generation(Path(final), bits, remote_code)
    asked = prompt if isinstance(prompt, str) else [tuple(part) for part in prompt]
    _write(model, tokenizer, asked, Sampling(**{**sampling, "max_new_tokens": WARM_UP_TOKENS}))
    rounds = [_write(model, tokenizer, asked, Sampling(**sampling)) for _ in range(ROUNDS)]
    found = max(rounds, key=lambda one: one["tokens_per_second"])
    tensors = [*model.parameters(), *model.buffers()]
    return {"bits": bits, **found, "weight_bytes": sum(t.numel() * t.element_size() for t in tensors)}


def _write(model: Any, tokenizer: Any, prompt: Any, sampling: Sampling) -> dict[str, Any]:
    began = time.perf_counter()
    stream = TextStream(model, tokenizer, prompt, sampling)
    pieces, first = [], None
    for piece in stream:
        first = first or (time.perf_counter(), stream.tokens)
        pieces.append(piece)
    ended = time.perf_counter()
    first_at, first_tokens = first or (ended, 0)
    rest = stream.tokens - first_tokens
    return {
        "text": "".join(pieces),
        "tokens": stream.tokens,
        "first_token_seconds": round(first_at - began, 4),
        "tokens_per_second": round(rest / (ended - first_at), 2) if rest > 0 else 0.0,
    }
