"""KTO, the reward model and distillation take the steps of loops in plain torch, on one process and on two.

Every global batch is the whole train split, so that no loop needs to know the order of samples.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from isobatch.data.base import load
from isobatch.tests.integration.helpers import rows, succeed
from isobatch.tests.tiny_models import save_gpt2

if TYPE_CHECKING:
    from torch import Tensor

COUNT, STEPS, END, RATE = 24, 5, 0, 5e-3
WORDS = "lamp desk chair table door roof wall floor shelf glass stone paper".split()  # noqa: SIM905
COMMON = f"""--model model --batch-size {COUNT} --steps {STEPS} --lr {RATE} --schedule constant --warmup 0
 --weight-decay 0 --max-length 64 --micro-batch 5 --quiet"""
TOLERANCE = 2e-5


def say(draw: random.Random) -> str:
    return " " + " ".join(draw.choices(WORDS, k=draw.randint(1, 4)))


ANSWER = {"prompt": say, "completion": say}
KINDS: dict[str, dict[str, Callable[[random.Random], Any]]] = {
    "pairs": {"prompt": say, "chosen": say, "rejected": say},
    "judged": {**ANSWER, "label": lambda draw: draw.random() < 0.6},
    "texts": ANSWER,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a larger one, and rows of each kind."""
    folder = tmp_path_factory.mktemp("loops")
    save_gpt2(folder / "model", 320)
    save_gpt2(folder / "teacher", 320, seed=1, n_layer=2)
    for name, fields in KINDS.items():
        for split, count in (("", COUNT), ("-held", 6)):
            draw = random.Random(name + split)
            lines = [json.dumps({k: make(draw) for k, make in fields.items()}) for _ in range(count)]
            (folder / f"{name}{split}.jsonl").write_text("\n".join(lines))
    return folder


def train(home: Path, task: str, data: str, processes: int, more: str = "") -> Path:
    """A run's folder."""
    name = f"{task}-{more.split()[-1]}-{processes}"
    words = f"--task {task} --data {data}.jsonl --valid {data}-held.jsonl {COMMON} {more}"
    succeed("auto", *words.split(), "--processes", str(processes), "--name", name, cwd=home)
    return home / "runs" / name


def losses_of(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run) if "lr" in row]


def take_steps(model: Any, loss: Callable[[Any], Tensor]) -> list[float]:
    """The losses of AdamW's steps, with gradients clipped at 1."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(float(value.detach()))
    return found


def encoded(home: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a file, texts as tokens; answers end with the end token."""
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    found = [json.loads(line) for line in (home / f"{name}.jsonl").read_text().splitlines()]
    for row in found:
        for key, value in row.items():
            if isinstance(value, str):
                row[key] = tokenizer.encode(value) + ([] if key == "prompt" else [END])
    return found


