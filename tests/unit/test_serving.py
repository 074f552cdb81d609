"""Tests of launch/serving: batches of concurrent requests, stop strings, requests that are wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from isobatch.core.errors import UserError
from isobatch.data.text.chat_templates import ChatTemplate
from isobatch.launch.predicting.predict import Answerer
from isobatch.launch.predicting.tables import (
    PromptReader,
    RowReader,
    SequenceReader,
    TextReader,
    UserReader,
    WordReader,
)
from isobatch.launch.serving.app import (
    MAX_BODY_BYTES,
    MAX_CHARACTERS,
    MAX_SAMPLES,
    BatchingQueue,
    prediction_app,
)
from isobatch.launch.serving.openai_api import language_model_app, until_stop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TEMPLATE = ChatTemplate(
    name="plain",
    jinja="{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
    end="</s>",
    end_id=0,
    closing="\n",
    tokens={},
)


class Echo:
    """Answers each text by itself in capitals, and remembers the sizes of batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def __call__(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        assert self.may_go.wait(10)
        self.batches.append(len(texts))
        if "wrong" in texts:
            raise UserError("wrong: is no text")
        return [{"says": text.upper()} for text in texts]


async def ask_together(echo: Echo, texts: Sequence[str]) -> list[Any]:
    """All asked before the first batch is done."""
    queue = BatchingQueue(echo)
    echo.may_go.clear()
    asked = [asyncio.create_task(queue.ask([text, text + "!"])) for text in texts]
    await asyncio.sleep(0.01)
    echo.may_go.set()
    return await asyncio.gather(*asked, return_exceptions=True)


def test_concurrent_requests_are_one_batch_and_get_their_own_answers() -> None:
    echo, texts = Echo(), [f"text {n}" for n in range(9)]
    found = asyncio.run(ask_together(echo, texts))
    assert found == [[{"says": t.upper()}, {"says": t.upper() + "!"}] for t in texts]
    assert sum(echo.batches) == 18
    assert len(echo.batches) <= 2


def test_only_who_asked_something_wrong_hears_of_it() -> None:
    found = asyncio.run(ask_together(Echo(), ["a", "wrong", "b"]))
    assert isinstance(found[1], UserError)
    assert [found[0][0], found[2][0]] == [{"says": "A"}, {"says": "B"}]


def cut_before(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.find(s) for s in stops if s in text), default=len(text))]


class Pieces(list[str]):
    prompt_tokens = tokens = 0
    is_full = True


@given(st.lists(st.text("abc", max_size=4)), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_a_stop_string_is_found_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    found = list(until_stop(Pieces(pieces), stops))
    whole = "".join(pieces)
    first = next((n for n in range(len(whole) + 1) if any(s in whole[:n] for s in stops)), None)
    # A longer stop string that begins earlier may be complete within the same piece.
    expected = {cut_before(whole[:n], stops) for n in range(first, len(whole) + 1)} if first else {whole}
    assert "".join(piece for piece, _ in found) in expected
    assert found[-1][1] == ("length" if first is None else "stop")


class Writer:
    """Writes the prompt's words backwards, one a piece."""

    def __init__(self, prompt: Any, sampling: Any) -> None:
        text = prompt if isinstance(prompt, str) else "".join(part[0] for part in prompt)
        self.words = text.split()[::-1]
        self.most = sampling.max_new_tokens
        self.prompt_tokens, self.tokens = len(self.words), 0

    @property
    def is_full(self) -> bool:
        return self.tokens >= self.most

    def __iter__(self) -> Iterator[str]:
        for word in self.words[: self.most]:
            self.tokens += 1
            yield f"{word} "


@pytest.fixture
def model() -> Iterator[TestClient]:
    with TestClient(language_model_app("m", Writer, TEMPLATE)) as client:
        yield client


@pytest.fixture
def answers() -> Iterator[TestClient]:
    with TestClient(prediction_app("p", Answerer(Echo(), TextReader(pairs=False)))) as client:
        yield client


def test_completions_as_openai_describes_them(model: TestClient) -> None:
    assert [m["id"] for m in model.get("/v1/models").json()["data"]] == ["m"]
    found = model.post("/v1/completions", json={"model": "m", "prompt": "c d e", "max_tokens": 2})
    body = found.json()
    assert body["object"] == "text_completion"
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [(0, "e d ", "length")]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    stopped = model.post("/v1/completions", json={"prompt": "a b c", "stop": "b", "max_tokens": 9}).json()
    assert stopped["choices"][0]["text"] == "c "
    assert stopped["choices"][0]["finish_reason"] == "stop"


def test_a_stream_says_what_the_whole_says(model: TestClient) -> None:
    asked = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 3, "stop": ["eno"]}
    whole = model.post("/v1/chat/completions", json=asked).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with model.stream("POST", "/v1/chat/completions", json=asked | options) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in streamed.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    *events, usage = map(json.loads, lines)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert (
        "".join(d["content"] for d in deltas) == whole["choices"][0]["message"]["content"] == "three two one "
    )
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert usage["usage"] == whole["usage"]


