"""Requests that mean a server ill, as bytes on a socket, with the statuses that may answer each."""

from __future__ import annotations

import gzip
import json
import socket
import time
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MIB = 1 << 20
PATIENCE = 0.5
"""Seconds for which a request that never ends is thrown; then its client leaves."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """One request. `endless` is sent behind it again and again."""

    data: bytes
    statuses: tuple[int, ...] = (400,)
    endless: bytes = b""

    def throw(self, port: int) -> tuple[int, str]:
        """The status that came, and the body; 0 where the client left before."""
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            answer = connection.makefile("rb")
            try:
                connection.sendall(self.data)
                until = time.monotonic() + PATIENCE
                connection.settimeout(0.01 if self.endless else 60)
                while self.endless and time.monotonic() < until:
                    connection.sendall(self.endless)
            except OSError:  # it was ended
                pass
            connection.settimeout(1 if self.endless else 60)
            try:
                status = answer.readline().split()[1:2]
                return int(status[0]) if status else 0, _body(answer)
            except TimeoutError:
                return 0, ""
            except OSError:
                return 400, "the connection was ended"


def _body(answer: Any) -> str:
    length = 0
    while line := answer.readline().strip():
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return str(answer.read(length) if length else answer.read1(1 << 16), "utf-8", "replace")


def request(
    body: Any = b"", path: str = COMPLETIONS, head: str = "", host: str | None = "127.0.0.1", **parts: str
) -> bytes:
    """A request; `body` as JSON unless it is bytes. `parts`: method, version, kind, length."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{parts.get('method', 'POST')} {path} HTTP/{parts.get('version', '1.1')}"]
    lines += [f"Host: {host}"] if host is not None else []
    lines += [f"Content-Type: {parts.get('kind', 'application/json')}"]
    lines += [f"Content-Length: {parts.get('length', len(data))}"] if "chunked" not in head else []
    return "\r\n".join([*lines, head] if head else lines).encode() + b"\r\n\r\n" + data


def said(*contents: str) -> list[dict[str, str]]:
    """Messages of a conversation, the users' and the assistant's in turns."""
    return [{"role": ("user", "assistant")[n % 2], "content": c} for n, c in enumerate(contents)]


