"""Whatever a user gets wrong is answered in one line with the way out; nothing is written over."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from isobatch.tests.integration.helpers import RAGGED, ROOT, launch, succeed, summary

if TYPE_CHECKING:
    from pathlib import Path

LM = ["--task", "causal-lm"]
WORDS = {
    "unknown command": (["trian"], "did you mean train?"),
    "no gpu": (["auto", *LM, "--device", "cuda"], "cuda"),
}


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on standard error; notes of what the words came to may stand before it."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert [line.startswith("isobatch: ") for line in lines].count(True) == 1, done.stderr
    return lines[-1]


@pytest.mark.parametrize("name", WORDS)
def test_wrong_words(name: str, tmp_path: Path) -> None:
    words, hint = WORDS[name]
    assert hint in complaint(launch(*words, cwd=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_data_folders(tmp_path: Path) -> None:
    empty, odd, latin = tmp_path / "empty", tmp_path / "odd", tmp_path / 'it\'s "latin" ü'
    for folder in (empty, odd, latin):
        folder.mkdir()
    (odd / "notes.pdf").write_bytes(b"%PDF")
    (latin / "train.txt").write_bytes("caf\xe9 ".encode("latin-1") * 50)
    for folder, hint in ((empty, str(empty)), (odd, str(odd)), (latin, "UTF-8")):
        assert hint in complaint(launch("auto", *LM, "--data", str(folder), cwd=tmp_path))
    assert not (tmp_path / "runs").exists()


def test_another_runs_folder_is_left_alone(tmp_path: Path) -> None:
    taken = tmp_path / "runs" / "mine"
    taken.mkdir(parents=True)
    (taken / "thesis.txt").write_text("precious")
    text = complaint(launch("auto", "--task", RAGGED, "--steps", "1", "--name", "mine", cwd=tmp_path))
    assert "mine" in text
    assert [p.name for p in taken.iterdir()] == ["thesis.txt"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "none", str(disk)], check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        done = launch("auto", "--task", RAGGED, "--steps", "4", "--out", str(disk), "--quiet", cwd=tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (3, False), (
            "more space mends it: no wrong input"
        )
        assert "No space left on device (0 B are free there, it takes " in done.stderr.splitlines()[-1]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_nan_is_a_named_failure(tmp_path: Path) -> None:
    words = ["--task", RAGGED, "--steps", "30", "--lr", "1e30", "--clip", "0", "--name", "nan", "--quiet"]
    done = launch("auto", *words, "--optimizer", "sgd", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "became" in summary(tmp_path / "runs" / "nan")["reason"]
    assert summary(tmp_path / "runs" / "nan")["status"] == "failed"


def test_a_users_models_and_data_do_not_hide_ours(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("raise SystemExit('the wrong models')")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("raise SystemExit('the wrong data')")
    (tmp_path / "engine.py").write_text("raise SystemExit('the wrong engine')")
    script = subprocess.run(
        [sys.executable, str(ROOT / "launch/train.py"), "--task", "nothing"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert script.returncode == 2
    assert "there is no such task" in script.stderr


def test_words_with_spaces_quotes_and_unicode(tmp_path: Path) -> None:
    name = 'it\'s a "näme" 中'
    succeed("auto", "--task", RAGGED, "--steps", "2", "--name", name, "--quiet", cwd=tmp_path)
    assert summary(tmp_path / "runs" / name)["status"] == "done"
