"""`python -m benchmarks` lists the measurements, `python -m benchmarks NAME [--quick]` runs one."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks import report

NAMES = {
    "engine": "this engine, a bare PyTorch loop and transformers' Trainer: speed, memory, equal losses",
    "startup": "--help, and from the command to the first optimizer step",
    "sampler": "rows a second from the sampler's order and the vectorised fetch",
    "noise": "what keyed dropout costs against torch's own",
    "strategies": "single, DDP and ZeRO in worlds of 1 to 3: equal losses, and any resumes any",
    "checkpoint": "what saving in the background costs training, against torch.save",
    "scaling": "one process of one thread against two on two cores, the same recipe",
    "soak": "a hundred faults at random moments: what they did to runs that must not notice",
    "contention": "what waiting threads do to speed when another process wants the cores",
}


def main() -> int:
    listing = "\n".join(f"  {name:<12}{text}" for name, text in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", epilog=listing, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=[*NAMES], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats; keeps no results")
    asked = parser.parse_args()
    if asked.name is None:
        print(listing)
        return 0
    rows = importlib.import_module(f"benchmarks.{asked.name}").measure(asked.quick)
    print(report.table(rows))
    if not asked.quick:
        print(f"written: {report.write(asked.name, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
