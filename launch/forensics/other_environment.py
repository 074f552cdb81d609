"""Verifies a run here and under another Python: whether an upgrade of a library changes what is learnt."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import DONE, FAILED, UserError
from isobatch.core.package import ROOT
from isobatch.core.terminal.status import doing

if TYPE_CHECKING:
    from collections.abc import Sequence

LIBRARIES = ("torch", "transformers", "accelerate", "tokenizers", "numpy", "peft", "deepspeed")
ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception): ")
MISSING = re.compile(r"(ModuleNotFound|Import)Error: |.*PackageNotFoundError: ")
NEEDS = "; that environment needs all that isobatch requires: `pip install -e CLONE` there"
ASK_VERSIONS = f"""
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {{"python": platform.python_version()}}
for name in {LIBRARIES!r}:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def find_python(named: str) -> Path:
    """The interpreter of an environment: its file, its folder, or a name on PATH. Raises UserError."""
    place = Path(named).expanduser()
    inside = place / "bin" / "python"
    found = str(inside) if inside.is_file() else shutil.which(str(place))
    if found is None:
        raise UserError(f"--against {named}: is no Python, and no environment with bin/python in it")
    return Path(found).absolute()  # not resolved: an environment is known by the link's own place


def versions_of(python: Path) -> dict[str, str]:
    """Library -> version in an environment. Raises UserError where it cannot be asked."""
    asked = subprocess.run([python, "-c", ASK_VERSIONS], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise UserError(f"--against {python}: ended with {asked.returncode}: {_last_line(asked.stderr)}")
    found: dict[str, str] = json.loads(asked.stdout.splitlines()[-1])
    return found


def verify_there(python: Path, words: Sequence[str]) -> dict[str, Any]:
    """`verify WORDS --json` by this copy of isobatch under another Python. Raises UserError where it gives no
    answer: a library is missing there, or the run cannot be opened.
    """
    doing(f"verifying under {python}")
    command = [str(python), "-P", str(ROOT / "__main__.py"), "verify", *words, "--json"]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ended.returncode not in (DONE, FAILED) or not ended.stdout.strip():
        reason = _last_line(ended.stderr)
        lacks = NEEDS if MISSING.match(reason) else ""
        raise UserError(f"--against {python}: verify ended with {ended.returncode}: {reason}{lacks}")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def _last_line(text: str) -> str:
    """The error in which a traceback ends, whose message may have further lines; else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if ERROR.match(line)]
    return (errors or lines or ["it said nothing"])[-1]


def judged(here: dict[str, Any], there: dict[str, Any], versions: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Both verdicts, the versions that differ, and a sentence on what the other environment changes."""
    names = dict.fromkeys([*versions[0], *versions[1]])
    differing = {n: [v.get(n) for v in versions] for n in names if versions[0].get(n) != versions[1].get(n)}
    changed = bool(there["problems"]) and not here["problems"]
    return {
        "verified": here["verified"] and there["verified"],
        "changes_what_is_learnt": changed,
        "versions": differing,
        "verdict": _sentence(here, there, changed, differing),
        "here": here,
        "there": there,
    }


def _sentence(
    here: dict[str, Any], there: dict[str, Any], changed: bool, differing: dict[str, list[Any]]
) -> str:
    upgrade = ", ".join(f"{name} {a or 'none'} -> {b or 'none'}" for name, (a, b) in differing.items())
    between = f" ({upgrade})" if upgrade else " (the same versions)"
    if changed:
        return f"the other environment changes what is learnt{between}: {there['problems'][0]}"
    if here["problems"]:
        also = "and there neither" if there["problems"] else "and there it is"
        return f"here the run is not what its recipe says, {also}{between}: {here['problems'][0]}"
    if not (here["verified"] and there["verified"]):
        missing = (here["unproven"] or there["unproven"])[0]
        return f"nothing differs, and something could not be checked{between}: {missing}"
    losses = [found["largest_loss_difference"] or 0.0 for found in (here, there)]
    return (
        f"the other environment changes nothing beyond rounding{between}: losses differ from the logged"
        f" ones by at most {losses[0]:.1g} here and {losses[1]:.1g} there"
    )