FIELDS = "prompt model max_tokens temperature top_p top_k seed stop stream stream_options n echo tools user"
WRONG = (None, True, -1, 1.5, 1e308, "1", [], {}, [[]], {"a": 1})
"""Values of which each field refuses some."""
RAW = {
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "1e999": b'{"prompt": "a", "top_p": 1e999}',
    "a million digits": b'{"prompt": "a", "max_tokens": ' + b"9" * (MIB // 2) + b"}",
    "deep lists": b'{"prompt": ' + b"[" * (MIB // 2) + b"]" * (MIB // 4),
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "many integers": b'{"prompt": [' + b"1," * (MIB // 2 - 20) + b"1]}",
    "many fields": json.dumps({f"k{n}": 1 for n in range(70_000)}).encode(),
    "half a character": b'{"prompt": "\\ud800"}',
    "half a character raw": b'{"prompt": "\xed\xa0\x80"}',
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "no JSON": b"prompt=a&max_tokens=3",
    "nothing": b"",
    "a list": b"[1]",
    "a null byte": b'{"prompt": "a"}\x00',
}
COMPLETION_BODIES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "negative max_tokens": ({"prompt": "a", "max_tokens": -5}, (400,)),
    "huge max_tokens": ({"prompt": "a", "max_tokens": 10**30}, (400,)),
    "large max_tokens": ({"prompt": "a", "max_tokens": 1_000_000}, (200,)),
    "huge n": ({"prompt": "a", "n": 10**9}, (400,)),
    "huge best_of": ({"prompt": "a", "best_of": 10**9}, (400,)),
    "cold": ({"prompt": "a", "temperature": 5e-324, "max_tokens": 4}, (200,)),
    "cold and narrow": ({"prompt": "a", "temperature": 1e-9, "top_p": 1e-6, "max_tokens": 4}, (200,)),
    "100,000 stop strings": ({"prompt": "a", "stop": ["s"] * 100_000}, (400,)),
    "long stop strings": ({"prompt": "a", "stop": ["a" * 60_000] * 16}, (400,)),
    "nested stop strings": ({"prompt": "a", "stop": ["ab" * n for n in range(50, 66)]}, (200,)),
    "empty stop string": ({"prompt": "a", "stop": [""]}, (400,)),
    "no prompts": ({"prompt": []}, (400,)),
    "many prompts": ({"prompt": ["a"] * 100_000}, (400,)),
    "a long prompt": ({"prompt": "the cat " * 130_000, "max_tokens": 2}, (200,)),
    "spaces": ({"prompt": " " * 1_000_000, "max_tokens": 2}, (200,)),
    "null bytes": ({"prompt": "\0" * 1000, "max_tokens": 2}, (200,)),
    "an empty prompt": ({"prompt": "", "max_tokens": 2}, (200,)),
    "10 MB": ({"prompt": "a" * 10_000_000}, (413,)),
    "a long field": ({"prompt": "a", "x" * 900_000: 1}, (400,)),
    "a long model": ({"prompt": "a", "model": "x" * 900_000}, (404,)),
}
CHAT_BODIES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "many messages": ({"messages": said(*["a"] * 20_001)}, (413,)),
    "long messages": ({"messages": said(*["a " * 1500] * 255)}, (413,)),
    "501 messages": ({"messages": said(*["a"] * 501), "max_tokens": 2}, (200,)),
    "a long message": ({"messages": said("the cat " * 130_000), "max_tokens": 2}, (200,)),
    "many parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]},
        (200,),
    ),
    "content of numbers": ({"messages": [{"role": "user", "content": [1] * 1000}]}, (400,)),
    "no role": ({"messages": [{"content": "a"}]}, (400,)),
}
GOOD = {"prompt": "a", "max_tokens": 2}
CHUNKED = "Transfer-Encoding: chunked"
HEADS: dict[str, Hostile] = {
    "text/plain": Hostile(request(GOOD, kind="text/plain"), (415,)),
    "a form": Hostile(request(b"prompt=a", kind="application/x-www-form-urlencoded"), (415,)),
    "with a charset": Hostile(request(GOOD, kind="application/json; charset=utf-8"), (200,)),
    "gzip": Hostile(request(gzip.compress(b'{"prompt": "a"}'), head="Content-Encoding: gzip")),
    "two lengths": Hostile(request(GOOD, head="Content-Length: 3")),
    "length and chunks": Hostile(request(GOOD, head="Transfer-Encoding: identity"), (400, 501)),
    "a negative length": Hostile(request(GOOD, length="-1")),
    "a huge length": Hostile(request(GOOD, length="9" * 20), (400, 413), b"a" * 65536),
    "two hosts": Hostile(request(GOOD, head="Host: evil.com")),
    "no host": Hostile(request(GOOD, host=None)),
    "no host, HTTP/1.0": Hostile(request(GOOD, host=None, version="1.0"), (403,)),
    "HTTP/1.0": Hostile(request(GOOD, version="1.0"), (200,)),
    "HTTP/3.7": Hostile(request(GOOD, version="3.7"), (200, 400)),
    "evil.com": Hostile(request(GOOD, host="evil.com"), (403,)),
    "a like host": Hostile(request(GOOD, host="127.0.0.1.evil.com"), (403,)),
    "a broken host": Hostile(request(GOOD, host="[::1"), (403,)),
    "localhost": Hostile(request(GOOD, host="localhost:99"), (200,)),
    "[::1]": Hostile(request(GOOD, host="[::1]:99"), (200,)),
    "GET": Hostile(request(path=COMPLETIONS, method="GET"), (405,)),
    "CONNECT": Hostile(request(path="evil.com:443", method="CONNECT"), (400, 404)),
    "an absolute path": Hostile(request(path="http://[/x", method="GET"), (404,)),
    "a path up": Hostile(request(path="/v1/models/../../etc/passwd", method="GET"), (404,)),
    "a header without end": Hostile(b"POST / HTTP/1.1\r\nX: " + b"a" * 200_000),
    "many headers": Hostile(request(GOOD, head="\r\n".join(f"X{n}: a" for n in range(20_000)))),
    "a null byte in a header": Hostile(request(GOOD, head="X: \0")),
    "no HTTP": Hostile(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"),
    "chunks": Hostile(request(b"10\r\n" + b'{"prompt": "a" }' + b"\r\n0\r\n\r\n", head=CHUNKED), (200,)),
    "chunks without end": Hostile(request(b"", head=CHUNKED), (400, 413), b"1\r\na\r\n" * 100),
    "large chunks without end": Hostile(
        request(b"", head=CHUNKED), (400, 413), b"10000\r\n" + b"a" * 65536 + b"\r\n"
    ),
    "a wrong chunk": Hostile(request(b"zz\r\na\r\n", head=CHUNKED)),
}


def language_model_requests() -> dict[str, Hostile]:
    """All for a language model, by name."""
    found = {name: Hostile(request(body)) for name, body in RAW.items()}
    for field in FIELDS.split():
        found |= {
            f"{field} {value!r}": Hostile(request(GOOD | {field: value}), (200, 400, 404)) for value in WRONG
        }
    for path, bodies in ((COMPLETIONS, COMPLETION_BODIES), (CHAT, CHAT_BODIES)):
        found |= {name: Hostile(request(body, path), statuses) for name, (body, statuses) in bodies.items()}
    return found | HEADS
