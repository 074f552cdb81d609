"""An encoder for tests, of a module that other processes find by its name."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.preparation.encoding import EncodedShard, ShardEncoder


@dataclass(frozen=True, kw_only=True)
class LengthEncoder(ShardEncoder):
    """Lengths of texts; refuses the text `bad`, dies of `fatal`, and counts its calls in a file."""

    calls: str

    def __call__(self, texts: list[str]) -> EncodedShard:
        if "bad" in texts:
            raise UserError("bad is refused")
        if "fatal" in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        with Path(self.calls).open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        return EncodedShard({"lengths": np.array([len(text) for text in texts])}, {"first": texts[0]})
