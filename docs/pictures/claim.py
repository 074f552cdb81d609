"""The picture of the claim: one command with 1, 2 and 4 processes, here and by Trainer. `make pictures`.

Both train the same model (GPT-2 of two layers, from scratch) on the same text with the same settings, and
both are told the same batch, 8: here it is the global batch, by Trainer that of each process. Every loss that
is drawn was logged by a run that this script makes; `claim.py trainer FOLDER OUT` is a process of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORLDS = (1, 2, 4)
BATCH, TOKENS, SAMPLES, RATE, DROPOUT, SEED = 8, 64, 1024, 1e-3, 0.1, 0
WINDOW = 32
"""Lines are means over so many samples, so that they can be told apart where they differ."""
COLOURS = ("#1b6ca8", "#e07a1f", "#2a9d57")
Curve = list[tuple[int, float]]
"""Samples seen after each step, and the loss of that step."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        curves = [("isobatch", [ours(Path(folder), world) for world in WORLDS])]
        curves += [("Trainer", [trainers(Path(folder), world) for world in WORLDS])]
    draw(dict(curves))


def text(folder: Path) -> Path:
    """Part of the demo's text, a sample a line: of as many words as a sample has tokens at least."""
    from isobatch.data.corpora import demo_corpus

    words = " ".join(str(one) for one in demo_corpus().splits["train"]()).split()
    lines = [" ".join(words[at : at + TOKENS]) for at in range(0, len(words), TOKENS)]
    (folder / "text.txt").write_text("\n".join(lines[: SAMPLES + 64]) + "\n")
    return folder / "text.txt"


def ours(folder: Path, world: int) -> Curve:
    """Train here; the loss of every step."""
    words = f"auto --task causal-lm --data {text(folder)} --model tiny --max-length {TOKENS} --lr {RATE}"
    words += f" --batch-size {BATCH} --dropout {DROPOUT} --seed {SEED} --steps {SAMPLES // BATCH}"
    words += " --schedule linear --warmup 0 --weight-decay 0 --clip 1 --device cpu --precision fp32"
    words += f" --processes {world} --name {world} --quiet --again"
    own = {"ISOBATCH_CACHE": f"{folder}/cache", "ISOBATCH_CPUS": str(world)}
    run([sys.executable, "-m", "isobatch", *words.split()], folder, own)
    rows = [json.loads(row) for row in (folder / "runs" / str(world) / "metrics.jsonl").open()]
    losses = [row["loss"] for row in rows if "lr" in row]
    return [(BATCH * (step + 1), loss) for step, loss in enumerate(losses)]


def trainers(folder: Path, world: int) -> Curve:
    """Train the model and tokenizer of our run by Trainer, from the same kind of start."""
    out = folder / f"trainer-{world}.json"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    run([*words, __file__, "trainer", str(folder), str(out)], folder, {})
    found: list[dict[str, float]] = json.loads(out.read_text())
    return [(int(row["step"]) * BATCH * world, row["loss"]) for row in found if "loss" in row]


def run(words: list[str], folder: Path, own: dict[str, str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **own}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def train_by_trainer(folder: Path, out: Path) -> None:
    """One process of Trainer, with its defaults but for the settings that both have."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    transformers.set_seed(SEED)
    model_folder = folder / "runs" / "1" / "final"
    config: Any = AutoConfig.from_pretrained(model_folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    lines = (folder / "text.txt").read_text().splitlines()[:SAMPLES]
    ids = [tokenizer(line)["input_ids"][:TOKENS] for line in lines]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        learning_rate=RATE,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(
        AutoModelForCausalLM.from_config(config),
        arguments,
        train_dataset=[{"input_ids": one, "labels": one} for one in ids],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        out.write_text(json.dumps(trainer.state.log_history))


def smooth(curve: Curve) -> tuple[list[int], list[float]]:
    """Means over WINDOW samples, at the end of each window."""
    size = max(1, WINDOW // curve[0][0])
    ends = range(size, len(curve) + 1, size)
    return [curve[e - 1][0] for e in ends], [sum(y for _, y in curve[e - size : e]) / size for e in ends]


def draw(curves: dict[str, list[Curve]]) -> None:
    """Both panels with the same axes, as claim.svg."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "isobatch", "font.size": 11, "axes.spines.top": False})
    mpl.rcParams["axes.spines.right"] = False
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9.2, 3.4), sharey=True, layout="constrained")
    told = {"isobatch": f"--batch-size {BATCH}", "Trainer": f"--per_device_train_batch_size {BATCH}"}
    for panel, (name, found) in zip(panels, curves.items(), strict=True):
        for world, curve, colour in zip(WORLDS, found, COLOURS, strict=True):
            # The first line is the broadest, so that lines on each other are all seen.
            width, label = {1: 6.0, 2: 3.2, 4: 1.2}[world], f"{world} process{'es' if world > 1 else ''}"
            panel.plot(*smooth(curve), color=colour, linewidth=width, label=label, solid_capstyle="round")
        panel.set_title(f"{name}  {told[name]}", fontsize=11)
        panel.set_xlabel("samples seen")
        panel.legend(frameon=False, title=apart(found), title_fontsize=9, fontsize=10)
    panels[0].set_ylabel("training loss")
    figure.savefig(HERE / "claim.svg", metadata={"Date": None})
    print({name: apart(found) for name, found in curves.items()})


def apart(found: list[Curve]) -> str:
    """By how much the losses of runs differ at most, at the same number of samples."""
    common = set.intersection(*({x for x, _ in zip(*smooth(c), strict=True)} for c in found))
    at = [dict(zip(*smooth(curve), strict=True)) for curve in found]
    most = max(max(one[x] for one in at) - min(one[x] for one in at) for x in common)
    return f"at most {most:.2g} apart"


if __name__ == "__main__":
    if sys.argv[1:2] == ["trainer"]:
        train_by_trainer(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
