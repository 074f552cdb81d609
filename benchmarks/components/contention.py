"""Training speed with idle threads that spin or sleep, alone and next to a busy process.

python -m benchmarks contention

torch's OpenMP threads spin between parallel regions. That costs nothing on idle cores; next to a busy
process, spinning threads hold the cores that working threads need. The variables must be set before torch
is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

from isobatch.benchmarks.report import Row, interleaved, paired_ratio
from isobatch.core.package import ROOT

SETTINGS: dict[str, dict[str, str]] = {
    "as it comes": {},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
TRAIN = """
import sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=1024, n_embd=128, n_layer=2, n_head=4, n_positions=128)
model = GPT2LMHeadModel(config)
tokens = torch.randint(0, 1024, (16, 128))
count, began, last = -2, 0.0, float(sys.argv[1])
while count < 0 or time.perf_counter() - began < last:
    logits = model(input_ids=tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    count += 1
    began = time.perf_counter() if count == 0 else began
print(count * tokens.numel() / (time.perf_counter() - began))
"""


def measure(quick: bool) -> list[Row]:
    """Tokens a second per setting, alone and with one busy process, and both against torch as it comes."""
    seconds = 1.0 if quick else 3.0
    chosen = dict(list(SETTINGS.items())[:3]) if quick else SETTINGS
    contenders = {name: lambda s=setting: _both(s, seconds) for name, setting in chosen.items()}
    found = interleaved(contenders, 1 if quick else 2)
    base = found["as it comes"]
    return [
        {
            "setting": name,
            "alone: tokens/s": [round(row["alone"]) for row in rows],
            "alone: ratio": round(paired_ratio(rows, base, "alone"), 3),
            "busy neighbour: tokens/s": [round(row["busy"]) for row in rows],
            "busy neighbour: ratio": round(paired_ratio(rows, base, "busy"), 3),
        }
        for name, rows in found.items()
    ]


def _both(setting: dict[str, str], seconds: float) -> Row:
    alone = _rate(setting, seconds)
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        return {"alone": alone, "busy": _rate(setting, seconds)}
    finally:
        neighbour.kill()
        neighbour.wait()


def _rate(setting: dict[str, str], seconds: float) -> float:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", TRAIN, str(seconds)]
    ended = subprocess.run(command, cwd=ROOT, env={**inherited, **setting}, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-2000:])
    return float(ended.stdout.split()[-1])
