"""Models of a hub, against a small hub server on this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from isobatch.models.hub import files_to_download, has_weights
from isobatch.tests.integration.helpers import launch, succeed, summary
from isobatch.tests.integration.test_bad_input import complaint
from isobatch.tests.paths import new_cache
from isobatch.tests.tiny_models import save_gpt2

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMIT = "a" * 40
NAME = "owner/little"
TASK = ["auto", "--task", "causal-lm", "--steps", "2", "--max-length", "32", "--quiet"]


class Hub(BaseHTTPRequestHandler):
    """One public model, `owner/little`; `owner/closed` is gated; there is nothing else."""

    folder: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        closed, little = "owner/closed" in self.path, NAME in self.path
        if closed or not little:
            refused = ("403", "GatedRepo") if closed else ("404", "RepoNotFound")
            self._answer(int(refused[0]), b"", {"X-Error-Code": refused[1], "X-Error-Message": "no"})
        elif self.path.startswith("/api/"):
            named = re.search("/revision/([^?]+)", self.path)
            if named and named[1] not in ("main", COMMIT):
                self._answer(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no"})
                return
            self._answer(200, json.dumps(self._listing()).encode(), {"Content-Type": "application/json"})
        else:
            file = self.folder / self.path.split("?")[0].rpartition("/")[2]
            body = file.read_bytes() if file.is_file() else b""
            tag = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
            missing = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
            self._answer(200 if body else 404, body, tag if body else missing)

    def _listing(self) -> object:
        names = [f.name for f in self.folder.iterdir()] + ["onnx/model.onnx"]
        if "/tree/" in self.path:
            return [{"type": "file", "path": n, "size": 1, "oid": n} for n in names]
        siblings = [{"rfilename": n} for n in names]
        return {"id": NAME, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a program that should ask this hub; its cache is empty."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    save_gpt2(folder, 300)
    (folder / "pytorch_model.bin").write_bytes(b"nobody should want this")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Ours", (Hub,), {"folder": folder}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = str(tmp_path_factory.mktemp("home"))
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": home,
        "HF_HUB_DISABLE_XET": "1",
        "ISOBATCH_CACHE": new_cache(Path(home, "prepared")),
    }
    server.shutdown()


def test_a_model_comes_whole_after_its_tokenizer_and_is_then_here(
    hub: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a small text\n" for n in range(400)))
    words = [*TASK, "--model", NAME, "--data", "text.txt"]
    succeed(*words, "--name", "fetched", cwd=tmp_path, **hub)
    assert summary(tmp_path / "runs" / "fetched")["parameters"] > 0
    cached = [f.name for f in Path(hub["HF_HOME"]).rglob("snapshots/*/*")]
    assert "model.safetensors" in cached
    assert "pytorch_model.bin" not in cached
    offline = {**hub, "HF_HUB_OFFLINE": "1"}
    succeed(*words, "--name", "offline", "--again", cwd=tmp_path, **offline)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "owner/closed"], "owner/closed: is gated: accept its terms"),
        (["--model", "owner/nothing"], "owner/nothing: is not on the hub, or private"),
        (["--model", NAME, "--revision", "v9"], f"{NAME}: has no branch, tag or commit v9"),
    ],
    ids=["gated", "missing", "revision"],
)
def test_what_the_hub_refuses_is_one_line(
    words: list[str], said: str, hub: dict[str, str], tmp_path: Path
) -> None:
    assert said in complaint(launch(*TASK, *words, cwd=tmp_path, **hub))


SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin", "tf_model.h5", "onnx/model.onnx"], ["model.safetensors"]),
        (["pytorch_model.bin", "flax_model.msgpack"], ["pytorch_model.bin"]),
        ([*SHARDS, "consolidated.safetensors"], SHARDS),
    ],
    ids=["safetensors", "pickles alone", "shards"],
)
def test_one_form_of_the_weights_is_enough(weights: list[str], wanted: list[str]) -> None:
    small = ["config.json", "generation_config.json", "merges.txt", "modeling_own.py", "README.md"]
    found = files_to_download([*small, *weights, "LICENSE", "original/params.json"])
    assert sorted(found) == sorted(small + wanted)


def test_half_of_the_weights_are_none(tmp_path: Path) -> None:
    parts = dict(zip("ab", SHARDS, strict=True))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    (tmp_path / parts["a"]).write_text("")
    assert not has_weights(tmp_path)
    (tmp_path / parts["b"]).write_text("")
    assert has_weights(tmp_path)
