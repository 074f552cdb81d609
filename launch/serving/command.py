"""`serve`: a finished model behind HTTP, for trying it out."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isobatch.core import number_ranges
from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.core.flags import flags_of
from isobatch.core.measures import printable
from isobatch.core.terminal import doing
from isobatch.launch.local.arguments import read_command
from isobatch.launch.local.run_setup import one_run
from isobatch.launch.predicting.predict import FormOptions, ModelOptions, find_model, open_answerer
from isobatch.launch.predicting.tables import PromptReader


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions(FormOptions):
    """Flags of `serve`."""

    load_bits: Literal[16, 8, 4] | None = None
    """Bits of a language model's matrices; by default those of training. 8 and 4 need bitsandbytes."""
    host: str = "127.0.0.1"
    """The address to listen at; by default only this machine can ask."""
    port: number_ranges.PortNumber = 8000
    """0 takes a free one."""
    allow_host: str | None = None
    """Other names by which clients call this server, with commas between them, as behind a proxy."""
    api_key: str | None = None
    """A file that holds the key which clients must send; or set ISOBATCH_API_KEY."""


def serve(words: Sequence[str]) -> int:
    """Usage: serve RUN [--port 8000] [--host 127.0.0.1] [--allow-host NAME,NAME] [--api-key FILE]
    [--form onnx-int4] [--precision 0.95] [--neighbours 5] [--top 10] [--by ease]
    [--only FILE|ID,ID] [--without FILE|ID,ID] [--load-bits 8]

    A language model answers as OpenAI's API (/v1/completions, /v1/chat/completions), another model
    POST /predict with {"texts": [...]}, a task of your own with {"rows": [{...}]}. RUN may be an ONNX file of
    a classifier, or the folder of one: then no torch is needed. Ctrl-C ends it.
    """
    positional, options = read_command(words, ServeOptions, "serve")
    where = one_run(positional, "serve")
    doing("loading the model")
    need("starlette", "serve")
    need("uvicorn", "serve")
    with listen(options.host, options.port) as listener:
        return _run(where, listener, options)


def make_app(where: str, options: ServeOptions) -> Any:
    """The ASGI application of a run, or of an ONNX file. Raises UserError."""
    from isobatch.launch.serving.app import prediction_app
    from isobatch.launch.serving.openai_api import language_model_app

    name = Path(where).expanduser().resolve().name
    kept = {name: getattr(options, name) for name in flags_of(ModelOptions) if hasattr(options, name)}
    answerer = open_answerer(find_model(where, options.trust), ModelOptions(**kept))
    if isinstance(answerer.rows, PromptReader):
        return language_model_app(name, answerer.write_text, answerer.rows.template)
    return prediction_app(name, answerer)


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises UserError where it cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror}: take another, or --port 0") from None
    # An answer is two packets, and the second would wait 40 ms for an acknowledgement of the first. asyncio
    # sets this on sockets whose protocol number is TCP's only, and here it is 0 (CPython 3.11, base_events).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _run(where: str, listener: socket.socket, options: ServeOptions) -> int:
    """Answer from the first moment, and for the model once it is loaded. Raises what loading it raises."""
    from isobatch.launch.serving.guard import LOOPBACK, Door, new_server, read_key

    address, port = listener.getsockname()[:2]
    key, hosts = read_key(options.api_key), [options.host, address, *(options.allow_host or "").split(",")]
    loading = ThreadPoolExecutor(1).submit(make_app, where, options)
    server = new_server(Door(Path(where).expanduser().resolve().name, loading, hosts, key))

    def announce(_: Any) -> None:
        doing()
        if loading.exception():
            server.should_exit = True
            return
        shown = f"[{address}]" if ":" in address else address
        print(printable(f"serving at http://{shown}:{port} (Ctrl-C ends it)"), flush=True)
        if options.host not in LOOPBACK and not key:
            print("every machine that reaches this address can ask the model: --api-key FILE", flush=True)

    loading.add_done_callback(announce)
    server.run(sockets=[listener])
    loading.result()
    return 0
