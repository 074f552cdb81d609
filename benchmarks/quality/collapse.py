"""Posterior collapse on real sentences: a plain VAE, and what keeps it from collapsing.

python -m benchmarks collapse --data FOLDER [--only free-bits]

Each recipe trains two epochs on three tenths of the data. The plain one must collapse and its monitor must
say so; free bits and the remedy must keep units active. Runs and their plots stay in runs/benchmark-collapse.

Published, by LSTMs of 1,024 units on longer texts after tens of epochs (He et al. 2019, nll / KL / mutual
information / active units): Yahoo, plain 328.6 / 0 / 0 / 0, their aggressive training 326.7 / 5.7 / 2.9 / 15.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.package import own_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.benchmarks.report import Row

FOLDER = Path("runs") / "benchmark-collapse"
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "free-bits": {"free_bits": 4},
    "cyclical": {"kl_schedule": "cyclical"},
    "remedy": {"on_collapse": "remedy"},
    "pretrain": {"free_bits": 4, "pretrain": 0.3},
}
"""What differs from the plain VAE."""
SIZES = {True: {"train_fraction": 0.05, "hidden": 64}, False: {"train_fraction": 0.3}}
"""Whether it is quick -> what all recipes share."""
IW_SAMPLES = {True: 5, False: 20}


def measure(quick: bool, data: str, only: str = "") -> Iterator[Row]:
    """A row per recipe; `only`: the name of one."""
    for name, recipe in RECIPES.items():
        if only in ("", name):
            yield train(name, recipe, quick, data)


def train(name: str, recipe: dict[str, Any], quick: bool, data: str) -> Row:
    """Held-out figures of one recipe, and the monitor's verdicts on the way."""
    values = {"task": "sequence-vae", "data": Path(data).resolve(), "epochs": 2, **SIZES[quick], **recipe}
    run = FOLDER / (f"{name}-quick" if quick else name)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]
    _command("auto", *flags, "--quiet", "--out", str(FOLDER), "--name", run.name)
    found = json.loads(_command("evaluate", str(run), "--iw-samples", str(IW_SAMPLES[quick]), "--json"))[
        "valid"
    ]
    verdicts = _verdicts(run)
    if not quick:
        check(name, found, verdicts)
    columns = ("nll", "reconstruction", "kl", "active_units", "mutual_information", "iw_nll", "iw_perplexity")
    return {
        "recipe": name,
        **{column: round(found[column], 3) for column in columns},
        "verdicts": ", ".join(f"{state} at {step}" for step, state in verdicts),
    }


def check(name: str, found: dict[str, Any], verdicts: list[tuple[int, str]]) -> None:
    """Raise RuntimeError where a recipe has not come to what it must."""
    if name == "plain" and (found["kl"] >= 0.1 or found["active_units"] or verdicts[-1][1] != "collapsed"):
        raise RuntimeError(f"the plain VAE has not collapsed: {found}, {verdicts}")
    if name in ("free-bits", "remedy") and not (found["kl"] > 1 and found["active_units"]):
        raise RuntimeError(f"{name}: the VAE has collapsed: {found}")


def _command(*words: str) -> str:
    ended = subprocess.run(own_command(*words), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    return ended.stdout


def _verdicts(run: Path) -> list[tuple[int, str]]:
    """(step, state) wherever the monitor's verdict changed."""
    rows = map(json.loads, (run / "decisions.jsonl").read_text().splitlines())
    return [(row["step"], row["state"]) for row in rows if row["decision"] == "posterior"]
