"""Tests of launch/serving: who may ask, how long a request may take to come, what a client who left frees."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from isobatch.core.errors import UserError
from isobatch.launch.predicting.predict import Answerer
from isobatch.launch.predicting.tables import SequenceReader, TextReader, WordReader
from isobatch.launch.serving import app as serving_app
from isobatch.launch.serving import command, guard
from isobatch.launch.serving.app import prediction_app
from isobatch.launch.serving.guard import Door, read_key
from isobatch.launch.serving.openai_api import language_model_app

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

JSON = {"Content-Type": "application/json"}


def echo(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"says": text} for text in texts]


def door(*hosts: str, key: str | None = None) -> Door:
    model: Future[Any] = Future()
    model.set_result(prediction_app("p", Answerer(echo, TextReader(pairs=False))))
    return Door("p", model, list(hosts), key)


EMPTY = {
    "texts": (TextReader(pairs=False), ["a", "", "b", "  ", "c"], {1: "is empty", 3: "is empty"}),
    "pairs": (TextReader(pairs=True), [["a", "b"], ["a", ""], ["c", "d"]], {1: "is empty"}),
    "words": (WordReader(), [["a"], [], ["", "b"]], {1: "is an empty list", 2: "is empty"}),
    "sequences": (SequenceReader(), ["", [1, 2], "a"], {0: "is empty"}),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_an_empty_sample_has_an_empty_answer_that_says_why_and_the_others_have_theirs(kind: str) -> None:
    reader, values, empty = EMPTY[kind]

    def answer(samples: Sequence[Any]) -> list[dict[str, Any]]:
        return [{"says": one, "each": {"a": 0.5}} for one in samples]

    client = TestClient(prediction_app("p", Answerer(answer, reader)))
    found = client.post("/predict", json={"texts": values}).json()["predictions"]
    for place, (value, one) in enumerate(zip(values, found, strict=True)):
        if why := empty.get(place):
            assert one.pop("error") == f"texts[{place}]: {why}: leave it out"
            assert one == {"says": None, "each": {"a": None}}
        else:
            assert one == {"says": value, "each": {"a": 0.5}}
    refused = client.post("/predict", json={"texts": [values[place] for place in empty]})
    assert refused.status_code == 400, "where none has an answer"
    assert refused.json()["error"]["message"] == f"texts[0]: {next(iter(empty.values()))}: leave it out"
    wrong = client.post("/predict", json={"texts": [*values, 7]})
    assert wrong.status_code == 400, "what is no text is a fault of the program that asks"


def status(door: Door, path: str = "/", **headers: str) -> int:
    client = TestClient(door, base_url="http://127.0.0.1")
    found = client.get(path, headers={name: value.encode() for name, value in headers.items()})
    if found.status_code >= 400:
        assert "\n" not in found.json()["error"]["message"]
    return int(found.status_code)


LOOPBACK = ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST", "localhost.", "[::1]", "[::1]:8000"]
FOREIGN = ["evil.com", "127.0.0.1.evil.com", "localhost.evil.com", "[::1", "", "a b", "@"]
EVERYWHERE = ("0.0.0.0", "0.0.0.0", " models.example.org")


@pytest.mark.parametrize(
    ("names", "allowed", "refused"),
    [
        (("127.0.0.1", ""), LOOPBACK, [*FOREIGN, "8.8.8.8", "[::2]"]),
        (("box.lan", "10.0.0.7"), [*LOOPBACK, "Box.lan:80", "10.0.0.7"], [*FOREIGN, "8.8.8.8"]),
        (EVERYWHERE, [*LOOPBACK, "192.168.1.5:8000", "[fe80::1]:8000", "models.example.org"], FOREIGN),
    ],
)
def test_a_host_that_nobody_named_is_refused(
    names: tuple[str, ...], allowed: list[str], refused: list[str]
) -> None:
    guarded = door(*names)
    assert {host: status(guarded, Host=host) for host in allowed} == dict.fromkeys(allowed, 200)
    assert {host: status(guarded, "/health", Host=host) for host in refused} == dict.fromkeys(refused, 403)


def test_a_key_is_asked_for_everything_but_health() -> None:
    guarded = door("127.0.0.1", key="sécret")
    assert status(guarded, "/health") == status(guarded, "/ready") == 200
    for wrong in ("", "Bearer", "Bearer secret", "Bearer sécret2", "Basic abc", "sécret"):
        assert status(guarded, Authorization=wrong) == 401, wrong
    assert status(guarded, Authorization="Bearer sécret") == 200


def test_a_key_is_read_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ISOBATCH_API_KEY", raising=False)
    assert read_key(None) is None
    monkeypatch.setenv("ISOBATCH_API_KEY", "from the environment\n")
    assert read_key(None) == "from the environment"
    (tmp_path / "key").write_text("from the file\n")
    assert read_key(str(tmp_path / "key")) == "from the file"
    for name, content in {"empty": b"\n", "two": b"one\ntwo", "bytes": b"\xff"}.items():
        (tmp_path / name).write_bytes(content)
    for name in ("empty", "two", "bytes", "sk-typed-by-mistake"):
        with pytest.raises(UserError, match="--api-key: give a file") as caught:
            read_key(str(tmp_path / name))
        assert name not in str(caught.value)


def test_health_answers_while_the_model_loads_and_ready_only_after_it() -> None:
    loading: Future[Any] = Future()
    client = TestClient(Door("p", loading, [], None), base_url="http://localhost")

    def statuses() -> list[int]:
        return [client.get(path).status_code for path in ("/health", "/ready", "/")]

    assert statuses() == [200, 503, 503]
    assert client.get("/health").json() == {"model": "p", "ready": False}
    assert "is being loaded" in client.post("/predict", json={"texts": ["a"]}).json()["error"]["message"]
    loading.set_result(prediction_app("p", Answerer(echo, TextReader(pairs=False))))
    assert statuses() == [200, 200, 200]


@contextlib.contextmanager
def served(app: Any) -> Iterator[int]:
    """The port of a server in a thread."""
    with command.listen("127.0.0.1", 0) as listener:
        server = guard.new_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def answer(port: int, *sent: bytes, pause: float = 0.0) -> bytes:
    """All that comes on a connection until it is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        with contextlib.suppress(ConnectionError):
            for piece in sent:
                client.sendall(piece)
                time.sleep(pause)
        with contextlib.suppress(ConnectionError):
            return b"".join(iter(lambda: client.recv(4096), b""))
    return b""


HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF_A_BODY = HEAD + b"Content-Length: 50\r\n\r\n{"


@pytest.mark.parametrize("sent", [b"", b"POST /pre", b"GET / HTTP/1.1\r\nHost: lo", HALF_A_BODY])
def test_a_request_that_does_not_come_is_ended(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "READ_SECONDS", 0.3)
    with served(door()) as port:
        began = time.monotonic()
        assert b"400 Bad Request" in (found := answer(port, sent))
        assert b"the request did not come within 0.3 seconds" in found
        assert 0.2 < time.monotonic() - began < 3


def test_a_request_that_trickles_in_is_ended_also_on_a_connection_that_asked_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "READ_SECONDS", 0.3)
    whole = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served(door()) as port:
        began = time.monotonic()
        found = answer(port, whole, *(bytes([b]) for b in whole * 3), pause=0.05)
        assert found.count(b"200 OK") == 1
        assert b"did not come within" in found
        assert time.monotonic() - began < 5


def test_a_request_in_pieces_of_a_byte_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "PARSE_SECONDS", 0.01)
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    with served(door()) as port:
        found = answer(port, head, *[b"1\r\n \r\n" * 1000] * 50)
    assert found == b"" or b"in too many pieces" in found, (
        "the end may overtake the answer while more is sent"
    )


class Endless:
    """Writes until nobody asks for more, and counts."""

    prompt_tokens, is_full, tokens = 1, False, 0

    def __init__(self, prompt: Any, _: Any) -> None:
        self.silent = prompt == "silent"

    def __iter__(self) -> Iterator[str]:
        for Endless.tokens in itertools.count():
            time.sleep(0.001)
            yield "" if self.silent else "a "


@pytest.mark.parametrize("prompt", ["loud", "silent"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_who_left_frees_the_model(stream: bool, prompt: str) -> None:
    model: Future[Any] = Future()
    model.set_result(language_model_app("m", Endless, None))
    with served(Door("m", model, [], None)) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        Endless.tokens = 0
        body = {"prompt": prompt, "stream": stream, "max_tokens": 9}
        client.request("POST", "/v1/completions", json.dumps(body), JSON)
        while Endless.tokens < 10:
            time.sleep(0.01)
        client.close()
        time.sleep(0.3)
        written = Endless.tokens
        time.sleep(0.2)
        assert Endless.tokens == written


def test_a_request_of_many_texts_takes_turns_and_ends_with_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_app, "PART_SAMPLES", 3)
    asked: list[Sequence[str]] = []

    def slow(texts: Sequence[str]) -> list[dict[str, Any]]:
        asked.append(list(texts))
        time.sleep(0.02)
        return echo(texts)

    model: Future[Any] = Future()
    model.set_result(prediction_app("p", Answerer(slow, TextReader(pairs=False))))
    with served(Door("p", model, [], None)) as port:
        many, one = (http.client.HTTPConnection("127.0.0.1", port, timeout=10) for _ in range(2))
        many.request("POST", "/predict", json.dumps({"texts": ["many"] * 1000}), JSON)
        while len(asked) < 3:
            time.sleep(0.005)
        one.request("POST", "/predict", json.dumps({"texts": ["one"]}), JSON)
        assert json.loads(one.getresponse().read())["predictions"] == [{"says": "one"}]
        assert len(asked) < 100
        many.close()
        time.sleep(0.2)
        parts = len(asked)
        time.sleep(0.2)
        assert len(asked) == parts < 400
    assert max(map(len, asked)) <= 3
