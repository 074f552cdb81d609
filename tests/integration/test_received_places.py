"""Runs that somebody sent: no place that one names is read or sent to before this user agrees."""

from __future__ import annotations

import dataclasses
import http.server
import json
import shutil
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import isobatch
from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.recipe import Recipe
from isobatch.engine import consent
from isobatch.engine.consent import PLACES, places
from isobatch.engine.registry import TASKS, complete, workload
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.tests.integration.helpers import warm_python
from isobatch.tests.integration.test_received_runs import (
    LOOKS,
    TAKES,
    USES,
    another_process,
    home,
    in_place,
    listing,
    received,
    stop,
)
from isobatch.tests.paths import new_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

JUDGES = [
    *LOOKS,
    *USES,
    *TAKES,
    ["receipt", "RUN", "--out", "receipt.json"],
    ["replay", "RUN", "--step", "1"],
    ["seen", "RUN", "--text", "a"],
    ["diff", "RUN", "RUN"],
    ["doctor", "RUN"],
]
__all__ = ["home"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Connections to a server of this machine, which is the Hub and S3 too; its address comes first."""
    seen: list[str] = []

    class Server(http.server.ThreadingHTTPServer):
        def verify_request(self, _: Any, address: Any) -> bool:
            seen.append(str(address))
            return False

    server = Server(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    seen.append(address := f"http://127.0.0.1:{server.server_address[1]}")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, address)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    yield seen
    server.shutdown()
    server.server_close()


FIELDS: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "data": lambda _, address: {"data": f"{address}/rows.jsonl"},
    "s3": lambda *_: {"data": "s3://bucket/rows.jsonl"},
    "a file": lambda home, _: {"data": str(home / "mine.jsonl")},
    "a relative file": lambda *_: {"data": "../home/mine.jsonl"},
    "model": lambda *_: {"model": "owner/evil"},
    "a model in a word": lambda *_: {"model": "evil"},
    "tokenizer": lambda *_: {"tokenizer": "word"},
    "a folder": lambda home, _: {"model": str(home / ".ssh")},
    "a run": lambda home, _: {
        "starts_from": {"run": str(home / ".ssh"), "checkpoint": "train-2", "digest": "0"}
    },
}


def of_place(home: Path, asked: list[str], field: str) -> Path:
    """A run whose recipe, or final/, names a place on the server or in the receiver's home."""
    recipe, _ = complete("causal-lm", {})
    values = FIELDS[field](home, asked[0]) if field in FIELDS else {}
    run = received(home, dataclasses.replace(recipe, **values))
    if field == "an adapter's base":
        file = run / "final" / "adapter_config.json"
        file.write_text(json.dumps({"base_model_name_or_path": "owner/evil"}))
    return run


@pytest.mark.parametrize("field", [*FIELDS, "an adapter's base"])
def test_no_place_is_read_without_consent(
    field: str,
    home: Path,
    asked: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = of_place(home, asked, field)
    another_process(monkeypatch)
    before = listing(home, run)
    for words in JUDGES:
        if words in USES:
            stop(run)
        code = in_place([word.replace("RUN", str(run)) for word in words])
        said = capfd.readouterr().err
        assert "Traceback" not in said, (words, said)
        assert len(asked) == 1, words
        takes_recipe = words in TAKES and field in FIELDS and ("--from" not in words or field != "a run")
        if takes_recipe or words[0] in ("verify", "evaluate", "receipt", "resume", "export"):
            assert code == 2, words
            assert "that this user has not named here: " in said, words
            assert said.rstrip().endswith("then add --trust (`inspect RUN` does none of it)"), said
    for use in (isobatch.verify, lambda folder: isobatch.load(folder).model()):
        with pytest.raises(UserError, match="add --trust"):
            use(run)
    if field in FIELDS:
        with pytest.raises(UserError, match="add --trust"):
            isobatch.train(isobatch.load(run).recipe, quiet=True)
    assert len(asked) == 1
    assert listing(home, run) == before
    assert not (home.parent / "state").exists()
    assert in_place(["inspect", str(run), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["asks"]


@pytest.mark.parametrize("field", ["data", "model", "tokenizer"])
def test_after_consent_it_is_asked_for(
    field: str, home: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above could not fail."""
    run = of_place(home, asked, field)
    another_process(monkeypatch)
    assert in_place(["verify", str(run), "--trust"]) == 2
    assert len(asked) > 1
    another_process(monkeypatch)
    assert consent.READING not in consent.asks(RunFolder(run).recipe, run)
    changed = dataclasses.replace(RunFolder(run).recipe, lr=0.5)  # it is of one recipe
    assert consent.READING in consent.asks(changed, run)


TARGETS = ["file://.", "file://..", "file://HOME/store", "s3://bucket/prefix", "http://x", "memory://there"]


@pytest.mark.parametrize("lost", [False, True], ids=["checkpoints here", "checkpoints lost"])
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_sent_or_deleted_or_fetched_without_consent(
    target: str, lost: bool, home: Path, asked: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    target = target.replace("HOME", str(home))
    run = received(home)
    atomic_files.write_json(
        run / "run.json", {**atomic_files.read_json(run / "run.json"), "checkpoint_copy": target}
    )
    if lost:
        shutil.rmtree(run / "checkpoints")
    else:
        (run / "checkpoints" / "train-2" / "index.json").write_text("{}")
    for name in ("sent/2025-thesis/w.bin", "runs/sent-2/x", "store/sent/a-b/w.bin"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("precious")
    before = listing(home, run)
    stop(run)
    assert in_place(["resume", str(run)]) == 2
    asked_for = f"send to places that this user has not named here: checkpoints to {target}: "
    assert asked_for in capfd.readouterr().err
    assert in_place(["inspect", str(run)]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert f"sends checkpoints to {target}" in shown
    assert f"only with --trust: checkpoints to {target}" in shown
    assert listing(home, run) == before
    assert len(asked) == 1


@pytest.fixture
def own(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was trained here, whose process has ended, with its copies in the folder store."""
    monkeypatch.setattr(sys, "executable", warm_python())
    monkeypatch.setenv("ISOBATCH_CACHE", new_cache(home / "cache"))
    (home / "d.txt").write_text("\n".join(f"a line of plain text number {n}" for n in range(200)))
    words = "auto --task causal-lm --data d.txt --model tiny --max-length 16 --steps 4 --save-every 2 --out o"
    assert in_place([*words.split(), "--name", "mine", "--checkpoint-copy", f"file://{home}/store"]) == 0
    another_process(monkeypatch)
    return home / "o" / "mine"


def test_a_run_trained_here_is_asked_nothing_and_stays_as_it_is(
    own: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor where its data has moved, or its cache is another."""
    before = listing(own, own / "nothing")
    judges = (
        ["verify", "--level", "records"],
        ["evaluate"],
        ["receipt", "--out", "r.json"],
        ["replay", "--step=2"],
    )
    for command, *more in judges:
        assert in_place([command, str(own), *more]) == 0, capfd.readouterr().err
    monkeypatch.setenv("ISOBATCH_CACHE", new_cache(home / "another"))
    (home / "d.txt").rename(home / "moved.txt")
    capfd.readouterr()
    assert in_place(["evaluate", str(own)]) == 2
    assert (
        f"where it has moved, `verify {own} --level records --data PATH` finds it" in capfd.readouterr().err
    )
    assert in_place(["evaluate", str(own), "--data", "moved.txt"]) == 0
    for command, *more in judges:  # it is found
        assert in_place([command, str(own), *more]) == 0, capfd.readouterr().err
    two = ["verify", str(own), "--steps", "1", "--processes", "2"]
    assert in_place(two) == 0, capfd.readouterr().err
    assert listing(own, own / "nothing") == before


def test_a_copy_of_it_is_asked_for_by_somebody_else_only(
    own: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (own / "summary.json").write_text((own / "summary.json").read_text().replace('"done"', '"stopped"'))
    shutil.rmtree(own / "checkpoints")
    shutil.copytree(own, home / "sent" / "mine")
    assert in_place(["resume", str(own)]) == 0, capfd.readouterr().err  # fetched from its copy
    assert (own / "checkpoints").is_dir()
    shutil.rmtree(own / "checkpoints")
    monkeypatch.setenv("ISOBATCH_STATE", str(home / "theirs"))
    monkeypatch.setenv("ISOBATCH_CACHE", new_cache(home / "their cache"))
    another_process(monkeypatch)
    capfd.readouterr()
    assert in_place(["resume", "sent/mine"]) == 2
    said = capfd.readouterr().err
    assert f"checkpoints to file://{home}/store" in said
    assert "data d.txt" in said  # all that --trust would agree to
    assert not (home / "sent" / "mine" / "checkpoints").exists()
    another_process(monkeypatch)
    assert in_place(["resume", f"file://{home}/store/mine", "--out", "theirs"]) == 2  # this address was typed
    assert "checkpoints to" not in (said := capfd.readouterr().err)
    assert "read places that this user has not named here: data d.txt" in said
    assert in_place(["resume", f"file://{home}/store/mine", "--out", "theirs", "--trust"]) == 0


TEXTS = {
    *("task", "preset", "format", "revision", "phase", "lora_targets", "clean"),
    *("text_column", "pair_column", "label_column", "sequence_column"),
    *("user_column", "item_column", "rating_column", "time_column", "quantity_column", "order_column"),
    "without_items",
    *("data_config", "trainable", "layers", "template", "template_kwargs", "lora_layers"),
}
"""Fields of recipes that take any text and name no place; but `template` does where it ends in .jinja."""


@pytest.mark.parametrize(
    ("template", "is_place"), [("mine.jinja", True), ("a/b.jinja", True), ("chatml", False)]
)
def test_a_template_is_a_place_where_it_is_a_file(template: str, is_place: bool) -> None:
    recipe = Recipe(task="causal-lm", options={"template": template})
    assert (("template", template) in places(recipe)) == is_place


def test_each_field_that_takes_any_text_is_known_for_a_place_or_not() -> None:
    """A new one is a decision: if it names a place it belongs into PLACES."""
    from isobatch.core.flags import describe_type, flags_of

    found = [flags_of(Recipe), *(workload(name).option_flags() for name in TASKS)]
    flags = [flag for of_task in found for flag in of_task.values()]
    takes_text = {flag.name for flag in flags if "text" in describe_type(flag.kind).split(" ")}
    assert takes_text == {*PLACES, *TEXTS}


def test_recipes_of_demos_and_presets_name_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in TASKS:
        assert places(complete(name, {})[0]) == [], name
    folder = tmp_path / "tiny"
    recipe, _ = complete("causal-lm", {"model": "tiny", "valid": 0.1})
    assert places(recipe) == []
    folder.mkdir()
    assert places(recipe) == [("model", "tiny")]
