"""Language models take the steps of loops in plain torch, transformers and peft, on one process and on two.

The loops were written from papers and from docs/, by somebody who had not read the code that they judge. Each
computes sample by sample, without padding; which samples a step has is read from the run's ledger.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import isobatch
from isobatch.tests.integration.helpers import figure, ledger, predictions, succeed
from isobatch.tests.integration.plain_loops import adamw, take_steps
from isobatch.tests.tiny_models import _qwen

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SLOW = pytest.mark.slow

TOLERANCE = 2e-5
"""Absolute, of losses between 0.1 and 10."""
ROWS, BATCH, STEPS, RATE, DECAY = 20, 6, 7, 3e-3, 0.1
"""Three whole batches an epoch and a rest of two: steps go over the border of epochs."""
COMMON = f"""--steps {STEPS} --lr {RATE} --weight-decay {DECAY} --max-length 512
 --micro-batch 2 --warmup 2 --ledger --quiet"""
WORDS = "lamp desk chair table door roof wall floor shelf glass stone paper".split()  # noqa: SIM905
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% set at = namespace(last=-1) %}{% for m in messages if DROPS and m.role == 'user' %}"
    "{% set at.last = messages.index(m) %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content and loop.index0 > at.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "\n</tool_call>{% endfor %}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As models have it; it also says what an assistant's tokens are, and may drop earlier thoughts."""


def template(drops: bool = False, marks: bool = True) -> str:
    made = TEMPLATE.replace("DROPS", str(drops).lower())
    return made if marks else made.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def say(draw: random.Random, least: int = 1, most: int = 6) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


def user(draw: random.Random) -> dict[str, Any]:
    return {"role": "user", "content": say(draw)}


def assistant(draw: random.Random, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": say(draw), **more}


def conversation(draw: random.Random) -> dict[str, Any]:
    """A question, thoughts, a call, its result and an answer; some rows lack some of these."""
    schema = {"type": "object", "properties": {"thing": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "look", "description": say(draw), "parameters": schema}}
    call = {"type": "function", "function": {"name": "look", "arguments": {"thing": say(draw)}}}
    thought = {"reasoning_content": say(draw)} if draw.random() < 0.6 else {}
    beside = {"content": draw.choice(["", say(draw)]), **thought}
    called = [
        {"role": "assistant", **beside, "tool_calls": [call]},
        {"role": "tool", "content": json.dumps({"found": say(draw)})},
    ]
    with_call = draw.random() < 0.6
    messages = [user(draw), *(called if with_call else []), assistant(draw, **thought)]
    if draw.random() < 0.4:
        messages += [user(draw), assistant(draw)]
    return {"messages": messages, **({"tools": [tool]} if with_call else {})}


KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "chats": conversation,
    "judged": lambda draw: {
        "prompt": [{"role": "user", "content": draw.choice(["which lamp", "which desk", "which roof"])}],
        "completion": [assistant(draw)],
        "label": draw.random() < 0.6,
    },
    "pairs": lambda draw: {
        "prompt": [user(draw)],
        "chosen": [assistant(draw)],
        "rejected": [assistant(draw)],
    },
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a teacher, and rows of each kind."""
    folder = tmp_path_factory.mktemp("oracles")
    for name, make in KINDS.items():
        for split, count in (("", ROWS), ("-held", 4)):
            draw = random.Random(name + split)
            (folder / f"{name}{split}.jsonl").write_text(
                "\n".join(json.dumps(make(draw)) for _ in range(count))
            )
    for seed, name in enumerate(("model", "teacher")):
        torch.manual_seed(seed)
        more: dict[str, Any] = {"head_dim": 8, "initializer_range": 0.3}
        model, tokenizer = _qwen(Qwen3Config, Qwen3ForCausalLM, template(marks=False), **more)
        model.config.max_position_embeddings = 512
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def train(home: Path, task: str, data: str, more: str, processes: int, batch: int = BATCH) -> Path:
    """A run's folder."""
    name = f"{task}-{len(list(home.glob('runs/*')))}"
    words = (
        f"--task {task} --data {data}.jsonl --valid {data}-held.jsonl --model {home}/model {COMMON} {more}"
    )
    succeed(
        "auto",
        *words.split(),
        "--batch-size",
        str(batch),
        "--processes",
        str(processes),
        "--name",
        name,
        cwd=home,
    )
    return home / "runs" / name


def batches(run: Path) -> list[list[int]]:
    """The rows of each step."""
    found = [list(step["samples"]) for step in ledger(run)]
    assert len(found) == STEPS
    return found


def load(home: Path, name: str = "model") -> Any:
    return AutoModelForCausalLM.from_pretrained(home / name, dtype=torch.float32)


def read(home: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / f"{name}.jsonl").read_text().splitlines()]


