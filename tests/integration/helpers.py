"""Helpers of the integration tests: commands run as processes of their own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import io
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from isobatch.core.package import own_command
from isobatch.engine.runs.ledger import read_ledger
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.predicting.predict import predict
from isobatch.tests.paths import RAGGED as RAGGED
from isobatch.tests.paths import ROOT as ROOT
from isobatch.tests.zygote import Zygote

if TYPE_CHECKING:
    import random


def launch(
    *words: str, cwd: Path, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`isobatch WORDS` in a folder, to its end."""
    variables = {**os.environ, **environment}
    # A fork has no GPU where libraries asked for one before it.
    if not torch.cuda.is_available() and (warm := _zygote()).serves(variables):
        return warm.run(words, cwd, variables, timeout)
    return command(own_command(*words), cwd, timeout, **environment)


def succeed(*words: str, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """`isobatch WORDS` as `launch` runs it; it must end well."""
    done = launch(*words, cwd=cwd, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_code(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -c CODE WORDS` in a folder, with libraries imported."""
    return _zygote().run((), cwd, os.environ, 240, program=["-c", code, *words])


def warm_command(*words: str) -> list[str]:
    """`isobatch WORDS` as a command that begins with libraries imported; signals reach it, SIGKILL too."""
    return [warm_python(), *own_command(*words)[1:]]


def warm_python() -> str:
    """An interpreter whose processes of ours, and theirs in turn, begin with libraries imported."""
    return _zygote().python


@functools.cache
def _zygote() -> Zygote:
    """One per pytest worker, started when it is first needed."""
    made = Zygote()
    atexit.register(made.close)
    return made


def command(
    words: list[str], cwd: Path, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def ledger(run: Path) -> list[dict[str, Any]]:
    """Phase, step and samples of every step in the ledger."""
    return [
        {"phase": one.phase, "step": one.step, "samples": one.samples.tolist()}
        for one in read_ledger(RunFolder(run))
    ]


def losses(run: Path) -> list[float]:
    """The training losses, one a step, in order."""
    found = [r for r in rows(run) if "lr" in r]
    assert [r["step"] for r in found] == list(range(1, len(found) + 1))
    return [r["loss"] for r in found]


def figure(run: Path, name: str = "loss") -> list[Any]:
    """Of every logged step of all phases, in order."""
    return [row.get(name) for row in rows(run) if "lr" in row]


def resumed_from(run: Path, step: int) -> Path:
    """A copy of a finished run that went on from its checkpoint of `step`, as if it had ended there."""
    again = run.with_name(f"{run.name}-from-{step}")
    shutil.copytree(run, again)
    for saved in (again / "checkpoints").iterdir():
        if int(saved.name.rpartition("-")[2]) > step:
            shutil.rmtree(saved)
    shutil.rmtree(again / "final")
    (again / "summary.json").unlink()
    succeed("resume", str(again), "--quiet", cwd=run.parent.parent, timeout=400)
    return again


def killed_at_random(words: list[str], run: Path, generator: random.Random, steps: int = 1) -> int:
    """Start, wait for so many new steps and a random moment more, kill; returns how many were logged."""
    process = subprocess.Popen(
        warm_command(*words), cwd=run.parent.parent, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    before, deadline = logged(run), time.monotonic() + 60
    while logged(run) < before + steps and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(generator.uniform(0, 0.25))
    kill_all(at_work_in(run.parent.parent))
    process.wait()
    return logged(run)


def at_work_in(folder: Path) -> list[psutil.Process]:
    """A command's own processes, its launcher and its ranks: those whose working folder this is."""
    return [p for p in psutil.process_iter() if _working_folder(p) == str(folder)]


def _working_folder(process: psutil.Process) -> str | None:
    try:
        return process.cwd()
    except psutil.Error:
        return None


def kill_all(processes: list[psutil.Process]) -> None:
    """As if the machine lost power: none of them has the time to see another one end."""
    own = {child.pid for child in psutil.Process().children()}  # whoever started them waits for them
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([p for p in processes if p.pid not in own], timeout=10)  # they hold the run's lock


def logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"lr"') if path.exists() else 0


def plan_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return found


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def run_card(final: Path) -> str:
    """What the lines in the card of final/ write, run in that folder by plain Python."""
    lines = (final / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    done = run_code(lines, cwd=final)
    assert done.returncode == 0, done.stderr
    return done.stdout


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def predictions(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The rows of `isobatch predict WORDS --json` in a folder, in this process: nothing is imported anew."""
    return [json.loads(line) for line in predicted(folder, *words, "--json").splitlines()]


def predicted(folder: Path, *words: str) -> str:
    """What `isobatch predict WORDS` prints."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        assert predict(words) == 0
    return out.getvalue()


def port_of(server: subprocess.Popen[str]) -> int:
    """The port that `serve --port 0` says on its first line."""
    assert server.stdout is not None
    return int(server.stdout.readline().partition("127.0.0.1:")[2].split()[0])


def post(port: int, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    """The answer to a request over a real socket."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()
