"""One step of README's own task: how much of the project a reader passes through who follows it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from isobatch.tests.paths import REGISTER, ROOT

if TYPE_CHECKING:
    from pathlib import Path

STEP = 10
FILES, HOOKS, FUNCTIONS = 12, 8, 60
"""At most: files outside engine/hooks/, files in it, functions in all."""
WATCHED = """
import json, sys
import isobatch

root, steps, found = sys.argv[1] + "/", 0, set()

def watch(frame, event, arg):
    global steps
    code = frame.f_code
    if event == "call":
        steps += code.co_name == "loss" and code.co_filename.endswith("mine.py")
        if steps == {step} and code.co_filename.startswith(root) and "/.venv/" not in code.co_filename:
            found.add((code.co_filename.removeprefix(root), code.co_qualname))

sys.setprofile(watch)
isobatch.train(isobatch.Recipe(task="./mine.py:Sine", steps=20), out="runs", processes=1, quiet=True)
sys.setprofile(None)
print(json.dumps(sorted(found)))
"""


def test_a_step_is_short_to_follow(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(next(block for block in blocks if "class Sine" in block))
    program = REGISTER + WATCHED.replace("{step}", str(STEP))
    words = [sys.executable, "-P", "-c", program, str(ROOT)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    files = {file for file, _ in found}
    hooks = {file for file in files if file.startswith("engine/hooks/")}
    listed = "\n".join(f"{file}: {function}" for file, function in found)
    assert "engine/train/step.py: train_step" in listed, "it sees functions"
    assert len(hooks) <= HOOKS, listed
    assert len(files - hooks) <= FILES, listed
    assert len(found) <= FUNCTIONS, listed