def rendered(home: Path, messages: list[Any], drops: bool = False, **more: Any) -> tuple[Tensor, Tensor]:
    """Tokens of a conversation, and which of them an assistant wrote."""
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    made: Any = tokenizer.apply_chat_template(
        messages, chat_template=template(drops), return_assistant_tokens_mask=True, return_dict=True, **more
    )
    return torch.tensor(made["input_ids"]), torch.tensor(made["assistant_masks"]).bool()


def log_p(model: Any, tokens: Tensor) -> Tensor:
    """Of every token but the first, given those before it."""
    logits = model(input_ids=tokens[None]).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def falling(shape: Callable[[float], float]) -> list[float]:
    """Two steps that rise, then a fall by the share of the rest that is over."""
    return [RATE * ((n + 1) / 2 if n < 2 else shape((n - 2) / (STEPS - 2))) for n in range(STEPS)]


LINEAR = falling(lambda over: 1 - over)
COSINE = falling(lambda over: (1 + math.cos(math.pi * over)) / 2)


def agree(
    home: Path,
    task: str,
    data: str,
    words: str,
    loss: Callable[[Any, list[int]], Tensor],
    rates: Iterable[float] = COSINE,
    begin: Callable[[Path], Any] | None = None,
    make: Callable[[Any], torch.optim.Optimizer] = lambda model: adamw(model, DECAY),
    weights: list[dict[str, Tensor]] | None = None,
    samples: int = 0,
) -> list[Path]:
    """The runs on one process and on two, which have the losses and rates of one loop."""
    runs = [train(home, task, data, words, processes, samples or BATCH) for processes in (1, 2)]
    taken = [list(range(samples))] * STEPS if samples else batches(runs[0])
    assert samples or batches(runs[1]) == taken
    model = begin(runs[0]) if begin else load(home)
    expected = take_steps(model, make(model), rates, taken, loss, weights)
    for run in runs:
        assert figure(run, "loss") == pytest.approx(expected, abs=TOLERANCE)
        assert figure(run, "lr") == pytest.approx(list(rates))
    return runs


def answers_nll(samples: list[tuple[Tensor, Tensor]]) -> Callable[[Any, list[int]], Tensor]:
    """The mean over all tokens of the batch that an assistant wrote."""

    def loss(model: Any, numbers: list[int]) -> Tensor:
        parts = [log_p(model, samples[n][0])[samples[n][1][1:]] for n in numbers]
        return -torch.cat(parts).mean()

    return loss


def chat_samples(home: Path) -> list[tuple[Tensor, Tensor]]:
    return [rendered(home, row["messages"], tools=row.get("tools")) for row in read(home, "chats")]


@SLOW
def test_chats_with_tools_and_thoughts(home: Path) -> None:
    """Calls, thoughts and answers are learnt, and results of tools are not."""
    agree(home, "causal-lm", "chats", "", answers_nll(chat_samples(home)))


@SLOW
def test_thoughts_that_the_template_drops_from_earlier_turns(home: Path) -> None:
    """Every answer is learnt once, behind what the template makes of all before it when it is written."""
    (home / "drops.jinja").write_text(template(drops=True, marks=False))
    samples = []
    for row in read(home, "chats"):
        turns, tools = row["messages"], row.get("tools")
        for n in (n for n, message in enumerate(turns) if message["role"] == "assistant"):
            tokens, mask = rendered(home, turns[: n + 1], drops=True, tools=tools)
            mask[: len(rendered(home, turns[:n], drops=True, tools=tools)[0])] = False
            samples.append((tokens, mask))
    words = f"--template {home}/drops.jinja"
    agree(home, "causal-lm", "chats", words, answers_nll(samples), samples=len(samples))


def answered(home: Path, row: dict[str, Any], answer: str) -> tuple[Tensor, Tensor]:
    return rendered(home, [*row["prompt"], *row[answer]])


