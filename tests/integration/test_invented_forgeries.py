"""Forged runs by somebody who knows the files of a run, not the code that judges them.

Whoever forges computes every hash and seal anew that the files hold, and writes the receipt himself. What was
expected of each was written down before any of them was judged.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from isobatch.engine.checkpointing.digests import folder_digests
from isobatch.tests.integration.helpers import launch, rows, succeed
from isobatch.tests.tiny_models import save_gpt2

if TYPE_CHECKING:
    import subprocess

LAST = ("train-25", "train-28")
SINE = """
import numpy as np
from isobatch import Data, Loss, Task


class Waves(Data):
    def read(self):
        x = np.float32(np.random.default_rng(0).uniform(-3, 3, (2048, 1)))
        return {"valid": {"x": x[:256], "y": np.sin(x[:256])}, "train": {"x": x[256:], "y": np.sin(x[256:])}}


class Sine(Task):
    data = Waves
    defaults = {"epochs": 1, "lr": 1e-2, "batch_size": 64}

    def build_model(self, facts):
        from torch import nn

        return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss(self, model, batch, step):
        return {"loss": Loss((model(batch["x"]) - batch["y"]).square().sum(), "sample")}
"""
AUTO_SINE = ["auto", "--task", "./mine.py:Sine", "--save-every", "7", "--keep", "9", "--eval-every", "7"]
AUTO_TEXT = ["auto", "--task", "causal-lm", "--model", "base", "--lr", "1e-2", "--max-length", "32"]
AUTO_TEXT += ["--steps", "12", "--save-every", "4", "--keep", "9"]
RUNS = {
    "sine": AUTO_SINE,
    "warm": [*AUTO_SINE, "--from", "runs/sine"],
    "text": [*AUTO_TEXT, "--ledger"],
    "adapter": [*AUTO_TEXT, "--adapter", "lora"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the honest runs, with two small models of one shape."""
    folder = tmp_path_factory.mktemp("forger")
    (folder / "mine.py").write_text(SINE)
    for seed, name in enumerate(("base", "other")):
        save_gpt2(folder / name, 600, seed)
    return folder


def honest(home: Path, name: str) -> Path:
    """An honest run, trained when it is first asked for, with its receipt beside `runs`."""
    run, receipt = home / "runs" / name, home / f"{name}.json"
    if not receipt.exists():
        if name == "warm":
            honest(home, "sine")
        succeed(*RUNS[name], "--name", name, "--quiet", cwd=home)
        succeed("receipt", f"runs/{name}", "--out", str(receipt), cwd=home)
    return run


# What a forger needs: files of a run, and the sums that its files hold about one another.


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def edit(path: Path, **values: Any) -> None:
    write(path, read(path) | values)


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def recipe_hash(run: Path) -> str:
    fields = {k: v for k, v in read(run / "recipe.json").items() if k not in ("hash", "run")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:12]


def mend(run: Path, log: list[dict[str, Any]] | None = None) -> None:
    """Write the log with true seals, and every sum and copy that follows from it or from a file."""
    log = rows(run) if log is None else log
    final, sums = run / "final", recipe_hash(run)
    old = read(run / "recipe.json")["hash"]
    edit(run / "recipe.json", hash=sums)
    if final.is_dir():
        card = final / "README.md"
        card.write_text(card.read_text(encoding="utf-8").replace(old, sums), encoding="utf-8")
    seal = f"{sums} {read(run / 'facts.json')['fingerprint']}"
    lines, since, sealed = b"", b"", set()
    for at, row in enumerate(log):
        name = f"{row['phase']}-{row['step']}"
        if "checkpoint" in row and (run / "checkpoints" / row["checkpoint"]).is_dir():
            row["digest"] = checkpoint_digest(run / "checkpoints" / row["checkpoint"])
        if "final" in row:
            row["final"] = folder_digests(final)
            decisions = run / "decisions.jsonl"
            row["decisions"] = (
                hashlib.sha256(decisions.read_bytes()).hexdigest() if decisions.exists() else ""
            )
            write(run / "summary.json", row["summary"])
        if "seal" in row:
            row["seal"] = seal = hashlib.sha256(seal.encode() + since).hexdigest()[:32]
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        lines, since = lines + line, b"" if "seal" in row else since + line
        if "seal" in row and name not in sealed and (run / "checkpoints" / name).is_dir():
            sealed.add(name)
            mend_checkpoint(run / "checkpoints" / name, sums, seal, len(lines), log[:at])
    (run / "metrics.jsonl").write_bytes(lines)


