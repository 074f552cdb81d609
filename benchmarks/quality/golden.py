"""The same training before and after a change: six workloads, one and two processes, killed and resumed.

`python -m benchmarks golden --before REVISION` trains with the code of a revision and with the code here, on
this machine, and compares to the bit: every logged step, the ledger of samples, the evaluations, the tensors
of final/. A run that is killed in the middle and resumed has to equal the one left alone. Times, memory,
latency, digests, seals and versions are not compared. `--store` writes what was found to a file that tests
compare with, within 1e-6, on any machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.benchmarks.child_process import kill_tree
from isobatch.core.package import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

STORED = ROOT / "tests" / "fixtures" / "golden.json"
NOT_COMPARED = ("seconds", "per_second", "latency", "memory", "bytes", "digest", "seal", "version", "wait")
"""Parts of names of figures that depend on the machine, or that name the code itself."""
STEP = ("phase", "step", "loss", "lr", "grad_norm", "chain")
PINNED = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
PLAN = "--device cpu --precision fp32 --micro-batch 4 --quiet"
LABELLED = "--fast --data labelled.csv --max-length 16 --steps 40 --lr 3e-3 --warmup 2"
COMMON = "--batch-size 16 --seed 3 --ledger --save-every 4 --eval-every 8"


@dataclass(frozen=True)
class Demo:
    """One `auto` command, the name of its run, and where that is killed."""

    words: str
    run: str
    kill_after: int
    """Logged steps after which the process is killed."""


DEMOS = {
    "causal-lm": Demo(
        "--task causal-lm --data texts.txt --model tiny --dropout 0.1 --max-length 32 --steps 10",
        "lm",
        5,
    ),
    "lora": Demo(
        "--task causal-lm --data texts.txt --model {runs}/lm/final --adapter lora --dropout 0.1 "
        "--max-length 32 --steps 10",
        "lora",
        5,
    ),
    "classifier": Demo(f"--task classifier --model tiny {LABELLED}", "small-classifier", 9),
    "pruning": Demo(f"--task pruning --teacher {{runs}}/small-classifier {LABELLED}", "small-pruning", 9),
    "qat": Demo(f"--task qat --pruned {{runs}}/small-pruning --bits 4 {LABELLED}", "small-qat", 9),
    "recommender": Demo("--task recommender --data shop --steps 12", "shop", 6),
    "sequence-vae": Demo("--task sequence-vae --data texts.txt --max-length 32 --steps 12", "vae", 6),
}
"""Adapter, pruning and qat are trained on what the demo before each left."""
WORLDS = (1, 2)


def write_data(folder: Path) -> None:
    """Texts, labelled texts that can be told apart, and a shop's purchases; the same on any machine."""
    draw = random.Random(0)
    words = ["a", "the", "red", "old", "small", "river", "house", "bird", "sings", "falls", "near", "stone"]
    lines = [" ".join(draw.choices(words, k=draw.randint(4, 14))) for _ in range(400)]
    (folder / "texts.txt").write_text("\n".join(lines) + "\n")
    kinds = {"good": ("fine", "lovely", "warm"), "bad": ("dull", "poor", "cold")}
    drawn = [(label, draw.choice(tells)) for label, tells in list(kinds.items()) * 200]
    # A fifth of the labels are wrong: where a loss goes to zero, gradients are rounding errors.
    rows = [(label if draw.random() < 0.8 else draw.choice(list(kinds)), tell) for label, tell in drawn]
    texts = [f"a {tell} {' '.join(draw.choices(words, k=4))},{label}" for label, tell in rows]
    (folder / "labelled.csv").write_text("\n".join(["text,label", *texts]) + "\n")
    (folder / "shop").mkdir()
    bought = [(user, item) for user in range(60) for item in draw.sample(range(user % 3, 45, 3), 9)]
    sold = [f"u{user},i{item},{1_700_000_000 + n}" for n, (user, item) in enumerate(bought)]
    (folder / "shop" / "interactions.csv").write_text("\n".join(["user,item,timestamp", *sold]) + "\n")


def train(tree: Path, folder: Path, demos: list[str], world: int, killed: bool = False) -> dict[str, Any]:
    """Train demos with the code of a tree; what each run came to, by its name."""
    found: dict[str, Any] = {}
    for name in demos:
        demo, runs = DEMOS[name], folder / f"runs-{world}{'-killed' if killed else ''}"
        plan = [*PLAN.split(), "--processes", str(world)]
        words = ["auto", *demo.words.format(runs=runs).split(), *COMMON.split(), "--out", str(runs)]
        words += ["--name", demo.run, *plan]
        if killed:
            _kill(_start(tree, folder, words), runs / demo.run, demo.kill_after)
            words = ["resume", str(runs / demo.run), *plan]
        process = _start(tree, folder, words)
        said, _ = process.communicate(timeout=900)
        if process.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}:\n{said[-2000:]}")
        found[demo.run] = read(runs / demo.run)
    return found