def test_kto(home: Path) -> None:
    """Ethayarajh et al. 2024: good answers at least z0 nats above the reference, bad ones below."""
    data, beta, good, bad = read(home, "judged"), 0.5, 1.5, 0.7
    own = [answered(home, row, "completion") for row in data]
    after = [
        next(r for r in data[n + 1 :] + data if r["prompt"] != row["prompt"]) for n, row in enumerate(data)
    ]
    others = [rendered(home, a["prompt"] + b["completion"]) for a, b in zip(data, after, strict=True)]
    assert any(a["prompt"] == b["prompt"] for a, b in itertools.pairwise(data))

    def total(model: Any, sample: tuple[Tensor, Tensor]) -> Tensor:
        return log_p(model, sample[0])[sample[1][1:]].sum()

    with torch.no_grad():
        reference = load(home)
        known, known_others = ([float(total(reference, s)) for s in group] for group in (own, others))

    baselines: list[float] = []

    def loss(model: Any, numbers: list[int]) -> Tensor:
        with torch.no_grad():
            shifts = [total(model, others[n]) - known_others[n] for n in numbers]
            baselines.append(max(0.0, float(torch.stack(shifts).mean())))
        values = []
        for n in numbers:
            above = total(model, own[n]) - known[n] - baselines[-1]
            weight, sign = (good, 1) if data[n]["label"] else (bad, -1)
            values.append(weight * (1 - torch.sigmoid(sign * beta * above)))
        return torch.stack(values).mean()

    words = f"--beta {beta} --desirable-weight {good} --undesirable-weight {bad}"
    for run in agree(home, "kto", "judged", words, loss, LINEAR):
        assert figure(run, "kl") == pytest.approx(baselines, abs=1e-4)
    assert max(baselines) > 0.1