def mend_checkpoint(folder: Path, recipe: str, seal: str, size: int, log: list[dict[str, Any]]) -> None:
    state = read(folder / "state.json")
    steps = [row for row in log if "lr" in row and row["loss"] is not None]
    judge = state["hooks"]["evaluate"] | {"best": None, "best_step": 0, "waited": 0}
    for row in log:
        if "split" in row and row["loss"] is not None:
            better = judge["best"] is None or row["loss"] < judge["best"]
            judge |= {"best": row["loss"], "best_step": row["step"]} if better else {}
            judge["waited"] = 0 if better else judge["waited"] + 1
    if judge["best"] is not None:
        judge["best"] = round(judge["best"], 6)
    state["hooks"]["evaluate"] = judge
    state["logs"] |= {"seal": seal, "metrics": size}
    state["recipe_hash"] = recipe
    for name, key in (("losses", "loss"), ("norms", "grad_norm")):
        state["hooks"]["spikes"][name] = [float(f"{row[key]:.5g}") for row in steps]
    write(folder / "state.json", state)
    content = (folder / "node-00000.safetensors").read_bytes()
    texts = ("index.json", "state.json")
    sums: dict[str, Any] = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in texts}
    part = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write(folder / "checksums.json", {**sums, "parts": [part]})


def checkpoint_digest(folder: Path) -> str:
    texts = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in ("index.json", "state.json")}
    parts = [part["sha256"] for part in read(folder / "checksums.json")["parts"]]
    return hashlib.sha256(json.dumps([texts, parts], sort_keys=True).encode()).hexdigest()[:32]