TEXT = {"prompt": "a"}
ASKED = {"messages": [{"role": "user", "content": "a"}]}
JSON = {"Content-Type": "application/json"}
WRONG: dict[str, list[tuple[Any, str]]] = {
    "/v1/completions": [
        (TEXT | {"temprature": 1}, "did you mean temperature?"),
        ({"prompt": ["a"]}, "prompt: must be a text"),
        (TEXT | {"temperature": 3}, "temperature: must be a number from 0 to 2"),
        (TEXT | {"n": 2}, "n: only 1 is supported"),
        *((TEXT | {"stop": stop}, "stop: must be a text") for stop in ([1], ["a"] * 17, "a" * 257)),
    ],
    "/v1/chat/completions": [
        ({}, "messages: must be a list"),
        ({"messages": ["a"]}, 'message 1 is str, not an object with "role"'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "not the assistant's"),
        ({"messages": ASKED["messages"] * 800}, "messages: 800 are too long together"),
    ],
    "/predict": [
        ({}, "give {"),
        ({"texts": ["a"] * (MAX_SAMPLES + 1)}, "texts: must be a list of 1 to"),
        ({"texts": ["a", "b" * (MAX_CHARACTERS + 1)]}, "texts: each may have at most 65,536 characters"),
        ({"texts": ["a", 1]}, "texts[1]: holds int, not text"),
        ({"rows": [{"txt": "a"}]}, "rows[0]: has no column"),
        ([1], "the body is list"),
        ({"texts": ["\ud800"]}, "the body is not JSON"),
    ],
}


def require_sentence(found: Any, expected: str, status: int = 400) -> None:
    assert found.status_code == status
    error = found.json()["error"]
    assert expected in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("path", WRONG)
def test_what_is_wrong_is_one_sentence(path: str, model: TestClient, answers: TestClient) -> None:
    client = answers if path == "/predict" else model
    for body, expected in WRONG[path]:
        status = 413 if "too long together" in expected else 400
        require_sentence(client.post(path, content=json.dumps(body), headers=JSON), expected, status)


FIELDS: dict[type[RowReader], tuple[dict[str, Any], str]] = {
    TextReader: (
        {"sentense": "a"},
        "(did you mean sentence?); it has: sentense; --text-column names",
    ),
    WordReader: ({"tokenz": ["a"]}, "(did you mean tokens?); it has: tokenz"),
    SequenceReader: ({"sequense": [1]}, "(did you mean sequence?); it has: sequense"),
    PromptReader: ({"promt": "a"}, "(did you mean prompt?); it has: promt"),
    UserReader: ({"item": ["a"]}, "rows[0]: item: there is no such field (did you mean items?)"),
}
"""A reader -> a row whose only field means nothing to it, and what is said."""


@pytest.mark.parametrize("reader", FIELDS)
def test_a_row_with_a_wrong_field_alone_is_refused_by_every_task(reader: type[RowReader]) -> None:
    row, expected = FIELDS[reader]
    with TestClient(prediction_app("p", Answerer(Echo(), reader()))) as client:
        require_sentence(client.post("/predict", json={"rows": [row]}), expected)


@pytest.mark.parametrize("column", [None, "kunde"])
def test_a_recommender_reads_all_that_a_row_holds(column: str | None) -> None:
    name = column or "customer_id"
    with TestClient(prediction_app("p", Answerer(Echo(), UserReader(column)))) as client:
        rows = {column or "user": {"basket": ["a"]}, name: {name: "7", "items": ["a"], "basket": ["b"]}}
        for there, row in rows.items():
            said = f"rows[1]: basket: there is no such field; there are {there}, items"
            require_sentence(client.post("/predict", json={"rows": [{"items": ["a"]}, row]}), said)


def test_other_wrong_requests(model: TestClient, answers: TestClient) -> None:
    require_sentence(model.post("/v1/completions", json=TEXT | {"model": "x"}), "this server has 'm'", 404)
    require_sentence(model.get("/v2"), "there are /v1/models", 404)
    require_sentence(answers.get("/predict"), "Method Not Allowed", 405)
    large = b" " * (MAX_BODY_BYTES + 1)
    require_sentence(answers.post("/predict", content=large, headers=JSON), "larger than 1 MiB", 413)
    require_sentence(answers.post("/predict", content=b"{}"), "Content-Type: must be application/json", 415)
    with TestClient(language_model_app("m", Writer, None)) as plain:
        require_sentence(plain.post("/v1/chat/completions", json=ASKED), "use /v1/completions")


def test_a_bug_is_said_in_the_terminal_and_answered(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(_: Sequence[str]) -> list[dict[str, Any]]:
        raise RuntimeError("a bug")

    app = prediction_app("p", Answerer(fail, TextReader()))
    with TestClient(app, raise_server_exceptions=False) as client:
        require_sentence(client.post("/predict", json={"texts": ["a"]}), "its terminal says why", 500)
    assert "RuntimeError: a bug" in capfd.readouterr().err
