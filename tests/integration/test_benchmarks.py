"""Every benchmark runs by --quick where none ever ran: an empty home, small data made here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from transformers import BertConfig, BertModel

from isobatch.benchmarks.__main__ import BENCHMARKS
from isobatch.data import corpora
from isobatch.tests.integration.helpers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

HUB = ROOT / "tests" / "fixtures" / "hub"
DATA = {"classifier": ("reviews", "encoder"), "recommender": ("films", ""), "sequence-vae": ("text", "")}
"""Benchmark -> its data and its model, by the names of `made`."""
USERS, ITEMS, EACH = 900, 150, 45


def made(folder: Path) -> None:
    """Reviews, a text, films with the protocol of NCF, a small encoder, and a tokenizer."""
    draw = np.random.default_rng(0)
    for name in ("reviews", "text", "films", "encoder", "tokenizer"):
        (folder / name).mkdir()
    words = (["poor", "dull", "cold"], ["fine", "lovely", "warm"])
    for split, count in (("train", 3000), ("dev", 200)):
        rows = [f"the {' '.join(draw.choice(words[n % 2], 3))} one\t{n % 2}" for n in range(count)]
        lines = ["sentence\tlabel", *rows]
        (folder / "reviews" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    for name, texts in corpora.demo_corpus().splits.items():
        (folder / "text" / f"{name}.txt").write_text("\n".join(texts()))
    taken = [draw.permutation(ITEMS) for _ in range(USERS)]
    films = folder / "films"
    rows = [f"{u}\t{i}\t5\t{n}" for u, some in enumerate(taken) for n, i in enumerate(some[:EACH])]
    (films / "some.train.rating").write_text("\n".join(rows) + "\n")
    (films / "some.test.rating").write_text("".join(f"{u}\t{s[EACH]}\t5\t99\n" for u, s in enumerate(taken)))
    others = ("\t".join(map(str, some[EACH + 1 : EACH + 100])) for some in taken)
    (films / "some.test.negative").write_text(
        "".join(f"({u},{taken[u][EACH]})\t{o}\n" for u, o in enumerate(others))
    )
    titles = [f"{i}\t{i}\tFilm {i}, The (1999)\tComedy|Drama" for i in range(ITEMS)]
    (films / "item_map.tsv").write_text("\n".join(["ncf_item\tmovie\ttitle\tgenres", *titles]) + "\n")
    for kind, name in (("encoder", "encoder"), ("decoder", "tokenizer")):
        for file in (HUB / f"models--tests--{kind}" / "snapshots" / "0").glob("tokenizer*.json"):
            shutil.copy(file, folder / name)
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=2000, **shape)).save_pretrained(folder / "encoder")


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_runs_on_a_fresh_machine(name: str, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    words = []
    if name in DATA:
        made(tmp_path)
        named = zip(("--data", "--model"), DATA[name], strict=True)
        words = [f"{flag}={tmp_path / of}" for flag, of in named if of]
    given = {k: v for k, v in os.environ.items() if not k.startswith(("ISOBATCH_", "XDG_", "HF_"))}
    done = subprocess.run(
        [sys.executable, "-P", f"{ROOT}/benchmarks/__main__.py", name, "--quick", *words],
        cwd=tmp_path,
        env={**given, "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
