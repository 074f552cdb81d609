"""An S3 server on this machine, and a proxy before it that is slow and fails, for tests and benchmarks.

with object_store() as store:
    store.put("bucket", "part-0.jsonl", b"...")
    with store.flaky(share=0.05, seconds=0.05) as address:
        ...
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import random
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "a secret that must not be written",
    "AWS_DEFAULT_REGION": "us-east-1",
}
FAULTS = ("503", "hang up", "cut short")


@dataclass(slots=True)
class ObjectStore:
    """A server that speaks S3 at `address`."""

    address: str
    faults: list[str] = field(default_factory=list)
    """What the proxies did to requests."""

    @property
    def environment(self) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.address}

    def put(self, bucket: str, name: str, content: bytes) -> None:
        for path, body in ((f"/{bucket}", b""), (f"/{bucket}/{name}", content)):
            assert self._request("PUT", path, body) == 200

    def delete(self, bucket: str, name: str) -> None:
        assert self._request("DELETE", f"/{bucket}/{name}", b"") == 204

    def _request(self, method: str, path: str, body: bytes) -> int:
        connection = http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=30)
        who = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
        connection.request(method, path, body, {"Authorization": who})
        status = connection.getresponse().status
        connection.close()
        return status

    @contextlib.contextmanager
    def flaky(self, share: float = 0.0, seconds: float = 0.0, seed: int = 0) -> Iterator[str]:
        """The address of a proxy that answers `seconds` late, and fails that share of reads."""
        upstream, chance, faults = urlsplit(self.address).netloc, random.Random(seed), self.faults

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._forward()

            def do_HEAD(self) -> None:
                self._forward()

            def _forward(self) -> None:
                time.sleep(seconds)
                fault = chance.choice(FAULTS) if chance.random() < share else ""
                if fault:
                    faults.append(fault)
                if fault == "hang up":
                    return
                if fault == "503":
                    self.send_error(503)
                    return
                connection = http.client.HTTPConnection(upstream, timeout=30)
                connection.request(self.command, self.path, headers=dict(self.headers))
                answer = connection.getresponse()
                body = answer.read()
                connection.close()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "server", "date"):
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if fault else body)

            def log_message(self, *_: Any) -> None:
                """Nothing is printed."""

        with _serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
            yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _serving(server: ThreadingHTTPServer) -> Iterator[int]:
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """moto's server, empty, on a free port of the loopback."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield ObjectStore(f"http://{host}:{port}")
    finally:
        server.stop()