def _start(tree: Path, folder: Path, words: list[str]) -> subprocess.Popen[str]:
    own = {
        "ISOBATCH_CPUS": words[-1],  # as many as processes: one thread each
        "ISOBATCH_CACHE": str(folder / "cache"),
        "ISOBATCH_STATE": str(folder / "state"),
    }
    command = [sys.executable, str(tree / "launch" / "__main__.py"), *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, **PINNED, **own}, start_new_session=True, **pipes
    )


def _kill(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    """SIGKILL to the command and all its processes as soon as a run has logged so many steps."""
    log = run / "metrics.jsonl"
    while process.poll() is None and (not log.exists() or log.read_text().count('"lr"') < steps):
        time.sleep(0.005)
    if process.poll() is not None:
        raise RuntimeError(f"{run.name} ended before it could be killed:\n{process.communicate()[0][-2000:]}")
    kill_tree(process.pid)  # ranks have a session of their own
    process.communicate()


def read(run: Path) -> dict[str, Any]:
    """What a run learnt: its logged steps, ledger, evaluations and the tensors of final/."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": [{key: row.get(key) for key in STEP} for row in rows if "lr" in row],
        "samples": hashlib.sha256((run / "samples.bin").read_bytes()).hexdigest(),
        "evaluations": [_figures(row) for row in rows if "split" in row and "lr" not in row and row["step"]],
        "result": _figures(json.loads((run / "summary.json").read_text())["metrics_by_split"]),
        "tensors": dict(_tensors(run / "final")),
    }


def _figures(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _figures(v) for k, v in value.items() if not any(part in k for part in NOT_COMPARED)}
    return value


def _tensors(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each tensor its bytes as a digest, and its norm, which other machines can be compared by."""
    from safetensors.numpy import load_file

    for file in sorted(folder.rglob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            norm = float((tensor.astype("float64") ** 2).sum() ** 0.5)
            bits = hashlib.sha256(tensor.tobytes()).hexdigest()
            yield f"{file.name}:{name}", {"bits": bits, "norm": norm}


def differences(
    before: Any, after: Any, relative: float = 0.0, place: str = "", skip: tuple[str, ...] = ()
) -> list[str]:
    """Places at which two results differ by more than a relative difference of their numbers."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [key for key in {**before, **after} if key not in skip]
        both = [(key, before.get(key), after.get(key)) for key in keys]
        return [d for key, a, b in both for d in differences(a, b, relative, f"{place}/{key}", skip)]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [d for n, (a, b) in pairs for d in differences(a, b, relative, f"{place}[{n}]", skip)]
    numbers = isinstance(before, float) and isinstance(after, float)
    if before == after or (numbers and math.isclose(before, after, rel_tol=relative, abs_tol=relative)):
        return []
    return [f"{place}: {before} became {after}"]


def measure(quick: bool, before: str = "", store: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each world and demo: differences from the code before, and from a run that was not killed."""
    worlds = WORLDS[:1] if quick else WORLDS
    with tempfile.TemporaryDirectory() as temporary:
        trees = {"after": ROOT}
        if before:
            trees = {"before": Path(temporary) / "tree", **trees}
            add = ["git", "-C", str(ROOT), "worktree", "add", "--force", "--detach"]
            subprocess.run([*add, str(trees["before"]), before], check=True, capture_output=True)
        try:
            found = {name: dict(_all(tree, Path(temporary) / name, worlds)) for name, tree in trees.items()}
        finally:
            if before:
                remove = ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(trees["before"])]
                subprocess.run(remove, check=False, capture_output=True)
    if store:  # of the code before, where there is one: what the code here has to equal
        STORED.write_text(json.dumps(found[next(iter(found))]["1"], indent=1) + "\n")
    for world, runs in found["after"].items():
        if world.endswith("killed"):
            continue
        for run, result in runs.items():
            killed = differences(result, found["after"][f"{world}-killed"][run])
            changed = differences(found["before"][world][run], result) if before else []
            yield {
                "processes": world,
                "run": run,
                "steps": len(result["steps"]),
                "tensors": len(result["tensors"]),
                "killed and resumed": _said(killed),
                **({"before": _said(changed)} if before else {}),
            }


def _said(found: list[str]) -> str:
    return f"{len(found)} differences, first {found[0]}" if found else "equal"


def _all(tree: Path, folder: Path, worlds: tuple[int, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    folder.mkdir()
    write_data(folder)
    for world in worlds:
        yield str(world), train(tree, folder, [*DEMOS], world)
        if tree == ROOT:  # what is killed is compared with the same code
            yield f"{world}-killed", train(tree, folder, [*DEMOS], world, killed=True)
