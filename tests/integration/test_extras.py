"""Every module imports, and the plain workloads train, where no library of an extra is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

from isobatch.core.extras import EXTRAS
from isobatch.tests.paths import REGISTER, ROOT

if TYPE_CHECKING:
    from pathlib import Path

WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({sorted(EXTRAS)}))\n{REGISTER}"
"""None in sys.modules: such a library is neither found nor imported."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BEHIND = (
    "isobatch.launch.clusters.ray.workers",
    "isobatch.launch.serving.",
    "isobatch.models.causal_lm.gguf_export",
)
"""Imported by Ray's own processes, and by `serve` and `export` once they have asked for their libraries."""
SHOP = ["user,item,timestamp", *(f"u{n % 20},i{n * 7 % 11},{n}" for n in range(200))]


def without_extras(code: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`code` in an interpreter, and in all those that it starts, for which the libraries are not there."""
    (folder / "sitecustomize.py").write_text(WITHOUT.partition("\n")[0])
    return subprocess.run(
        [sys.executable, "-c", f"{WITHOUT}{code}", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


EACH = """
import json
from isobatch.launch.cli import main
for words in json.loads(sys.argv[1]):
    code = main(words)
    print(f"\\nended with {code}", file=sys.stderr)
"""
"""Commands, one after the other in one interpreter."""


def test_every_module_imports_and_a_chat_and_a_recommender_train_and_answer(tmp_path: Path) -> None:
    files = [f for top in ("core", "data", "models", "engine", "launch") for f in (ROOT / top).rglob("*.py")]
    scripts = {"_root", "loopback", "train", "torchrun", "__main__"}
    names = [".".join(("isobatch", *f.relative_to(ROOT).with_suffix("").parts)) for f in files]
    names = [n for n in names if n.rpartition(".")[2] not in scripts and not n.startswith(BEHIND)]
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)\n{EACH}"
    row = {"instruction": "When do you open?", "output": "At nine."}
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps(row)] * 40))
    (tmp_path / "shop.csv").write_text("\n".join(SHOP))
    commands = [
        "auto --task causal-lm --data chats.jsonl --model tiny --name bot --steps 3 --device cpu --quiet",
        "auto --task recommender --data shop.csv --preset ids --name shop --steps 3 --device cpu --quiet",
        "chat runs/bot --prompt When? --tokens 4",
        "recommend runs/shop --user u1",
    ]
    done = without_extras(code, json.dumps([words.split() for words in commands]), folder=tmp_path)
    assert done.stderr.count("\nended with 0\n") == 4, done.stderr[-2000:]


ASKED = [
    ("--task causal-lm --model tiny --optimizer adamw8bit", "4bit"),
    ("--task causal-lm --model tiny --strategy zero1 --processes 2", "zero"),
    ("--task compress --model tiny", "onnx"),
    ("--task qat --model tiny", "onnx"),
    ("--task causal-lm --model tiny --tracker tensorboard", "trackers"),
]


def test_a_message_names_the_extra_before_anything_trains(tmp_path: Path) -> None:
    commands = [["auto", *words.split(), "--device", "cpu", "--steps", "2"] for words, _ in ASKED]
    said = without_extras(EACH, json.dumps(commands), folder=tmp_path).stderr.split("\nended with 2\n")
    for text, (words, extra) in zip(said, [*ASKED, ("", "")], strict=True):
        assert (f"isobatch[{extra}]" in text.splitlines()[-1]) if extra else not text, (words, text)
    assert not (tmp_path / "runs").exists()


def test_the_extras_are_those_of_the_project() -> None:
    assert len(PROJECT["dependencies"]) <= 16
    assert set(EXTRAS.values()) <= set(PROJECT["optional-dependencies"])
    names = {"lm_eval": "lm-eval", "sklearn": "scikit-learn"}
    for library, extra in EXTRAS.items():
        name = names.get(library, library)
        assert any(name in line for line in PROJECT["optional-dependencies"][extra]), library
