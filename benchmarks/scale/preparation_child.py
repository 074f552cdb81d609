"""In a process of its own: prepares data with the code of one checkout, or encodes with a library alone.

`preparation_child.py ROOT '{"task": ..., "data": ...}'`, or `... '{"library": ..., "file": ...}'`. It uses
only what earlier versions have too.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

CHUNK = 1 << 15


def resident_bytes(name: str) -> int:
    """Memory resident now (VmRSS), or the most of it (VmHWM), of Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def prepared(values: dict[str, Any]) -> dict[str, Any]:
    """Prepare the data of a task with these flags."""
    from isobatch.engine.loading.prepare import prepare
    from isobatch.engine.registry import workload

    chosen = workload(values.pop("task"))
    recipe, _ = chosen.complete(values)
    _, data = chosen.make(recipe)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, began, cpu = resident_bytes("VmRSS"), time.perf_counter(), sum(os.times()[:4])
    facts = prepare(data)
    peak = resident_bytes("VmHWM") - before
    return {"fingerprint": facts.fingerprint, "began": began, "cpu": cpu, "peak_bytes": peak}


def encoded(values: dict[str, Any]) -> dict[str, Any]:
    """Encode a text with a library's own batch call, on all cores."""
    vocabulary, text = Path(values["vocabulary"]), Path(values["file"]).read_text(encoding="utf-8")
    lines, chunks = text.splitlines(keepends=True), [""]
    for line in lines:
        chunks[-1] += line
        if len(chunks[-1]) >= CHUNK:
            chunks.append("")
    encode = _tokenizers(vocabulary) if values["library"] == "tokenizers" else _tiktoken(vocabulary)
    encode(["warm"])
    began, cpu = time.perf_counter(), sum(os.times()[:4])
    encode(chunks)
    return {"began": began, "cpu": cpu}


def _tokenizers(vocabulary: Path) -> Any:
    from isobatch.data.tokenizers import open_tokenizer

    tokenizer = open_tokenizer(vocabulary)
    return lambda texts: tokenizer.encode_batch_fast(texts, add_special_tokens=False)


def _tiktoken(vocabulary: Path) -> Any:
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    ranks = data_gym_to_mergeable_bpe_ranks(str(vocabulary / "vocab.bpe"), str(vocabulary / "encoder.json"))
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    threads = len(os.sched_getaffinity(0))
    return lambda texts: encoding.encode_ordinary_batch(texts, num_threads=threads)


def main(root: str, words: str) -> None:
    """Print what was found, as JSON."""
    values = json.loads(words)
    sys.path.insert(0, root)
    runpy.run_path(f"{root}/launch/_root.py")
    found = encoded(values) if "library" in values else prepared(values)
    found["seconds"] = time.perf_counter() - found.pop("began")
    found["cpu_seconds"] = sum(os.times()[:4]) - found.pop("cpu")
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:3])
