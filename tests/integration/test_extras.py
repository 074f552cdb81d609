"""Every module imports, and the plain workloads train, where no library of an extra is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from isobatch.core.extras import EXTRAS
from isobatch.tests.paths import REGISTER, ROOT

if TYPE_CHECKING:
    from pathlib import Path

TWO = ("--processes", "2")
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


RUN = "from isobatch.launch.cli import main; sys.exit(main(sys.argv[1:]))"


def test_every_module_imports(tmp_path: Path) -> None:
    files = [f for top in ("core", "data", "models", "engine", "launch") for f in (ROOT / top).rglob("*.py")]
    scripts = {"_root", "loopback", "train", "torchrun", "__main__"}
    names = [".".join(("isobatch", *f.relative_to(ROOT).with_suffix("").parts)) for f in files]
    names = [n for n in names if n.rpartition(".")[2] not in scripts and not n.startswith(BEHIND)]
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    done = without_extras(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_chat_and_a_recommender_train_and_answer(tmp_path: Path) -> None:
    row = {"instruction": "When do you open?", "output": "At nine."}
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps(row)] * 40))
    (tmp_path / "shop.csv").write_text("\n".join(SHOP))
    common = ["--steps", "3", "--device", "cpu", "--quiet"]
    for task, data, name, answer in (
        ("causal-lm", "chats.jsonl", "bot", ["chat", "runs/bot", "--prompt", "When?", "--tokens", "4"]),
        ("recommender", "shop.csv", "shop", ["recommend", "runs/shop", "--user", "u1", "--top", "2"]),
    ):
        model = ["--model", "tiny"] if task == "causal-lm" else ["--preset", "ids"]
        words = ["auto", "--task", task, "--data", data, *model, "--name", name, *common]
        for step in (words, answer):
            done = without_extras(RUN, *step, folder=tmp_path)
            assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["auto", "--task", "causal-lm", "--model", "tiny", "--optimizer", "adamw8bit"], "4bit"),
        (["auto", "--task", "causal-lm", "--model", "tiny", "--strategy", "zero1", *TWO], "zero"),
        (["auto", "--task", "compress", "--model", "tiny"], "onnx"),
        (["auto", "--task", "qat", "--model", "tiny"], "onnx"),
        (["auto", "--task", "causal-lm", "--model", "tiny", "--tracker", "tensorboard"], "trackers"),
    ],
)
def test_a_message_names_the_extra_before_anything_trains(
    words: list[str], extra: str, tmp_path: Path
) -> None:
    done = without_extras(RUN, *words, "--device", "cpu", "--steps", "2", folder=tmp_path)
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"isobatch[{extra}]" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_the_extras_are_those_of_the_project() -> None:
    assert len(PROJECT["dependencies"]) <= 16
    assert set(EXTRAS.values()) <= set(PROJECT["optional-dependencies"])
    names = {"lm_eval": "lm-eval", "sklearn": "scikit-learn"}
    for library, extra in EXTRAS.items():
        name = names.get(library, library)
        assert any(name in line for line in PROJECT["optional-dependencies"][extra]), library
