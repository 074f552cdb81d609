"""`python -m benchmarks` lists the measurements, `python -m benchmarks NAME [--quick]` runs one."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / "launch" / "_root.py"))

BENCHMARKS = {
    "engine": ("speed.engine", "this engine, a bare PyTorch loop and transformers' Trainer"),
    "classifier": ("speed.classifier", "fine-tuning on real text against Trainer: samples a second"),
    "latency": ("speed.latency", "forms of a half-pruned classifier in onnxruntime, and a plain clock"),
    "recommender": ("speed.recommender", "training on texts, naive and as here; on ids against a DataLoader"),
    "sequence-vae": ("speed.sequence_vae", "what the monitor of a sequence VAE costs"),
    "tune": ("speed.tune", "what each commonly named speed-up is worth here, on all tasks, by `tune`"),
    "chosen-plan": ("quality.chosen_plan", "the planner's choice against all plans of a recipe, each tried"),
    "scaling": ("speed.scaling", "one process of one thread against two on two cores, the same recipe"),
    "sampler": ("components.sampler", "rows a second from the sampler's order and the vectorised fetch"),
    "fleet": ("scale.fleet", "host work a step, balance and goodput from 8 to 16,384 GPUs, simulated"),
    "streaming": ("scale.streaming", "training from a store against prepared data"),
    "noise": ("components.noise", "what keyed dropout costs against torch's own"),
    "strategies": ("quality.strategies", "single, DDP and ZeRO in worlds of 1 to 3: equal losses"),
    "golden": ("quality.golden", "training before and after a change, killed and resumed: equal to the bit"),
    "predictions": ("quality.predictions", "predicted memory and time beside what 27 recipes took"),
    "published": ("quality.published", "the planner's memory and time beside published figures"),
    "published-gpus": ("quality.published_gpus", "the planner beside 25 published runs on GPUs"),
    "soak": ("soak.command", "a hundred faults at random moments; the runs must end as if there were none"),
}
"""Name -> its module, which has a `measure(quick)`, and what it measures."""
COMMANDS = {"gpu": ("gpu.command", "all that a GPU should show first, in parts: `make gpu`")}
"""Name -> its module, which has a `main(words)` with flags of its own, and what it measures."""


def main() -> int:
    from isobatch.benchmarks import child_process, report
    from isobatch.launch.cli import BEFORE_TORCH

    for name, value in BEFORE_TORCH.items():  # every contender gets what `launch` sets
        os.environ.setdefault(name, value)
    if sys.argv[1:2] == [child_process.WORD]:
        return child_process.answer(sys.argv[2], sys.argv[3:])
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        command = importlib.import_module(f"isobatch.benchmarks.{COMMANDS[sys.argv[1]][0]}")
        return int(command.main(sys.argv[2:]))
    named = {**BENCHMARKS, **COMMANDS}
    listing = "\n".join(f"  {name:<13}{text}" for name, (_, text) in named.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", epilog=listing, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=[*BENCHMARKS], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats; keeps no results")
    parser.add_argument("--data", help="folder of labelled texts, for those that need one")
    parser.add_argument("--model", help="folder of a pretrained encoder, for those that need one")
    parser.add_argument("--only", default="", help="one part, for those that name their parts")
    parser.add_argument("--before", default="", help="a revision of this repository, for golden")
    parser.add_argument("--store", action="store_true", help="keep what golden finds for the tests")
    asked = parser.parse_args()
    if asked.name is None:
        print(listing)
        return 0
    module, _ = BENCHMARKS[asked.name]
    measure = importlib.import_module(f"isobatch.benchmarks.{module}").measure
    needed = [
        n for n in ("data", "model", "only", "before", "store") if n in inspect.signature(measure).parameters
    ]
    if missing := [n for n in needed if getattr(asked, n) is None]:
        parser.error(f"{asked.name} needs --{missing[0]}")
    rows = list(measure(asked.quick, **{n: getattr(asked, n) for n in needed}))
    print(report.table(rows))
    if not (asked.quick or asked.only or asked.before):
        print(f"written: {report.write(asked.name, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
