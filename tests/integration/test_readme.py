"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from isobatch.tests.integration.helpers import ROOT, launch, losses, summary

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_users_own_task(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code.strip().splitlines()) < 30
    (tmp_path / "mine.py").write_text(code)
    done = launch("auto", "--task", "./mine.py:Sine", "--name", "sine", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "sine"
    assert losses(run)[-1] < 0.1 * losses(run)[0]
    assert summary(run)["metrics"]["loss"] < 0.05
    assert launch("verify", str(run), cwd=tmp_path).returncode == 0
    described = launch("describe", "./mine.py:Sine", cwd=tmp_path)
    assert "--batch-size" in described.stdout


def test_every_command_shown_exists() -> None:
    from isobatch.launch.cli import ALIASES, COMMANDS

    shown = set(re.findall(r"python -m launch (\w+)", README))
    assert shown <= {*COMMANDS, *ALIASES}
    assert {"auto", "plan", "resume", "verify"} <= shown
