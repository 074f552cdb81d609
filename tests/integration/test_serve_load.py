"""Ill-meant requests at a served language model: each is answered, and another client hardly waits."""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from isobatch.tests.hostile_requests import language_model_requests
from isobatch.tests.integration.helpers import port_of, post, warm_command
from isobatch.tests.unit.test_chat import TEMPLATE, plain_folder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

ASKED: dict[str, Any] = {"prompt": "When? at nine", "max_tokens": 24, "temperature": 0, "stop": "\x07never"}

SHORT = ("deep lists", "long stop strings", "a long prompt", "10 MB", "many headers", "evil.com", "NaN")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[int]:
    """The port of a server."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(warm_command("serve", str(folder), "--port", "0"), **pipes) as process:
        try:
            yield port_of(process)
        finally:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
    assert "Traceback" not in said
    assert process.returncode == 0


class AnotherClient(threading.Thread):
    """Asks the same again and again."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.times, self.done = port, list[tuple[float, float]](), threading.Event()

    def run(self) -> None:
        while not self.done.is_set():
            self.times.append(once(self.port))

    def seconds(self, began: float, ended: float) -> list[float]:
        """How long the requests took that were under way in this time."""
        return [end - begin for begin, end in self.times if begin < ended and end > began]


def once(port: int) -> tuple[float, float]:
    began = time.perf_counter()
    assert json.loads(post(port, "/v1/completions", ASKED).read())["usage"]["prompt_tokens"] > 0
    return began, time.perf_counter()


def usual(port: int) -> float:
    return statistics.median(end - begin for begin, end in (once(port) for _ in range(15)))


def throw(port: int, names: Collection[str]) -> tuple[float, set[str]]:
    """How many times as long as usual another client waits, and while which requests it waits very long.

    A pause of a usual request lies between two, for a flood takes processor time from everybody.
    """
    hostile, thrown, another = language_model_requests(), [], AnotherClient(port)
    before = usual(port)
    another.start()
    for name in names:
        began = time.perf_counter()
        status, said = hostile[name].throw(port)
        time.sleep(before)
        thrown.append((name, began, time.perf_counter()))
        error = json.loads(said).get("error", {}) if said.startswith("{") and status >= 400 else {}
        assert status in hostile[name].statuses, (name, status, said[:300])
        assert "\n" not in (message := str(error.get("message", "")))
        assert len(message) <= 500
    another.done.set()
    another.join(60)
    most = max(0.5, 4 * before)
    slow = {name for name, *span in thrown if max(another.seconds(*span), default=0.0) > most}
    beside = statistics.median(another.seconds(thrown[0][1], thrown[-1][2]))
    return beside / max(before, usual(port)), slow


def test_each_is_answered_and_another_client_waits_less_than_twice_as_long(tmp_path: Path) -> None:
    with served(plain_folder(tmp_path / "m", TEMPLATE)) as port:
        ratio, slow = throw(port, list(language_model_requests()))
        ratios = [ratio]
        # Other programs slow this machine as well: what is slow again and again is the server.
        while (slow or min(ratios) >= 2) and len(ratios) < 6:
            ratio, again = throw(port, [*SHORT, *slow] * 3)
            ratios, slow = [*ratios, ratio], slow & again
    assert not slow
    assert min(ratios) < 2, ratios
