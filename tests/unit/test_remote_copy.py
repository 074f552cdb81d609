"""Tests of engine/checkpointing/remote_copy.py, with fsspec's store in memory and, once, an S3 server."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from isobatch.core.errors import StopRequestedError, UserError
from isobatch.engine.checkpointing import checkpoint, portable_state, remote_copy, writer
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.checkpointing.remote_copy import CheckpointStore, RemoteCopies, fetch_run
from isobatch.engine.runs.run_options import RunOptions
from isobatch.tests.unit.helpers import same

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FACTS = {"progress": {"phase": "train", "step": 3}}


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"weight/a": torch.arange(3000.0) + step, "weight/b": torch.ones(5, dtype=torch.int64)}


@pytest.fixture(autouse=True)
def _no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_copy, "WAIT_SECONDS", 10.0)


@pytest.fixture
def url() -> Iterator[str]:
    """A store of its own, in memory."""
    import fsspec

    name = uuid.uuid4().hex
    yield f"memory://{name}"
    fsspec.filesystem("memory").store.clear()


def whole(store: Any) -> dict[str, Any]:
    """Checkpoint -> the record of its copy."""
    return {said["checkpoint"]: said for said in store.records() if said["whole"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "it's 日本"
    (folder / "code").mkdir(parents=True)
    (folder / "recipe.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "code" / "mine.py").write_text("x = 1")
    (folder / "final").mkdir()
    (folder / "final" / "model.safetensors").write_text("large")
    (folder / ".train.lock").write_text("")
    return folder


def train(run_ranks: Any, run: Path, url: str, steps: list[int], size: int = 1) -> list[str]:
    """Save, with a node per rank, and copy; what was said."""
    said: list[str] = []

    ended: list[str] = []
    copy = RemoteCopies._copy  # noqa: SLF001

    def counted(this: RemoteCopies, folder: Path, save: str) -> None:
        try:
            copy(this, folder, save)
        finally:
            ended.append(folder.name)

    def part(world: Any, copies: RemoteCopies) -> None:
        def complete(folder: Path, save: str) -> None:
            checkpoint.delete_old(run / "checkpoints", ["train"], 2, set())
            copies.add(folder, save)

        world.on_nodes_of(1)
        saving = writer.CheckpointWriter(world, complete)
        for step in steps:
            share = portable_state.rank_share(tensors(step), world.rank, world.size)
            saving.start(run / "checkpoints" / f"train-{step}", share, FACTS)
            saving.wait()
            while len(ended) < steps.index(step) + 1:  # the store is not slower than the saves
                time.sleep(0.001)

    with RemoteCopies(url, run, "a run", said.append) as copies:
        copies._copy = partial(counted, copies)  # type: ignore[method-assign]  # noqa: SLF001
        run_ranks(size, partial(part, copies=copies))
    return said


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_goes_on_elsewhere_from_its_copy(
    size: int, run_ranks: Any, run: Path, url: str, tmp_path: Path
) -> None:
    assert train(run_ranks, run, url, [3, 6, 9], size) == []
    assert set(whole(CheckpointStore(url, run.name))) == {"train-6", "train-9"}  # as here
    folder = fetch_run(f"{url}/{run.name}", tmp_path / "elsewhere")
    assert folder == tmp_path / "elsewhere" / run.name
    for step in (6, 9):
        saved = SavedCheckpoint(folder / "checkpoints" / f"train-{step}")
        saved.verify_checksums()
        assert same({name: saved.read(name) for name in saved.entries}, tensors(step))
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    names = {"recipe.json", "metrics.jsonl", "code/mine.py"}
    assert {name for name in found if not name.startswith("checkpoints/")} == names


def test_a_copy_is_whole_by_its_record_alone(run_ranks: Any, run: Path, url: str, tmp_path: Path) -> None:
    train(run_ranks, run, url, [3, 6])
    store = CheckpointStore(url, run.name)
    store.record({**whole(store)["train-6"], "whole": False})
    folder = fetch_run(f"{url}/{run.name}", tmp_path)
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["train-3"]


def test_saving_a_step_again_replaces_its_copy(run_ranks: Any, run: Path, url: str) -> None:
    store = CheckpointStore(url, run.name)
    train(run_ranks, run, url, [3])
    before = whole(store)["train-3"]["folder"]
    train(run_ranks, run, url, [3], size=2)
    after = whole(store)["train-3"]["folder"]
    assert before != after
    assert {name.partition("/")[0] for name in store.names()} == {"owner", after, f"{after}.json"}


def test_of_two_copies_of_a_step_the_newer_is_fetched(
    run_ranks: Any, run: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteCopies, "_remove_old", lambda *_: None)  # as where the run ends before
    train(run_ranks, run, url, [3], size=2)
    train(run_ranks, run, url, [3])
    folder = fetch_run(f"{url}/{run.name}", tmp_path)
    saved = SavedCheckpoint(folder / "checkpoints" / "train-3")
    saved.verify_checksums()
    assert not (saved.folder / "node-00001.safetensors").exists()


def test_a_checkpoint_that_is_gone_again_keeps_no_other_waiting(run: Path, url: str) -> None:
    said: list[str] = []
    with RemoteCopies(url, run, "a run", said.append) as copies:
        copies.add(run / "checkpoints" / "train-3", "x")
    assert "train-3 is not copied (FileNotFoundError" in said[0]


def test_a_store_that_fails_while_it_is_fetched_is_one_line(
    run_ranks: Any, run: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_ranks, run, url, [3])

    def fail(*_: object) -> None:
        raise OSError("503")

    monkeypatch.setattr(type(CheckpointStore(url, run.name).files), "get_file", fail)
    with pytest.raises(UserError, match="cannot be read: OSError: 503"):
        fetch_run(f"{url}/{run.name}", tmp_path)


def test_a_run_of_the_same_name_does_not_replace_the_copies_of_another(
    run_ranks: Any, run: Path, url: str, tmp_path: Path
) -> None:
    train(run_ranks, run, url, [3])
    other = tmp_path / "elsewhere" / run.name
    other.mkdir(parents=True)
    with pytest.raises(UserError, match="holds copies of another run with the name it's"):
        RemoteCopies(url, other, "another", print)
    with pytest.raises(UserError, match="elsewhere/it's 日本 is another run than that of memory://"):
        fetch_run(f"{url}/{run.name}", tmp_path / "elsewhere", "another")
    assert set(whole(CheckpointStore(url, run.name))) == {"train-3"}


def test_a_newer_copy_replaces_what_is_here(run_ranks: Any, run: Path, url: str, tmp_path: Path) -> None:
    train(run_ranks, run, url, [3])
    here = fetch_run(f"{url}/{run.name}", tmp_path / "elsewhere")
    (here / "exports").mkdir()
    (here / "metrics.jsonl").write_text("newer")
    assert fetch_run(f"{url}/{run.name}", tmp_path / "elsewhere") == here
    assert (here / "metrics.jsonl").read_text() == "newer"
    train(run_ranks, run, url, [6])
    assert fetch_run(f"{url}/{run.name}", tmp_path / "elsewhere") == here
    assert {path.name for path in (here / "checkpoints").iterdir()} == {"train-3", "train-6"}
    assert (here / "exports").is_dir()
    assert not here.with_name(f".{here.name}.fetched").exists()


def test_a_store_that_is_gone_is_said_and_ends_nothing(
    run_ranks: Any, run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("503 Slow Down\nmore")

    for name in ("put_file", "pipe_file", "cat_file"):
        monkeypatch.setattr(MemoryFileSystem, name, fail)
    said = train(run_ranks, run, url, [3, 6])
    name = f"--checkpoint-copy {url}: train-"
    assert "does not answer (OSError: 503 Slow Down)" in said.pop(0)
    assert said == [f"{name}{n} is not copied (OSError: 503 Slow Down); training goes on" for n in (3, 6)]
    assert (run / "checkpoints" / "train-6").is_dir()


def test_a_store_slower_than_the_saves_gets_the_newest(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    copied: list[str] = []
    copies = RemoteCopies(url, run, "a run", said.append)
    monkeypatch.setattr(copies, "_copy", lambda folder, *_: copied.append(folder.name))
    for step in (3, 6, 9, 12):
        copies.add(run / "checkpoints" / f"train-{step}", "x")
    with copies:
        pass
    assert copied == ["train-9", "train-12"]
    assert [line.split()[2] for line in said] == ["train-3", "train-6"]


@pytest.mark.parametrize(("error", "waits"), [(StopRequestedError("stop", ""), True), (ValueError(), False)])
def test_an_error_waits_for_no_copy_and_a_request_to_stop_does(
    error: Exception, waits: bool, run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    held, ended = threading.Event(), threading.Event()
    copies = RemoteCopies(url, run, "a run", print)
    monkeypatch.setattr(copies, "_copy", lambda *_: held.wait(10) and ended.set())
    threading.Timer(0.05 if waits else 0.5, held.set).start()
    copies.add(run / "checkpoints" / "train-3", "x")
    with pytest.raises(type(error)), copies:
        raise error
    assert ended.is_set() == waits
    assert ended.wait(10)


@pytest.mark.parametrize("name", ["../../stolen", "/tmp/stolen-by-a-record"])
def test_a_record_names_no_file_elsewhere(
    name: str, run_ranks: Any, run: Path, url: str, tmp_path: Path
) -> None:
    train(run_ranks, run, url, [3])
    store = CheckpointStore(url, run.name)
    said = whole(store)["train-3"]
    said["files"][name] = 1
    store.record(said)
    put(store, f"{said['folder']}/{name}", b"x") if ".." not in name else None
    with pytest.raises(UserError, match="a file elsewhere"):
        fetch_run(f"{url}/{run.name}", tmp_path / "a" / "b")


def objects(store: Any) -> dict[str, bytes]:
    return {name: store.files.cat_file(f"{store.root}/{name}") for name in store.names()}


def put(store: Any, name: str, content: bytes = b'{"folder": "2025-thesis", "files": ["w.bin"]}') -> None:
    if "file" in store.files.protocol:
        store.files.makedirs(f"{store.root}/{name}".rpartition("/")[0], exist_ok=True)
    store.files.pipe_file(f"{store.root}/{name}", content)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_place_with_anything_else_in_it_is_refused_by_name(
    kind: str, run: Path, url: str, tmp_path: Path
) -> None:
    store = CheckpointStore(url if kind == "memory" else f"file://{tmp_path}/store", run.name)
    put(store, "2025-thesis/w.bin")
    with pytest.raises(UserError, match=r"holds 2025-thesis/w\.bin, which no copy wrote: give another"):
        RemoteCopies(url if kind == "memory" else f"file://{tmp_path}/store", run, "a run", print)
    assert store.names() == ["2025-thesis/w.bin"]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_only_what_a_copy_wrote_is_removed(
    kind: str, run_ranks: Any, run: Path, url: str, tmp_path: Path
) -> None:
    """What came since the run began, in any folder, stays; of a copy that was cut off nothing does."""
    url = url if kind == "memory" else f"file://{tmp_path}/store"
    store = CheckpointStore(url, run.name)
    foreign = {"2025-thesis/w.bin": b"precious", "train-0-notes/mine.txt": b"precious"}
    remove = RemoteCopies._remove_old  # noqa: SLF001

    def later(this: RemoteCopies, *given: str) -> None:
        for name, content in {**foreign, "train-1-cut/mine.txt": b"precious"}.items():
            put(store, name, content)
        cut = {"checkpoint": "train-1", "folder": "train-1-cut", "files": {"a/b": 1, "never-sent": 2}}
        put(store, "train-1-cut/a/b")
        store.record({**cut, "saved_at": 1, "whole": False})
        remove(this, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteCopies, "_remove_old", later)
        assert train(run_ranks, run, url, [3, 6, 9], size=2) == []
    left = objects(store)
    kept = {name for name in left if not name.startswith(("train-6", "train-9"))}
    assert kept == {"owner", *foreign, "train-1-cut/mine.txt"}
    assert {left[name] for name in foreign} == {b"precious"}
    if kind == "file":
        assert not (tmp_path / "store" / run.name / "train-1-cut" / "a").exists()


@pytest.mark.parametrize(
    "record",
    [
        {"checkpoint": "train-1", "folder": "train-1-x", "files": {"../../../precious": 1}},
        {"checkpoint": "train-1", "folder": "train-1-x", "files": {"link/precious": 1}},
        {"checkpoint": "..", "folder": "..-/..", "files": {"precious": 1}},
        {"checkpoint": "", "folder": "-/../../precious", "files": {"": 1}},
    ],
)
def test_a_record_removes_nothing_elsewhere(
    record: dict[str, Any], run_ranks: Any, run: Path, tmp_path: Path
) -> None:
    """It may have come with a store that somebody sent."""
    (tmp_path / "precious").write_text("precious")
    url = f"file://{tmp_path}/store"
    store = CheckpointStore(url, run.name)
    train(run_ranks, run, url, [3])
    folder = tmp_path / "store" / run.name
    (folder / "train-1-x").mkdir()
    (folder / "train-1-x" / "link").symlink_to(tmp_path)
    for name in (record["folder"].partition("/")[0], record["checkpoint"]):
        put(store, f"{name}.json", json.dumps({"saved_at": 1, **record}).encode())
    with contextlib.suppress(UserError):
        RemoteCopies(url, run, "a run", print)._remove_old("", "")  # noqa: SLF001
    assert (tmp_path / "precious").read_text() == "precious"


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{SECRET}@bucket/prefix",
        f"https://host/copies?X-Amz-Signature={SECRET}",
        f"s3://key:{SECRET}%40bucket/prefix",
        f"https:/user:{SECRET}@host/x",
    ],
)
def test_a_password_or_key_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UserError, match=r"^--checkpoint-copy .*: (leave .* out|is no URL)") as said:
        RunOptions(checkpoint_copy=url)
    assert SECRET not in str(said.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("The bucket does not exist"), "cannot be written: FileNotFoundError: The bucket"),
        (
            PermissionError(f"403 at https://me:{SECRET}@host/x?X-Amz-Signature={SECRET}&a=b"),
            r"403 at https://\.\.\.host/x\?\.\.\.$",
        ),
    ],
)
def test_what_a_store_says_is_shown_before_training_without_its_password(
    error: Exception, said: str, run: Path, url: str, monkeypatch: Any
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(UserError, match=said):
        RemoteCopies(url, run, "a run", print)


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_run_has_a_name_in_its_store(name: str) -> None:
    """Else all of the store would be taken for its copies."""
    with pytest.raises(UserError, match="with the run's name"):
        CheckpointStore("memory://x", name)


def test_urls_that_cannot_be_used_have_a_line(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no whole copy"):
        fetch_run(f"{url}/no-run", tmp_path)
    with pytest.raises(UserError, match="--checkpoint-copy nonsense://x: Protocol not known"):
        CheckpointStore("nonsense://x", "run")


def test_an_s3_server(run_ranks: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }.items():
            monkeypatch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        assert train(run_ranks, run, "s3://bucket/prefix", [3, 6, 9], size=2) == []
        folder = fetch_run(f"s3://bucket/prefix/{run.name}", tmp_path / "elsewhere")
        assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["train-6", "train-9"]
        saved = SavedCheckpoint(folder / "checkpoints" / "train-9")
        saved.verify_checksums()
        assert same({name: saved.read(name) for name in saved.entries}, tensors(9))
        assert not any(
            name.startswith("train-3") for name in CheckpointStore("s3://bucket/prefix", run.name).names()
        )
    finally:
        server.stop()
