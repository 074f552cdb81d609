"""One step of README's own task: how much of the project a reader passes through who follows it."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import isobatch
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

STEP = 10
FILES, HOOKS, FUNCTIONS = 12, 8, 60
"""At most: files outside engine/hooks/, files in it, functions in all."""


def test_a_step_is_short_to_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(next(block for block in blocks if "class Sine" in block))
    monkeypatch.chdir(tmp_path)
    root, steps, found = f"{ROOT}/", 0, set[tuple[str, str]]()

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal steps
        code = frame.f_code
        if event == "call":
            steps += code.co_name == "loss" and code.co_filename.endswith("mine.py")
            if steps == STEP and code.co_filename.startswith(root) and "/.venv/" not in code.co_filename:
                found.add((code.co_filename.removeprefix(root), code.co_qualname))

    sys.setprofile(watch)
    try:
        isobatch.train(isobatch.Recipe(task="./mine.py:Sine", steps=20), out="runs", processes=1, quiet=True)
    finally:
        sys.setprofile(None)
    files = {file for file, _ in found}
    hooks = {file for file in files if file.startswith("engine/hooks/")}
    listed = "\n".join(f"{file}: {function}" for file, function in sorted(found))
    assert "engine/train/step.py: train_step" in listed, "it sees functions"
    assert len(hooks) <= HOOKS, listed
    assert len(files - hooks) <= FILES, listed
    assert len(found) <= FUNCTIONS, listed
