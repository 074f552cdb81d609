"""Tests of models/hub.py::push, against a server on this machine with the paths of the hub's API."""

from __future__ import annotations

import base64
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from isobatch.core.errors import UserError
from isobatch.models import hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "hf_" + "0123456789" * 4


class Hub(BaseHTTPRequestHandler):
    """Keeps what is pushed; large files as the hub's Git LFS takes them."""

    repositories: dict[str, dict[str, Any]]
    stored: dict[str, bytes]
    commits: list[dict[str, bytes]]
    breaks_at: str

    log_message = print

    def answer(self, value: Any, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        name = re.sub("/(revision|tree|xet).*", "", self.path.removeprefix("/api/models/"))
        known = self.repositories.get(name)
        self.answer(
            {"id": name, "sha": "0" * 40, "siblings": [], **known} if known else {}, 200 if known else 404
        )

    def do_PUT(self) -> None:
        self.stored[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        raw = self.body()
        here = f"http://{self.headers['Host']}"
        if type(self).breaks_at and type(self).breaks_at in self.path:
            return self.answer({"error": "the quota is used up"}, 403)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "who are you?"}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(raw)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            code = 409 if name in self.repositories else 200
            kept = self.repositories.setdefault(
                name, {"private": asked.get("visibility") == "private" or bool(asked.get("private"))}
            )
            return self.answer({"url": f"{here}/{name}", "name": name, "id": name, **kept}, code)
        if "/preupload/" in self.path:
            kinds = {f["path"]: "regular" for f in json.loads(raw)["files"]}
            kinds |= {path: "lfs" for path in kinds if path.endswith(".safetensors")}
            rows = [
                {"path": p, "uploadMode": k, "shouldIgnore": False, "oid": None} for p, k in kinds.items()
            ]
            return self.answer({"files": rows})
        if self.path.endswith("/objects/batch"):
            rows = []
            for one in json.loads(raw)["objects"]:
                goal = {"upload": {"href": f"{here}/lfs/{one['oid']}", "header": {}}}
                rows.append(one | ({} if one["oid"] in self.stored else {"actions": goal}))
            return self.answer({"transfer": "basic", "objects": rows})
        if "/commit/" in self.path:
            files = {}
            for line in map(json.loads, raw.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.stored[value["oid"]]
            self.commits.append(files)
            done = {"commitOid": "1" * 40, "commitUrl": f"{here}/me/bot/commit/1", "success": True}
            return self.answer({**done, "hookOutput": ""})
        return self.answer({"errors": [], "warnings": []})


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, breaks_at: str = "") -> Iterator[type[Hub]]:
    kept: dict[str, Any] = {"repositories": {}, "stored": {}, "commits": [], "breaks_at": breaks_at}
    handler = type("Here", (Hub,), kept)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    try:
        yield handler
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "final"
    folder.mkdir()
    for name, text in {
        "README.md": "---\ntags:\n- x\n---\n",
        "config.json": "{}",
        "parity.json": "{}",
    }.items():
        (folder / name).write_text(text)
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    return folder


def test_a_folder_is_pushed_and_sent_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch) as server:
        hub.check_push("bot")
        found = hub.push([model], "bot", private=True)
        assert (found["repo"], server.repositories) == ("me/bot", {"me/bot": {"private": True}})
        wanted = {f.name: f.read_bytes() for f in model.iterdir() if f.name != "parity.json"}
        assert server.commits == [wanted]
        hub.push([model], "me/bot", private=True)
        assert not [f for f in model.rglob("*") if f.is_file() and TOKEN in f.read_text(errors="ignore")]


@pytest.mark.parametrize("breaks_at", ["/repos/create", "/preupload/", "/objects/batch", "/commit/"])
def test_an_upload_that_breaks_off_is_a_sentence_and_goes_on(
    breaks_at: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(monkeypatch, breaks_at) as server:
        with pytest.raises(UserError, match=r"--to hub: bot: .*the same command again goes on") as refused:
            hub.push([model], "bot", private=False)
        assert server.commits == []
        assert "\n" not in str(refused.value)
        assert TOKEN not in str(refused.value)
        server.breaks_at = ""
        hub.push([model], "bot", private=False)
        assert len(server.commits) == 1


def test_what_cannot_be_pushed_is_refused_before(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch) as server:
        server.repositories["me/open"] = {"private": False}
        with pytest.raises(UserError, match="--private: me/open is there already, and public"):
            hub.push([model], "me/open", private=True)
        (model / "adapter_config.json").write_text('{"base_model_name_or_path": "/home/me/base"}')
        with pytest.raises(UserError, match="a folder that others lack: push --to merged,hub"):
            hub.push([model], "bot", private=False)
        assert server.commits == []
        with pytest.raises(UserError, match="is no name of a repository"):
            hub.check_push("a/b/c")
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(UserError, match=r"http://127.0.0.1:9 cannot be reached: nothing was pushed"):
            hub.check_push("bot")
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
        with pytest.raises(UserError, match="hf auth login, or set HF_TOKEN"):
            hub.check_push("bot")
