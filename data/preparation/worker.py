"""A process that encodes texts for another: `python -P worker.py DESCRIPTOR`, a connection that it inherits.

The first message names the function that makes the encoder, its settings and a tokenizer; each one after it
is a list of texts, answered with a shard, or with the error. A connection that closes ends the process: so
none outlives the one that started it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


def make_encoder(place: str, settings: dict[str, Any], tokenizer: Any) -> Callable[[list[str]], Any]:
    """The encoder of texts that the function at `place` ("module:function") makes."""
    module, _, name = place.partition(":")
    encoder: Callable[[list[str]], Any] = getattr(importlib.import_module(module), name)(tokenizer, settings)
    return encoder


def _serve(connection: Connection) -> None:
    from tokenizers import Tokenizer

    place, settings, tokenizer = connection.recv()
    encode = make_encoder(place, settings, Tokenizer.from_str(tokenizer))
    while True:
        connection.send(_answer(encode, connection.recv()))


def _answer(encode: Callable[[list[str]], Any], texts: list[str]) -> Any:
    from isobatch.core.errors import UserError

    try:
        return encode(texts)
    except UserError as error:
        return UserError(str(error))
    except Exception:
        return RuntimeError(traceback.format_exc())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that started it says when it ends
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "launch" / "_root.py"))
    from multiprocessing.connection import Connection

    try:
        _serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):
        os._exit(0)