def test_reward_model(home: Path) -> None:
    """Bradley and Terry 1952: the chosen answer's score above the other's."""
    data, center = read(home, "pairs"), 0.05
    texts = [[answered(home, row, answer) for answer in ("chosen", "rejected")] for row in data]

    def loss(model: Any, numbers: list[int]) -> Tensor:
        parts = []
        for n in numbers:
            good, bad = (
                model(input_ids=tokens[None, : int(mask.nonzero()[-1]) + 1]).logits[0, 0].double()
                for tokens, mask in texts[n]
            )
            apart = good - bad
            parts.append(-torch.nn.functional.logsigmoid(apart) + center * (good + bad) ** 2)
        return torch.stack(parts).mean()

    def begin(_: Path) -> Any:
        model = AutoModelForSequenceClassification.from_pretrained(home / "model", num_labels=1)
        model.config.pad_token_id = 0
        torch.nn.init.zeros_(model.score.weight)
        return model

    run, _ = agree(home, "reward", "pairs", f"--center {center}", loss, LINEAR, begin)
    # What transformers opens gives the scores that `predict` gives.
    final = AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    tokens, mask = texts[0][0]
    with torch.no_grad():
        wanted = final(input_ids=tokens[None, : int(mask.nonzero()[-1]) + 1]).logits.item()
    (said,) = predictions(home, str(run), *(data[0][name][0]["content"] for name in ("prompt", "chosen")))
    assert said["reward"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(("direction", "heat"), [("forward", 2.0), pytest.param("reverse", 1.5, marks=SLOW)])
def test_distillation(home: Path, direction: str, heat: float) -> None:
    """Hinton et al. 2015, of the teacher's likeliest tokens and of all others as one more class.

    The teacher's rows behind the last token of the tokenizer count for nothing.
    """
    tokens_there = len(AutoTokenizer.from_pretrained(home / "teacher"))
    samples, teacher, share, top = chat_samples(home), load(home, "teacher"), 0.7, 9

    def classes(log_probabilities: Tensor, likeliest: Tensor) -> Tensor:
        kept = log_probabilities.gather(1, likeliest)
        return torch.cat([kept, (1 - kept.exp().sum(1, keepdim=True)).log()], dim=1)

    def heated(model: Any, tokens: Tensor, width: int | None = None) -> Tensor:
        return (model(input_ids=tokens[None]).logits[0, :-1, :width].double() / heat).log_softmax(-1)

    divergences: list[float] = []

    def loss(model: Any, numbers: list[int]) -> Tensor:
        parts = []
        for tokens, mask in (samples[n] for n in numbers):
            with torch.no_grad():
                known = heated(teacher, tokens, tokens_there)
            likeliest = known.topk(top).indices
            p, q = classes(known, likeliest), classes(heated(model, tokens), likeliest)
            p, q = (p, q) if direction == "forward" else (q, p)
            parts.append((p.exp() * (p - q)).sum(1)[mask[1:]])
        divergence = torch.cat(parts).mean()
        divergences.append(float(divergence.detach()))
        return (1 - share) * answers_nll(samples)(model, numbers) + share * heat**2 * divergence

    words = f"--teacher {home}/teacher --kd-weight {share} --kd-top {top} --kd-direction {direction}"
    for run in agree(home, "causal-lm", "chats", f"{words} --temperature {heat}", loss):
        assert figure(run, "kl") == pytest.approx(divergences, abs=TOLERANCE)


@SLOW
def test_averaged_weights(home: Path) -> None:
    """Polyak and Juditsky 1992, exponentially, from the weights behind the first step on."""
    keep, weights = 0.8, list[Any]()
    loss = answers_nll(chat_samples(home))
    for run in agree(home, "causal-lm", "chats", f"--ema {keep}", loss, weights=weights):
        average = weights[0]
        for after in weights[1:]:
            average = {name: keep * average[name] + (1 - keep) * after[name] for name in after}
        found = AutoModelForCausalLM.from_pretrained(run / "final" / "ema").state_dict()
        for name, weight in found.items():
            assert float((weight - average[name]).abs().max()) < TOLERANCE, name
            assert float((weight - weights[-1][name]).abs().max()) > 50 * TOLERANCE, name


@SLOW
def test_warmup_stable_decay(home: Path) -> None:
    """Hägele et al. 2024: the rate stays, and falls in the last three steps."""
    rates = [RATE / 2] + [RATE] * (STEPS - 4) + [RATE * (1 - math.sqrt(n / 3)) for n in range(3)]
    words, loss = "--schedule wsd --decay 3", answers_nll(chat_samples(home))
    agree(home, "causal-lm", "chats", words, loss, rates)


@SLOW
@pytest.mark.parametrize(("scale", "plus"), [("rs", 1.0), ("r", 5.0)])
def test_lora_by_the_root_of_its_rank_and_with_two_rates(home: Path, scale: str, plus: float) -> None:
    """Kalajdzievski 2023, as peft has it, and Hayou et al. 2024: B learns faster than A."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=6, use_rslora=scale == "rs", target_modules=targets)

    def begin(run: Path) -> Any:
        """The first matrices are drawn: what the run began with."""
        with isobatch.replay(str(run), 1) as (begun, _, _):
            drawn = {name: weight.clone() for name, weight in begun.state_dict().items() if "lora_" in name}
        model: Any = get_peft_model(load(home), config)
        assert not model.base_model.model.load_state_dict(drawn, strict=False).unexpected_keys
        assert len(drawn) == 8
        return model

    def make(model: Any) -> torch.optim.Optimizer:
        first, second = (
            [p for name, p in model.named_parameters() if part in name] for part in ("lora_A", "lora_B")
        )
        assert not any(p.any() for p in second)
        groups = [{"params": first, "lr": 1.0}, {"params": second, "lr": plus}]
        return torch.optim.AdamW(groups, weight_decay=DECAY)

    words = f"""--adapter lora --lora-r 4 --lora-alpha 6 --lora-dropout 0 --frozen-dtype fp32
     --lora-targets {",".join(targets)} --lora-scale {scale} --lora-plus {plus}"""
    loss = answers_nll(chat_samples(home))
    agree(home, "causal-lm", "chats", words, loss, begin=begin, make=make)


class Muon(torch.optim.AdamW):
    """Jordan et al. 2024 in fp32 for the matrices of groups that say so, AdamW for the rest."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in (g for g in groups if g["orthogonal"]):
            for p in group["params"]:
                kept = self.state[p].setdefault("mean", torch.zeros_like(p)).mul_(0.95).add_(p.grad)
                x = p.grad + 0.95 * kept
                x = x.T if len(x) > len(x.T) else x
                x = x / x.norm()
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x if x.shape == p.shape else x.T
                size = 0.2 * math.sqrt(max(p.shape))  # as large as AdamW's steps (Liu et al. 2025)
                p.data.mul_(1 - group["lr"] * group["weight_decay"]).sub_(x, alpha=group["lr"] * size)
        self.param_groups = [g for g in groups if not g["orthogonal"]]
        super().step()
        self.param_groups = groups


@SLOW
def test_muon(home: Path) -> None:
    def make(model: Any) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        matrices = [p for name, p in named.items() if p.ndim == 2 and ".layers." in name]
        groups = [
            {"params": matrices, "orthogonal": True},
            {"params": [p for p in named.values() if p.ndim < 2], "orthogonal": False, "weight_decay": 0.0},
            {"params": [named["model.embed_tokens.weight"]], "orthogonal": False},
        ]
        return Muon(groups, lr=1.0, weight_decay=DECAY)

    loss = answers_nll(chat_samples(home))
    for run in agree(home, "causal-lm", "chats", "--optimizer muon", loss, make=make):
        assert json.loads((run / "plan.json").read_text())["invariance"] == "exact"
