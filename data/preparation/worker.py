"""A process that encodes texts for another: `python -P worker.py`, frames on standard input and output.

A frame is its size in bytes (8, little endian) and a pickle-free body. The first names the function that
makes the encoder, its settings and a tokenizer; each one after it holds texts, and is answered with a shard.
Standard input that ends, ends the process: so none outlives the one that started it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZE = struct.Struct("<Q")


def write_frame(stream: IO[bytes], body: bytes) -> None:
    """Write a frame and flush."""
    stream.write(SIZE.pack(len(body)))
    stream.write(body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The body of the next frame; None at the end of the stream, or within a frame that was cut short."""
    head = stream.read(SIZE.size)
    if len(head) < SIZE.size:
        return None
    (size,) = SIZE.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def pack_texts(texts: Sequence[str]) -> bytes:
    """The number of texts, the bytes of each, and all of them in UTF-8."""
    encoded = [text.encode() for text in texts]
    sizes = struct.pack(f"<{len(encoded) + 1}Q", len(encoded), *map(len, encoded))
    return sizes + b"".join(encoded)


def unpack_texts(packed: bytes) -> list[str]:
    """What `pack_texts` packed."""
    (count,) = SIZE.unpack_from(packed)
    sizes, place = struct.unpack_from(f"<{count}Q", packed, SIZE.size), (count + 1) * SIZE.size
    texts = []
    for size in sizes:
        texts.append(packed[place : place + size].decode())
        place += size
    return texts


def make_encoder(place: str, settings: dict[str, Any], tokenizer: Any) -> Callable[[list[str]], Any]:
    """The encoder of texts that the function at `place` ("module:function") makes."""
    module, _, name = place.partition(":")
    encoder: Callable[[list[str]], Any] = getattr(importlib.import_module(module), name)(tokenizer, settings)
    return encoder


def _serve() -> None:
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not stand between frames
    asked = json.loads(read_frame(source) or b"{}")
    if not asked:
        return
    from tokenizers import Tokenizer

    encode = make_encoder(asked["place"], asked["settings"], Tokenizer.from_str(asked["tokenizer"]))
    while (packed := read_frame(source)) is not None:
        write_frame(target, _answer(encode, packed))


def _answer(encode: Callable[[list[str]], Any], packed: bytes) -> bytes:
    from isobatch.core.errors import UserError

    try:
        answer: bytes = encode(unpack_texts(packed)).pack()
        return answer
    except UserError as error:
        return json.dumps({"refused": str(error)}).encode()
    except Exception:
        return json.dumps({"failed": traceback.format_exc()}).encode()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that started it says when it ends
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "launch" / "_root.py"))
    _serve()