def edit_saved(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change a tensor of a checkpoint where it lies."""
    index = read(folder / "index.json")
    ((_, count, _, offset),) = index["pieces"][name]
    file = np.memmap(folder / "node-00000.safetensors", np.uint8, "r+")
    place = file[offset : offset + 4 * count].view("<f4")
    place[:] = change(place.copy().reshape(index["tensors"][name]["shape"])).ravel()
    file.flush()


def edit_final(run: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    path = run / "final" / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = torch.from_numpy(np.ascontiguousarray(change(tensors[name].numpy().copy())))
    save_file(tensors, path, {"format": "pt"})


def go_on(run: Path, home: Path, name: str) -> None:
    """Let the honest program go on from a checkpoint, as if nothing had come after it."""
    step = int(name.partition("-")[2])
    for folder in (run / "checkpoints").iterdir():
        if int(folder.name.partition("-")[2]) > step:
            shutil.rmtree(folder)
    shutil.rmtree(run / "final", ignore_errors=True)
    (run / "summary.json").unlink(missing_ok=True)
    succeed("resume", str(run), "--trust", "--quiet", cwd=home)


def keep_only(run: Path, *names: str) -> None:
    """As `--keep` does."""
    for folder in (run / "checkpoints").iterdir():
        if folder.name not in names:
            shutil.rmtree(folder)
    edit(run / "run.json", keep=len(names))


def forged_receipt(run: Path, true: Path) -> Path:
    """A receipt of the forged run, by somebody whose command does not ask what it holds."""
    log, receipt = rows(run), read(true)
    (end,) = [row for row in log if "final" in row]
    names = {r["checkpoint"] for r in log if "checkpoint" in r}
    steps = [row for row in log if "lr" in row]
    recipe = read(run / "recipe.json")
    receipt |= {
        "recipe_hash": recipe["hash"],
        "recipe": {k: v for k, v in recipe.items() if k not in ("hash", "run")},
        "plan": read(run / "plan.json"),
        "steps": [{k: r[k] for k in receipt["steps"][0]} for r in steps],
        "left_out": rows(run, "decisions.jsonl") if (run / "decisions.jsonl").exists() else [],
        "seals": [[r["phase"], r["step"], r["seal"]] for r in log if "seal" in r],
        "checkpoints": {
            n: next(r["digest"] for r in reversed(log) if r.get("checkpoint") == n)
            for n in receipt["checkpoints"]
            if n in names
        },
        "final": end["final"],
        "metrics": end["summary"]["metrics_by_split"],
    }
    path = run.parent / "forged-receipt.json"
    path.write_text(json.dumps(receipt))
    return path


# The forgeries.


def tokens_renamed(run: Path, _: Path) -> None:
    """Two words change their numbers in the tokenizer, and their rows in the weights: the same model?"""
    path = run / "final" / "tokenizer.json"
    tokenizer = read(path)
    words = tokenizer["model"]["vocab"]
    one, other = sorted(words)[300:302]
    words[one], words[other] = words[other], words[one]
    path.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False), encoding="utf-8")

    def swap(table: np.ndarray) -> np.ndarray:
        table[[words[one], words[other]]] = table[[words[other], words[one]]]
        return table

    edit_final(run, "lm_head.weight", swap)  # tied to the embedding
    mend(run)


def warm_start_hidden(run: Path, home: Path) -> None:
    """A run that began with trained weights claims to have begun from scratch: its first rows are true."""
    warm, own = honest(home, "warm"), rows(run)
    log = [row for row in own if row["step"] <= 10] + [row for row in rows(warm) if row["step"] > 10]
    hashes = [read(one / "recipe.json")["hash"] for one in (warm, run)]
    for name in ("checkpoints", "final"):
        shutil.rmtree(run / name)
        shutil.copytree(warm / name, run / name)
    card = run / "final" / "README.md"
    card.write_text(card.read_text().replace(*hashes))
    keep_only(run, *LAST)
    mend(run, log)


def end_moved(run: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Other last weights, in the checkpoint and in what is exported of it."""
    edit_saved(run / "checkpoints" / LAST[1], "weight/0.weight", change)
    edit_final(run, "0.weight", change)
    mend(run)


def one_ulp(run: Path, _: Path) -> None:
    """One element of the last weights is the next float."""

    def nudge(values: np.ndarray) -> np.ndarray:
        values.ravel()[7] = np.nextafter(values.ravel()[7], np.float32(9))
        return values

    end_moved(run, nudge)


def another_machine_claimed(run: Path, _: Path) -> None:
    """Last weights moved a little, by a machine that the judge does not have."""
    edit(run / "plan.json", device="cuda")
    end_moved(run, lambda values: values + np.float32(1e-5))


def step_left_out(run: Path, home: Path) -> None:
    """A trained step is said to have been left out; counts and hashes are those of a run without it."""
    decision = {"decision": "leave out steps", "of": "train", "first": 16, "last": 16, "reason": "asked for"}
    true = shutil.copytree(run, run.with_name("without"))
    for one in (run, true):
        (one / "decisions.jsonl").write_text(json.dumps(decision) + "\n")
    go_on(true, home, "train-14")
    keep_only(run, *LAST)
    log = rows(run)
    (at,) = [i for i, row in enumerate(log) if "lr" in row and row["step"] == 16]
    log[at] = {"phase": "train", "step": 16, "left_out": True}
    without = {row["step"]: row for row in rows(true) if "lr" in row}
    for row in log:
        if "lr" in row:
            row |= {name: without[row["step"]][name] for name in ("samples", "tokens", "chain")}
        for name in ("samples_seen", "tokens_seen") if "summary" in row else ():
            row["summary"][name] = read(true / "summary.json")[name]
    for name in LAST:
        state, other = (read(one / "checkpoints" / name / "state.json") for one in (run, true))
        progress = {key: other["progress"][key] for key in ("samples", "tokens", "chain")}
        state["progress"] |= progress
        write(run / "checkpoints" / name / "state.json", state | {"left_out": [16]})
    mend(run, log)


def adapter_of_another_base(run: Path, home: Path) -> None:
    """The adapter is handed over for another model than it was trained on."""
    edit(run / "final" / "adapter_config.json", base_model_name_or_path=str(home / "other"))
    mend(run)


def twin_of_a_file(run: Path, _: Path) -> None:
    """Code in a hidden folder of final/, and a tokenizer whose name looks like the true one's."""
    hidden = run / "final" / ".cache" / "modeling.py"
    hidden.parent.mkdir()
    hidden.write_text("import os\n")
    shutil.copy(run / "final" / "tokenizer.json", run / "final" / "t\u043ekenizer.json")
    mend(run)


def all_a_hair_better(run: Path, _: Path) -> None:
    """Every figure is better by nearly what is allowed."""
    log = rows(run)
    for row in log:
        if "lr" in row:
            row["loss"] *= 1 - 1.8e-5
        ended = row.get("summary", {})
        for figures in (row, ended.get("metrics"), *ended.get("metrics_by_split", {}).values()):
            if figures and "loss" in figures and "lr" not in figures:
                figures["loss"] *= 1 - 9e-5
            if figures and "perplexity" in figures:
                figures["perplexity"] = math.exp(figures["loss"])
                figures["bits_per_byte"] *= 1 - 9e-5
                figures["word_perplexity"] **= 1 - 9e-5
    mend(run, log)


def more_samples_measured(run: Path, _: Path) -> None:
    """The figures are said to be of ten times as many held-out samples, in the facts and on the card."""
    facts = read(run / "facts.json")
    edit(run / "facts.json", samples=facts["samples"] | {"valid": 2560})
    card = run / "final" / "README.md"
    card.write_text(
        card.read_text().replace("256 in valid", "2,560 in valid").replace("all 256", "all 2,560")
    )
    mend(run)


def losses_no_number(run: Path, _: Path) -> None:
    """Losses that nobody shall see are said to have been no numbers; an evaluation, too."""
    log = rows(run)
    for row in log:
        if 9 <= row["step"] <= 14 and "loss" in row:
            row |= {"loss": None, "not_finite": {"loss": "nan"}}
    keep_only(run, *LAST)
    mend(run, log)


@dataclass(frozen=True)
class Expected:
    """What must be said: exit code 3 with `names`, or, where `admits` is given, a verdict that has it."""

    forge: Callable[[Path, Path], None]
    run: str
    names: str
    admits: str = ""
    never: str = ""
    """What the verdict may not claim where the exit code is 0."""


ON_TRUST = r"(taken )?on trust"
WEIGHTS = r"checkpoint train-\d+|weights .*(differ|moved|not)|loss [\d.]+ redone|final/"
HAIR = r"(equal )?within ([1-9](\.\d+)?e-05|0\.0000[1-9])"
"""A difference that is no rounding: from 1e-5 on."""
FORGERIES = [
    Expected(tokens_renamed, "text", r"final/(tokenizer\.json|model\.safetensors)"),
    Expected(warm_start_hidden, "sine", WEIGHTS, ON_TRUST),
    Expected(one_ulp, "sine", WEIGHTS, r"weights.*(differ|within|not .*bit)", "bit for bit"),
    Expected(another_machine_claimed, "sine", WEIGHTS, r"weights.*(differ|within|not .*bit)", "bit for bit"),
    Expected(step_left_out, "sine", r"left out|leave out|step 16", ON_TRUST),
    Expected(adapter_of_another_base, "adapter", r"adapter_config\.json"),
    Expected(twin_of_a_file, "adapter", r"modeling\.py|t\u043ekenizer\.json"),
    Expected(
        all_a_hair_better,
        "text",
        r"loss|perplexity",
        HAIR,
        "bit for bit.*metrics|equal within [0-9.]+e-0[6-9]",
    ),
    Expected(all_a_hair_better, "sine", r"loss|card", HAIR, r"equal within [0-9.]+e-0[6-9]"),
    Expected(more_samples_measured, "sine", r"facts|samples|README"),
    Expected(losses_no_number, "sine", r"loss|finite|nan", ON_TRUST),
]


def verdict(text: str) -> str:
    """The lines that say what was found: what was checked, and the sentence about the run."""
    found = [
        x for x in text.splitlines() if re.match(r"(not )?checked:|.*: (verified|holds|not proven|NOT)", x)
    ]
    assert found, text
    return "\n".join(found)


def judge(done: subprocess.CompletedProcess[str], expected: Expected) -> None:
    text = done.stdout + done.stderr
    assert "Traceback" not in text, text
    if "is no receipt that" in text:  # refused before it is judged
        assert done.returncode == 2, text
        return
    assert done.returncode == 3 or (done.returncode == 0 and expected.admits), text
    if done.returncode == 3:
        assert re.search(expected.names, text), text
    else:
        assert re.search(expected.admits, verdict(text)), text
        assert not (expected.never and re.search(expected.never, verdict(text))), text


CASES = [
    pytest.param(e, marks=pytest.mark.slow)
    if e.run == "adapter" or (e.forge, e.run) == (all_a_hair_better, "text")
    else e
    for e in FORGERIES
]


@pytest.mark.parametrize("expected", CASES, ids=lambda e: f"{e.forge.__name__}-{e.run}")
def test_a_forged_run_is_caught_or_said(expected: Expected, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "handed-over"
    shutil.copytree(honest(home, expected.run), run)
    expected.forge(run, home)
    receipt = forged_receipt(run, home / f"{expected.run}.json")
    verified = launch("verify", str(run), "--trust", cwd=home)
    audited = launch("audit", str(receipt), "--run", str(run), "--trust", cwd=home)
    judge(verified, expected)
    judge(audited, expected)


# Honest runs.


def moved(run: Path, _: Path) -> Path:
    return run.rename(run.with_name("another name"))


def sealed_again(run: Path, _: Path) -> Path:
    """The forger's own tools change nothing where nothing is forged."""
    before = (run / "metrics.jsonl").read_bytes()
    mend(run)
    assert (run / "metrics.jsonl").read_bytes() == before
    return run


def read_only(run: Path, _: Path) -> Path:
    for path in [*run.rglob("*"), run]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    return run


def verified_by_somebody(run: Path, home: Path) -> Path:
    other = {"ISOBATCH_CACHE": str(run.parent / "cache"), "ISOBATCH_STATE": str(run.parent / "state")}
    succeed("verify", str(run), "--trust", cwd=home, **other)
    return run


def resumed(run: Path, home: Path) -> Path:
    go_on(run, home, LAST[0])
    return run


def as_it_is(run: Path, _: Path) -> Path:
    return run


@pytest.mark.parametrize(
    ("name", "change", "words", "environment"),
    [
        ("sine", moved, [], {}),
        ("warm", as_it_is, [], {}),
        pytest.param("text", sealed_again, [], {}, marks=pytest.mark.slow),
        ("sine", sealed_again, [], {}),
        pytest.param("adapter", as_it_is, [], {}, marks=pytest.mark.slow),
        ("sine", read_only, [], {}),
        ("sine", verified_by_somebody, [], {}),
        ("sine", resumed, [], {}),
        pytest.param("sine", as_it_is, ["--processes", "2"], {}, marks=pytest.mark.slow),
        pytest.param("sine", as_it_is, [], {"OMP_NUM_THREADS": "1"}, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", None) or (x if isinstance(x, str) else "-".join(x) or "plain"),
)
def test_an_honest_run_is_verified(
    name: str,
    change: Callable[[Path, Path], Path],
    words: list[str],
    environment: dict[str, str],
    home: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "handed-over"
    shutil.copytree(honest(home, name), run)
    run = change(run, home)
    done = succeed("verify", str(run), "--trust", *words, cwd=home, **environment)
    assert "verified (exact)" in verdict(done.stdout)
    if not words and change is not resumed:
        succeed("audit", str(home / f"{name}.json"), "--run", str(run), "--trust", cwd=home)
