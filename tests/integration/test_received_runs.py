"""Runs that somebody sent: no command executes what came with one, or touches anything outside of it."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import isobatch
from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine import consent
from isobatch.engine.checkpointing.digests import folder_digests
from isobatch.engine.registry import complete, workload
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.task_files import imported_files, task_file_hash
from isobatch.launch.cli import main
from isobatch.launch.control.one_run import describe_run
from isobatch.launch.local.arguments import Request
from isobatch.launch.local.run_setup import find_run, locate_data
from isobatch.launch.local.words import flags_of_files
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from collections.abc import Callable

USES = [
    ["verify", "RUN"],
    ["evaluate", "RUN"],
    ["generate", "RUN", "--prompt", "a"],
    ["chat", "RUN"],
    ["recommend", "RUN", "--user", "1"],
    ["export", "RUN"],
    ["resume", "RUN"],
    ["reconstruct", "RUN", "a"],
    ["interpolate", "RUN", "a", "b"],
    ["sample", "RUN"],
    ["predict", "RUN", "a"],
    ["serve", "RUN", "--port", "0"],
]
"""Commands that need the run's task."""
TAKES = [
    *[[command, "--like", "RUN"] for command in ("auto", "plan", "prepare", "profile", "tune")],
    ["auto", "--from", "RUN", "--steps", "2"],
    ["auto", "--config", "RUN/recipe.json"],
]
"""Commands that take the run's recipe."""
LOOKS = [["runs", "runs"], ["inspect", "RUN"], ["report", "RUN"], ["plots", "RUN"]]
"""Commands that only read its records."""
CANARY = "it-ran"
CODE = f"from pathlib import Path\nPath(__file__).with_name({CANARY!r}).touch()\nPath({CANARY!r}).touch()\n"
TASK = (
    CODE
    + """
from isobatch import Data, Task
class Nothing(Data):
    def read(self): ...
class Mine(Task):
    data = Nothing
    def build_model(self, facts): ...
    def loss(self, model, batch, step): ...
"""
)


class Pickled:
    """Executes code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (CODE.replace("__file__", "'x'"),)


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was agreed to in this process is forgotten."""
    for name in ("_allowed", "_received", "_granted"):
        monkeypatch.setattr(consent, name, type(getattr(consent, name))())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The receiver's folder, with things that are nobody's business; its consent is empty."""
    monkeypatch.setenv("ISOBATCH_STATE", str(tmp_path / "state"))
    another_process(monkeypatch)
    monkeypatch.setattr(sys, "path", list(sys.path))  # a task file's folder is put there
    home = tmp_path / "home"
    for name in (".ssh/id", ".config/settings", "mine.jsonl", "data/facts.json", "data/train/index.json"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("{}")
    monkeypatch.chdir(home)
    return home


def received(home: Path, recipe: Recipe | None = None, **facts: Any) -> Path:
    """A finished run as it may come: records, a checkpoint folder, final/."""
    recipe = recipe or complete("causal-lm", {})[0]
    known = {"fingerprint": "0", "folder": str(home / "nowhere"), "samples": {"train": 9, "valid": 3}}
    made = Facts(**{**known, "lengths": (1, 2, 3), "extra": {"vocabulary": 5}, **facts})
    run = RunFolder.create(home / "runs" / "sent", recipe, made, RunOptions(quiet=True))
    run.write_plan(plan())
    fields = {"task": recipe.task, "status": "done", "steps": 2, "metrics": {"loss": 1.0}, "parameters": 1}
    more = {"trainable_parameters": 1, "train_seconds": 1.0, "peak_memory_bytes": 1, "split": "valid"}
    run.write_summary({**fields, **more})
    rows = [{"phase": "train", "step": n, "loss": 3.0 - n, "lr": 1e-3, "chain": ""} for n in (1, 2)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder in (run.checkpoints / "train-2", run.final):
        folder.mkdir(parents=True)
    return run.folder


def of_task_file(home: Path, file: Path, code: str | None = None) -> Path:
    """A run of a task file that the sender wrote."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(TASK)
    name = f"{file}:Mine"
    return received(home, Recipe(task=name, options={"code": code or task_file_hash(name)}))