def log_p(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    places = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return logits[places, torch.tensor(answer)].double().sum()


@pytest.mark.parametrize("processes", [1, 2])
def test_kto(home: Path, processes: int) -> None:
    run = train(home, "kto", "judged", processes, "--beta 0.5 --desirable-weight 1.5")
    data, model = encoded(home, "judged"), AutoModelForCausalLM.from_pretrained(home / "model")
    others = [data[(n + 1) % COUNT]["completion"] for n in range(COUNT)]  # all prompts differ
    with torch.no_grad():
        known = [log_p(model, row["prompt"], row["completion"]) for row in data]
        known_other = [log_p(model, row["prompt"], o) for row, o in zip(data, others, strict=True)]
    baselines = []

    def loss(model: Any) -> Tensor:
        with torch.no_grad():
            ratios = [
                log_p(model, row["prompt"], other) - ref
                for row, other, ref in zip(data, others, known_other, strict=True)
            ]
            z0 = torch.stack(ratios).mean().clamp(min=0)
        baselines.append(float(z0))
        total = torch.zeros((), dtype=torch.float64)
        for row, ref in zip(data, known, strict=True):
            ratio = log_p(model, row["prompt"], row["completion"]) - ref
            good = row["label"]
            total += (1.5 if good else 1.0) * (1 - torch.sigmoid(0.5 * (ratio - z0) * (1 if good else -1)))
        return total / COUNT

    assert losses_of(run) == pytest.approx(take_steps(model, loss), abs=TOLERANCE)
    assert [row["kl"] for row in rows(run) if "lr" in row] == pytest.approx(baselines, abs=1e-4)
    assert max(baselines) > 0.1


def score(model: Any, tokens: list[int]) -> Tensor:
    """transformers' score of one row, at the last token that is no end token, which pads here."""
    return model(input_ids=torch.tensor([tokens])).logits[0, 0]


@pytest.mark.parametrize("processes", [1, 2])
def test_reward(home: Path, processes: int) -> None:
    run = train(home, "reward", "pairs", processes, "--center 0.01")
    data = encoded(home, "pairs")
    model = AutoModelForSequenceClassification.from_pretrained(home / "model", num_labels=1, pad_token_id=END)
    torch.nn.init.zeros_(model.score.weight)

    def loss(model: Any) -> Tensor:
        found = []
        for row in data:
            chosen, rejected = (score(model, row["prompt"] + row[name]) for name in ("chosen", "rejected"))
            better = chosen - rejected
            found.append(-F.logsigmoid(better) + 0.01 * (chosen + rejected) ** 2)
        return torch.stack(found).mean()

    assert losses_of(run) == pytest.approx(take_steps(model, loss), abs=TOLERANCE)
    # What transformers opens gives the scores that `predict` gives.
    final = AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    row = json.loads((home / "pairs.jsonl").read_text().splitlines()[0])
    words = ("predict", str(run), row["prompt"], row["chosen"], "--json")
    (said,) = map(json.loads, succeed(*words, cwd=home).stdout.splitlines())
    with torch.no_grad():
        wanted = float(score(final, data[0]["prompt"] + data[0]["chosen"]))
    assert said["reward"] == pytest.approx(wanted, abs=1e-6)
    assert abs(wanted) > 1e-3


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("processes", [1, 2])
def test_distillation(home: Path, direction: str, processes: int) -> None:
    flags = f"--teacher teacher --kd-top 7 --kd-weight 0.7 --temperature 1.5 --kd-direction {direction}"
    run = train(home, "causal-lm", "texts", processes, f"--template plain --dropout 0 {flags}")
    columns = load(Path(json.loads((run / "facts.json").read_text())["folder"]) / "train")
    every = np.arange(COUNT)
    data = zip(columns["tokens"].rows(every), columns["learn"].rows(every), strict=True)
    rows_learnt = [(torch.tensor(row.astype("int64")), torch.tensor(learn[1:] > 0)) for row, learn in data]
    large = AutoModelForCausalLM.from_pretrained(home / "teacher")
    model = AutoModelForCausalLM.from_pretrained(home / "model")
    count = sum(int(learnt.sum()) for _, learnt in rows_learnt)

    def classes(logits: Tensor, top: Tensor) -> Tensor:
        """log p of the likeliest tokens of the teacher, and of all others together."""
        p = (logits / 1.5).softmax(-1)
        chosen = torch.stack([p[n, ids] for n, ids in enumerate(top)])
        return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], -1).log()

    def loss(model: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for tokens, learnt in rows_learnt:
            logits = model(input_ids=tokens[None]).logits[0, :-1][learnt].double()
            with torch.no_grad():
                taught = large(input_ids=tokens[None]).logits[0, :-1][learnt].double()
            top = taught.topk(7, -1).indices
            p, q = classes(taught, top), classes(logits, top)
            of, against = (p, q) if direction == "forward" else (q, p)
            kl = (of.exp() * (of - against)).sum()
            nll = F.cross_entropy(logits, tokens[1:][learnt], reduction="sum")
            total = total + 0.3 * nll + 0.7 * 1.5**2 * kl
        return total / count

    assert losses_of(run) == pytest.approx(take_steps(model, loss), abs=TOLERANCE)
