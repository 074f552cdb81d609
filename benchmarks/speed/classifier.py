"""Speed of fine-tuning a classifier on real text, against Trainer with the same model, data and batch.

python -m benchmarks classifier --data SST2_FOLDER --model MINILM_FOLDER

DATA: a folder with train.tsv, whose columns are `sentence` and `label`: SST-2, or CLINC150 written so.
Lengths vary, so speed is samples over seconds of all counted steps, not of the median one. Trainer pads to
the longest of a batch (its default), to 128, or groups by length itself. Each contender is a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from isobatch.benchmarks import child_process
from isobatch.benchmarks.peers import StepClock, trainer_loop
from isobatch.benchmarks.report import Row, interleaved, middle, paired_ratio
from isobatch.core.package import ROOT, own_command

BATCH, LENGTH, LR = 32, 128, 5e-5
WARM = 4
WINDOW = 64
"""Batches that our sampler sorts together by length; so many have the mean length of an epoch."""
MEGABATCH = 50
"""Batches that Trainer sorts together, the longest first: only a whole one has the mean length."""
OURS = "isobatch, grouped by length"
OTHERS: dict[str, dict[str, Any]] = {
    "Trainer, its defaults": {"padding": False, "grouped": False, "share": 1.0},
    "Trainer, grouped by length": {"padding": False, "grouped": True, "share": 1.0},
    "Trainer, grouped by length, a worker": {"padding": False, "grouped": True, "share": 1.0, "workers": 1},
    "Trainer, padded to 128": {"padding": "max_length", "grouped": False, "share": 0.2},
}
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}


def measure(quick: bool, data: str, model: str) -> list[Row]:
    steps = 16 if quick else WINDOW
    with tempfile.TemporaryDirectory() as place:
        spec = {"data": str(Path(data).resolve()), "model": str(Path(model).resolve()), "folder": place}
        contenders: dict[str, Any] = {
            OURS: lambda: _ours(spec, steps, True),
            "isobatch, order as drawn": lambda: _ours(spec, steps, False),
        }
        for name, settings in OTHERS.items():
            count, warm = max(4, round(steps * settings["share"])), WARM
            if settings["grouped"] and not quick:
                count = warm = MEGABATCH
            more = {**settings, "steps": warm + count, "warm": warm}
            contenders[name] = lambda s=more: _trainer({**spec, **s})
        found = interleaved(contenders, 1 if quick else 2)
    return [_row(name, found) for name in contenders]


def _row(name: str, found: dict[str, list[Row]]) -> Row:
    return {
        "contender": name,
        "samples/s": round(middle(found[name], "rate"), 1),
        "ours/its speed": round(paired_ratio(found[OURS], found[name], "rate"), 3),
        "steps": found[name][0]["steps"],
    }


def _ours(spec: dict[str, Any], steps: int, grouped: bool) -> Row:
    """A run of `auto` with its checkpoints and metrics log."""
    with tempfile.TemporaryDirectory(dir=spec["folder"]) as out:
        words = ["auto", "--task", "classifier", "--data", spec["data"], "--model", spec["model"]]
        words += ["--steps", str(WARM + steps), "--batch-size", str(BATCH), "--max-length", str(LENGTH)]
        words += ["--eval-fraction", "0.01", "--out", out, "--name", "run", "--quiet"]
        words += ["--group-by-length", "on" if grouped else "off"]
        subprocess.run(own_command(*words), cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)
        lines = (Path(out) / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [r for r in map(json.loads, lines) if "lr" in r][WARM:]
    samples = rows[-1]["samples"] - WARM * BATCH
    return {"rate": samples / sum(r["step_seconds"] for r in rows), "steps": len(rows)}


def _trainer(spec: dict[str, Any]) -> Row:
    file = Path(spec["folder"]) / "spec.json"
    file.write_text(json.dumps(spec))
    found: Row = child_process.call("speed.classifier:trainer", str(file), environment=ENVIRONMENT)
    return found


def trainer(file: str) -> Row:
    """Trainer as its documentation shows it: a tokenized data set, a tokenizer, arguments."""
    spec = json.loads(Path(file).read_text())
    from datasets import load_dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    rows = load_dataset("csv", data_files=f"{spec['data']}/train.tsv", sep="\t", split="train")
    rows = rows.class_encode_column("label")

    def tokenize(batch: dict[str, Any]) -> Any:
        return tokenizer(batch["sentence"], truncation=True, max_length=LENGTH, padding=spec["padding"])

    rows = rows.map(tokenize, batched=True, remove_columns=["sentence"])
    settings = {
        "output_dir": spec["folder"],
        "per_device_train_batch_size": BATCH,
        "max_steps": spec["steps"],
        "learning_rate": LR,
        "use_cpu": True,
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": spec.get("workers", 0),
        "train_sampling_strategy": "group_by_length" if spec["grouped"] else "random",
    }
    classes, clock = rows.features["label"].num_classes, StepClock()
    model = AutoModelForSequenceClassification.from_pretrained(spec["model"], num_labels=classes)
    trainer_loop(model, rows, clock, settings, processing_class=tokenizer)
    counted = clock.seconds()[spec["warm"] :]
    return {"rate": len(counted) * BATCH / sum(counted), "steps": len(counted)}