def of_remote_code(home: Path, model: str, **config: Any) -> Path:
    """A run whose recipe says that the model's own code may run, with such code in final/."""
    recipe, _ = complete("causal-lm", {})
    options = {**recipe.options, "remote_code": True}
    run = received(home, dataclasses.replace(recipe, model=model, options=options))
    mapped = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilLM"}
    config = {"model_type": "evil", "auto_map": mapped, **config}
    (run / "final" / "config.json").write_text(json.dumps(config))
    (run / "final" / "evil.py").write_text(CODE)
    return run


def link(home: Path, name: str, target: str) -> Path:
    run = received(home)
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(home / target)
    return run


def changed(home: Path, name: str, text: str) -> Path:
    run = received(home)
    (run / name).write_text(text)
    return run


def piped(home: Path, name: str) -> Path:
    run = received(home)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    return run


def pickled(home: Path) -> Path:
    run = received(home)
    (run / "final" / "config.json").write_text('{"model_type": "gpt2"}')
    (run / "final" / "pytorch_model.bin").write_bytes(pickle.dumps(Pickled()))
    return run


def adapted(home: Path) -> Path:
    """An adapter on a base model with code, in the run."""
    run = of_remote_code(home, "gpt2-tiny")
    base = run / "base"
    (run / "final" / "evil.py").rename(run / "moved.py")
    (run / "final" / "config.json").unlink()
    base.mkdir()
    (base / "evil.py").write_text(CODE)
    (base / "config.json").write_text(json.dumps({"auto_map": {"AutoModelForCausalLM": "evil.EvilLM"}}))
    (run / "final" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    return run


HOSTILE: dict[str, Callable[[Path], Path]] = {
    "a task file inside": lambda home: of_task_file(home, home / "sent" / "mine.py"),
    "a task file of another hash": lambda home: of_task_file(home, home / "mine.py", code="0" * 12),
    "a relative task file": lambda home: of_task_file(home, Path("sent.py")),
    "remote code": lambda home: of_remote_code(home, "gpt2-tiny"),
    "remote code of a hub id": lambda home: of_remote_code(home, "owner/evil"),
    "remote code of another repository": lambda home: of_remote_code(
        home, "gpt2-tiny", auto_map={"AutoModelForCausalLM": "owner/evil--modeling.EvilLM"}
    ),
    "an adapter's base with code": adapted,
    "checkpoints elsewhere": lambda home: link(home, "checkpoints", ".ssh"),
    "a checkpoint elsewhere": lambda home: link(home, "checkpoints/train-2", ".config"),
    "final elsewhere": lambda home: link(home, "final", ".ssh"),
    "metrics elsewhere": lambda home: link(home, "metrics.jsonl", "mine.jsonl"),
    "a summary elsewhere": lambda home: link(home, "summary.json", "mine.jsonl"),
    "a lock elsewhere": lambda home: link(home, ".train.lock", "mine.jsonl"),
    "a launcher's log elsewhere": lambda home: link(home, "launcher.log", "mine.jsonl"),
    "a pipe": lambda home: piped(home, "summary.json"),
    "a pipe of rows": lambda home: piped(home, "metrics.jsonl"),
    "deep JSON": lambda home: changed(home, "summary.json", "[" * 100_000),
    "deep rows": lambda home: changed(home, "metrics.jsonl", '{"a":' * 100_000),
    "a summary of other types": lambda home: changed(
        home, "summary.json", '{"status": 1, "steps": {}, "metrics": []}'
    ),
    "a job called like a flag": lambda home: with_job(received(home)),
    "a pickled model": pickled,
}


def with_job(run: Path) -> Path:
    (run / "slurm").mkdir()
    (run / "slurm" / "job.json").write_text('{"job": "--help"}')
    return run


def stop(run: Path) -> None:
    """A stopped run is one to resume."""
    summary = run / "summary.json"
    if summary.is_file() and not summary.is_symlink() and '"done"' in (text := summary.read_text()):
        summary.write_text(text.replace('"done"', '"stopped"'))


def in_place(words: list[str]) -> int:
    """A command in this process, whose environment stays."""
    before = dict(os.environ)
    try:
        return main(words)
    finally:
        os.environ.clear()
        os.environ.update(before)


def listing(folder: Path, without: Path) -> dict[str, Any]:
    """Path -> time and content of everything, but for the run's own folder."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_relative_to(without):
            content = path.read_bytes() if path.is_file() else None
            found[str(path)] = (path.lstat().st_mtime_ns if content is not None else 0, content)
    return found


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_of_it_is_executed_and_nothing_outside_touched(
    hostile: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = HOSTILE[hostile](home)
    assert not list(home.parent.rglob(CANARY))
    before = listing(home, run)
    brings_code = hostile in list(HOSTILE)[:6]
    for words in [*LOOKS, *USES, *(TAKES if brings_code else ())]:
        if words in USES:
            stop(run)
        code = in_place([word.replace("RUN", str(run)) for word in words])
        said = capfd.readouterr()
        assert code in ((0, 2, 3) if words in LOOKS else (2, 3)), (words, said.err)
        assert "Traceback" not in said.err, (words, said.err)
        assert not list(home.parent.rglob(CANARY)), words
    with pytest.raises(UserError):
        isobatch.load(run).model()
    with pytest.raises(UserError):
        isobatch.verify(run)
    after = listing(home, run)
    assert after == before
    assert not (home.parent / "state").exists()  # nothing was agreed to


def test_data_that_a_run_names_is_not_written_beside(home: Path) -> None:
    """The teacher's answers are kept beside prepared data, so that must be this user's."""
    run = RunFolder.open(received(home, folder=str(home / "data")))
    with pytest.raises(UserError, match="the data is not what"):
        locate_data(run, None)
    assert sorted(p.name for p in home.iterdir()) == [".config", ".ssh", "data", "mine.jsonl", "runs"]


def test_a_forged_hash_is_not_taken_for_a_trained_run(home: Path) -> None:
    """`auto` goes on with a run of the same recipe: it must be one, and lie in its own folder."""
    recipe, _ = complete("causal-lm", {})
    run = received(home, dataclasses.replace(recipe, lr=0.5))
    record = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps({**record, "hash": recipe.hash()}))
    facts, asked = RunFolder(run).facts, RunOptions(out=str(run.parent))
    request = Request(workload("causal-lm"), recipe, PlanOptions(), asked, {}, [])
    assert find_run(request, facts) is None
    atomic_files.write_json(run / "recipe.json", {**recipe.to_dict(), "hash": recipe.hash()})
    assert find_run(request, facts) is not None
    (run / ".launch.lock").symlink_to(home / "mine.jsonl")
    with pytest.raises(UserError, match="is a link to"):
        find_run(request, facts)


def test_what_is_trusted_runs_and_is_remembered(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of_task_file(home, home / "sent" / "mine.py")
    words = ["recommend", str(run), "--user", "1"]
    assert in_place(words) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"{run} would execute code that this user has not trained here: {home}/sent/mine.py" in said
    assert "add --trust" in said
    assert in_place([*words, "--trust"]) == 2
    assert "which recommends nothing" in capfd.readouterr().err
    assert (home / "sent" / CANARY).exists()
    another_process(monkeypatch)
    assert in_place(words) == 2  # another process of this user
    assert "which recommends nothing" in capfd.readouterr().err
    (home / "sent" / "mine.py").write_text(TASK + "# changed\n")
    another_process(monkeypatch)
    assert in_place([*words, "--trust"]) == 2
    assert "is not the code that was trained" in capfd.readouterr().err


@pytest.mark.parametrize("said", ["off", "no", "perhaps"])
def test_trust_off_is_a_no(home: Path, said: str) -> None:
    run = of_task_file(home, home / "mine.py")
    with pytest.raises(UserError, match="add --trust"):
        flags_of_files({"like": str(run), "trust": said})


def test_trust_is_of_one_recipe(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is trusted in one run may do something else with other options. The 48 bits of a hash can
    be made equal on purpose.
    """
    monkeypatch.setattr(Recipe, "hash", lambda _: "0123456789ab")
    run = RunFolder(of_task_file(home, home / "mine.py"))
    consent.require(run.recipe, run.folder, trust=True)
    consent.require(run.recipe, run.folder)
    other = dataclasses.replace(run.recipe, lr=0.5)
    with pytest.raises(UserError, match="add --trust"):
        consent.require(other, run.folder)


def test_a_launch_carries_consent_to_its_processes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to other nodes, which may not share the user's folder."""
    run = RunFolder(of_task_file(home, home / "mine.py"))
    recipe, _ = complete(f"{home}/mine.py:Mine", {})  # typed here
    consent.remember(recipe)
    carried = consent.environment()
    assert set(carried) == {consent.VARIABLE}
    monkeypatch.setenv("ISOBATCH_STATE", str(home / "another"))
    another_process(monkeypatch)
    with pytest.raises(UserError, match="add --trust"):
        consent.require(recipe, run.folder)
    monkeypatch.setenv(consent.VARIABLE, carried[consent.VARIABLE])
    consent.require(recipe, run.folder)
    with pytest.raises(UserError, match="add --trust"):
        consent.require(dataclasses.replace(recipe, lr=0.5), run.folder)


def test_a_file_that_cannot_be_kept_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(of_task_file(home, home / "mine.py"))
    monkeypatch.setenv("ISOBATCH_STATE", str(home / "mine.jsonl"))
    consent.require(run.recipe, run.folder, trust=True)


def test_neighbours_belong_to_the_code(home: Path) -> None:
    (home / "parts").mkdir()
    (home / "parts" / "__init__.py").write_text("from . import deep\n")
    (home / "parts" / "deep.py").write_text("DEEP = 1\n")
    (home / "stranger.py").write_text("")
    run = of_task_file(home, home / "mine.py")
    alone = task_file_hash(f"{home}/mine.py:Mine")
    (home / "mine.py").write_text("import parts, numpy\n" + TASK)
    found = [p.relative_to(home) for p in imported_files(home / "mine.py")]
    assert list(map(str, found)) == ["mine.py", "parts/__init__.py", "parts/deep.py"]
    name = f"{home}/mine.py:Mine"
    before = task_file_hash(name)
    assert before != alone
    recipe = dataclasses.replace(RunFolder(run).recipe, options={"code": before})
    consent.require(recipe, run, trust=True)
    (home / "parts" / "deep.py").write_text("DEEP = 2\n")
    assert task_file_hash(name) != before
    with pytest.raises(UserError, match="is not the code that was trained"):
        consent.require(recipe, run)


def test_a_models_code_is_known_by_its_content(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What training copies into final/ is what the user agreed to; one more file there is not."""
    (home / "model").mkdir()
    (home / "model" / "modeling.py").write_text("pass\n")
    recipe, _ = complete("causal-lm", {"model": str(home / "model"), "remote_code": True})
    files = rf"causal-lm would execute .*: {home}/model/modeling.py: read it"
    with monkeypatch.context() as untyped:
        untyped.setattr(consent, "_allowed", set())
        with pytest.raises(UserError, match=files):
            consent.check(recipe)
    consent.remember(recipe)
    run = received(home, recipe)
    (run / "final" / "modeling.py").write_text("pass\n")
    consent.require(recipe, run)
    (run / "final" / "more.py").write_text("pass # and more\n")
    with pytest.raises(UserError, match=r"final/more.py: read it"):
        consent.require(recipe, run)


def test_inspect_says_what_a_run_is(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = of_task_file(home, home / "sent" / "mine.py")
    assert in_place(["inspect", str(run)]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0] == f"{run}: {home}/sent/mine.py:Mine, done, 2 steps"
    assert "metrics of valid, as its file says: loss 1" in said
    assert f"reads prepared data: {home}/nowhere" in said
    (line,) = (line for line in said if line.startswith(f"executes {home}/sent/mine.py (SHA-256 "))
    assert line.endswith("): only with --trust")
    assert said.index(line) < said.index("  seed: 0"), "what may harm is read first"
    found = describe_run(RunFolder(run))
    assert [c["agreed"] for c in found["code"]] == [False]
    assert found["hash"] == found["recorded_hash"]
    assert not (home / "sent" / CANARY).exists()
    (home / "sent" / "mine.py").unlink()
    assert in_place(["inspect", str(run)]) == 0
    gone = f"executes {home}/sent/mine.py:Mine, which is not here: what it does is not known"
    assert [line for line in capfd.readouterr().out.splitlines() if "executes" in line] == [gone]


def test_inspect_names_what_was_changed_and_added_since(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = of_task_file(home, home / "sent" / "mine.py")
    said = json.loads((run / "summary.json").read_text())
    logged = {**said, "metrics": {"loss": 3.0}}
    (run / "final").mkdir(exist_ok=True)
    for name in ("model.bin", "chat_template.jinja"):
        (run / "final" / name).touch()
    written = folder_digests(run / "final")
    atomic_files.append_row(run / "metrics.jsonl", {"final": written, "summary": logged})
    for name in ("evil.py", "chat_template.jinja"):
        (run / "final" / name).write_text("{{ evil }}")
    assert in_place(["inspect", str(run)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "summary.json is not what the log says: metrics.loss" in lines
    for name in ("evil.py", "chat_template.jinja"):
        assert f"final/{name}: the run did not write it so" in lines
    assert not any("model.bin" in line or line.startswith("metrics of") for line in lines)
    assert len([line for line in lines[:10] if "did not write it so" in line or "log says" in line]) == 3


EVIL = "\x1b]0;owned\x07\x9b31m$\\frac$|<b>`x`[a](b)\u202e"


def test_names_reach_no_terminal_and_break_no_page(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = received(home, dataclasses.replace(complete("causal-lm", {})[0], data=EVIL))
    summary = json.loads((run / "summary.json").read_text())
    metrics = {EVIL: 1.0, "loss": 2.0, "list": [EVIL]}
    more = {"metrics": metrics, "reason": EVIL, "split": EVIL, "sample": EVIL, "steps": EVIL}
    (run / "summary.json").write_text(json.dumps({**summary, **more}))
    named = run.with_name(EVIL.replace("/", ""))
    run.rename(named)
    for words in (["runs", "runs"], ["inspect", str(named)], ["report", str(named)], ["plots", str(named)]):
        for more in ([], ["--json"]) if words[0] != "plots" else ([],):
            assert in_place([*words, *more]) == 0, capfd.readouterr().err
            said = capfd.readouterr()
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said.out + said.err)
    assert in_place(["evaluate", f"nowhere{EVIL}"]) == 2
    assert "\x1b" not in capfd.readouterr().err
    text = (named / "report" / "report.md").read_text()
    assert "\\|\\<b>\\`x\\`\\[a](b)" in text
    page = (named / "report" / "report.html").read_text()
    assert "<b>" not in page
    assert "\x1b" not in text + page
    assert (named / "plots" / "training.png").is_file()


def test_a_received_runs_hook_is_not_imported_without_consent(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, file = received(home), home / "sent" / "mine.py"
    file.parent.mkdir()
    file.write_text(f"import beside\n{CODE}\nfrom isobatch import Hook\nclass Mine(Hook): ...\n")
    (file.parent / "beside.py").touch()
    atomic_files.write_json(
        run / "run.json", {**atomic_files.read_json(run / "run.json"), "hook": [f"{file}:Mine"]}
    )
    stop(run)
    assert in_place(["resume", str(run)]) == 2
    assert f"execute code that this user has not trained here: {file}, " in capfd.readouterr().err
    assert in_place(["inspect", str(run)]) == 0
    assert re.search(rf"executes {file} .*: only with --trust", capfd.readouterr().out)
    assert not list(home.rglob(CANARY))

    opened = RunFolder.open(run)
    assert not consent.asks(opened.recipe, run)  # what runs no hook asks for none
    consent.require(opened.recipe, run, trust=True, options=opened.options())
    another_process(monkeypatch)
    consent.require(opened.recipe, run, options=opened.options())
    (file.parent / "beside.py").write_text("# another\n")
    with pytest.raises(UserError, match=f"trained here: {file.parent}/beside.py: "):
        consent.require(opened.recipe, run, options=opened.options())
