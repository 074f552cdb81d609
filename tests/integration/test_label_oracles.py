"""Classifiers of every kind of label take the steps of loops in plain transformers, and say what these find.

Loops and figures were written from docs/, docstrings and papers; what an answer of tags looks like, and
which parameters, counts and roundings a run takes where docs are silent, from the code. Losses are
transformers' own, of the whole global batch at once; figures are those of scikit-learn, SciPy and
seqeval over answers that plain transformers compute from final/, and ONNX files are run by plain
onnxruntime.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import seqeval.metrics
import torch
from safetensors.numpy import load_file
from scipy import optimize, stats
from seqeval.metrics.sequence_labeling import get_entities
from sklearn import metrics
from torch.nn import functional as F
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
)

import isobatch
from isobatch.tests.integration.helpers import figure, ledger, predictions, succeed, summary
from isobatch.tests.integration.plain_loops import adamw, take_steps
from isobatch.tests.tiny_models import TYPED, _word_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.slow

TOLERANCE = 2e-5
ROWS, HELD, BATCH, STEPS, RATE, DECAY = 20, 24, 6, 7, 1e-3, 0.1
"""Three whole batches an epoch and a rest of two: steps go over the border of epochs."""
COMMON = f"""--steps {STEPS} --batch-size {BATCH} --lr {RATE} --weight-decay {DECAY} --warmup 2
 --max-length 24 --dropout 0 --precision fp32 --micro-batch 2 --ledger --quiet"""
NAMES = {"joy": "cat bird sun", "anger": "fire dog", "fear": "roof water", "calm": "tree sky"}
"""Of labels, and words that a text with the label has."""
WORDS = "the a catdog sat ran flew on under mats trees redgreen bluesky firewater ? answers".split()  # noqa: SIM905


class Kind(NamedTuple):
    """How transformers learns a kind of label; `weighing` are flags that change its loss."""

    problem: str
    make: Callable[[random.Random], dict[str, Any]]
    labels: list[str]
    auto: Any
    type: str | None
    weighing: str = ""


def say(draw: random.Random, least: int = 1, most: int = 9) -> list[str]:
    return draw.choices(WORDS, k=draw.randint(least, most))


def mixed(draw: random.Random, names: list[str]) -> str:
    words = say(draw) + [draw.choice(NAMES[name].split()) for name in names]
    draw.shuffle(words)
    return " ".join(words)


def one(draw: random.Random) -> dict[str, Any]:
    label = draw.choice(list(NAMES))
    return {"text": mixed(draw, [label]), "label": label}


def several(draw: random.Random) -> dict[str, Any]:
    names = [name for name in NAMES if draw.random() < 0.4]
    return {"text": mixed(draw, names), "labels": names}


def score(draw: random.Random) -> dict[str, Any]:
    """Half points, so that there are ties."""
    half = draw.randint(0, 7)
    return {"text": " ".join(say(draw, 1, 5) + ["fire"] * half), "score": half / 2}


def alike(draw: random.Random) -> dict[str, Any]:
    row = score(draw)
    return {"sentence1": " ".join(say(draw)), "sentence2": row["text"], "score": row["score"]}


def tagged(draw: random.Random) -> dict[str, Any]:
    """Entities of one and of two words; some texts are longer than what is read."""
    pairs = [(word, "O") for word in say(draw, 0, 12)]
    for name in draw.choices(("joy", "fear", "calm"), k=draw.randint(1, 3)):
        words = draw.choices(NAMES[name].split(), k=draw.randint(1, 2))
        at = draw.choice([n for n in range(len(pairs) + 1) if n == len(pairs) or pairs[n][1][0] != "I"])
        pairs[at:at] = [(word, f"{'BI'[n]}-{name}") for n, word in enumerate(words)]
    return {"words": [word for word, _ in pairs], "tags": [tag for _, tag in pairs]}


SORTED, TAGS = sorted(NAMES), [tag for name in ("calm", "fear", "joy") for tag in (f"B-{name}", f"I-{name}")]
SEQUENCE, TOKENS = AutoModelForSequenceClassification, AutoModelForTokenClassification
BALANCED, GIVEN, HUBER = "--class-weights balanced", "--class-weights 2,1.5,1,0.5", "--regression-loss huber"
FOCAL = f"{BALANCED} --focal 2"
KINDS = {
    "one": Kind("classes", one, SORTED, SEQUENCE, "single_label_classification", FOCAL),
    "several": Kind("multi-label", several, SORTED, SEQUENCE, "multi_label_classification", GIVEN),
    "score": Kind("regression", score, ["score"], SEQUENCE, "regression", HUBER),
    "alike": Kind("regression", alike, ["score"], SEQUENCE, "regression"),
    "tagged": Kind("tokens", tagged, ["O", *TAGS], TOKENS, None, BALANCED),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder, rows of each kind, and of each a student and a teacher."""
    folder = tmp_path_factory.mktemp("labels")
    for name, kind in KINDS.items():
        (folder / name).mkdir()
        for split, count in (("train", ROWS), ("valid", HELD), ("test", HELD)):
            draw = random.Random(name + split)
            made = (json.dumps(kind.make(draw)) for _ in range(999))
            kept = [row for row in made if split != "test" or "calm" not in row]  # a label that it lacks
            (folder / name / f"{split}.jsonl").write_text("\n".join(kept[:count]))
    torch.manual_seed(0)
    tokenizer = _word_pieces(model_input_names=TYPED)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.1, **shape)
    BertForMaskedLM(config).save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(folder / "encoder")
    for name, kind in KINDS.items():
        model = plain(kind, folder / "encoder")
        for count, role in ((40, "student"), (40, "teacher")):
            taken = [random.Random(role + str(n)).sample(range(ROWS), BATCH) for n in range(count)]
            take_steps(model, adamw(model, DECAY), [2e-3] * count, taken, of_batch(name, folder))
            model.save_pretrained(folder / name / role)
            tokenizer.save_pretrained(folder / name / role)
    return folder


def plain(kind: Kind, folder: Path) -> Any:
    """A model of transformers, without dropout."""
    more = {"problem_type": kind.type} if kind.type else {}
    names = {"id2label": dict(enumerate(kind.labels)), "label2id": {x: n for n, x in enumerate(kind.labels)}}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return kind.auto.from_pretrained(folder, **names, **dropout, **more)


def train(home: Path, task: str, name: str, words: str, processes: int) -> Path:
    """A run's folder."""
    run = f"{name}-{len(list(home.glob('runs/*')))}"
    words = f"{words} --data {name} {COMMON} --processes {processes} --problem {KINDS[name].problem}"
    succeed("auto", "--task", task, *words.split(), "--name", run, cwd=home)
    return home / "runs" / run


def read(home: Path, name: str, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / name / f"{split}.jsonl").read_text().splitlines()]


def batch_of(kind: Kind, tokenizer: Any, taken: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What a model of transformers reads, with labels, as its examples make it."""
    cut = {"padding": True, "truncation": True, "max_length": 24, "return_tensors": "pt"}
    if kind.problem == "tokens":
        made = tokenizer([row["words"] for row in taken], is_split_into_words=True, **cut)
        labels = torch.full(made["input_ids"].shape, -100)
        for n, row in enumerate(taken):
            before = None
            for place, word in enumerate(made.word_ids(n)):
                if word is not None and word != before:
                    labels[n, place] = kind.labels.index(row["tags"][word])
                before = word
    elif kind.problem == "multi-label":
        made = tokenizer([row["text"] for row in taken], **cut)
        labels = torch.tensor([[float(name in row["labels"]) for name in kind.labels] for row in taken])
    else:
        columns = ("sentence1", "sentence2") if "sentence1" in taken[0] else ("text",)
        made = tokenizer(*([row[column] for row in taken] for column in columns), **cut)
        if kind.problem == "regression":
            labels = torch.tensor([row["score"] for row in taken])
        else:
            labels = torch.tensor([kind.labels.index(row["label"]) for row in taken])
    return {**made, "labels": labels}


def own_loss(model: Any, batch: dict[str, Tensor]) -> Any:
    return model(**batch).loss


RATES = [RATE * ((n + 1) / 2 if n < 2 else 1 - (n - 2) / (STEPS - 2)) for n in range(STEPS)]
"""Two steps that rise, then a line to 0."""


def of_batch(name: str, home: Path, loss: Callable[[Any, dict[str, Tensor]], Tensor] = own_loss) -> Any:
    """A loss of rows of training by their numbers."""
    tokenizer, data = AutoTokenizer.from_pretrained(home / "encoder"), read(home, name, "train")
    return lambda model, taken: loss(model, batch_of(KINDS[name], tokenizer, [data[n] for n in taken]))


def agree(
    home: Path,
    task: str,
    name: str,
    words: str,
    loss: Callable[[Any, dict[str, Tensor]], Tensor],
    begin: Callable[[Path], Any],
    processes: tuple[int, ...] = (2,),
    **more: Any,
) -> list[Path]:
    """The runs on so many processes, which have the losses and rates of one loop."""
    kind = KINDS[name]
    runs = [train(home, task, name, words, count) for count in processes]
    taken = [list(step["samples"]) for step in ledger(runs[0])]
    assert all([list(step["samples"]) for step in ledger(run)] == taken for run in runs)
    model, tokenizer = begin(runs[0]), AutoTokenizer.from_pretrained(home / "encoder")
    expected = take_steps(model, adamw(model, DECAY, **more), RATES, taken, of_batch(name, home, loss))
    with torch.no_grad():
        held = {
            split: float(model.eval()(**batch_of(kind, tokenizer, read(home, name, split))).loss)
            for split in ("valid", "test")
        }
    for run in runs:
        assert figure(run, "loss") == pytest.approx(expected, rel=TOLERANCE)
        assert figure(run, "lr") == pytest.approx(RATES)
        found = {split: metrics["loss"] for split, metrics in summary(run)["metrics_by_split"].items()}
        assert found == pytest.approx(held, rel=TOLERANCE)
    return runs


def test_a_new_head_learns_faster(home: Path) -> None:
    """From where a run began: the last layer is drawn."""

    def begin(run: Path) -> Any:
        with isobatch.replay(str(run), 1) as (first, _, _):
            weights = {name: weight.clone() for name, weight in first.state_dict().items()}
        model = plain(KINDS["one"], home / "encoder")
        model.load_state_dict(weights)
        return model

    new = ["classifier.weight", "classifier.bias"]
    words = f"--model {home}/encoder --head-rate 4"
    agree(home, "classifier", "one", words, own_loss, begin, faster=4.0, new=new)


class Held(NamedTuple):
    """Rows of a split, and of each the logits of what is labelled and its label or labels."""

    rows: list[dict[str, Any]]
    logits: list[np.ndarray]
    labels: list[np.ndarray]


def answered(kind: Kind, folder: Path, data: list[dict[str, Any]]) -> Held:
    model, tokenizer = kind.auto.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    logits, labels = list[np.ndarray](), list[np.ndarray]()
    for row in data:
        batch = batch_of(kind, tokenizer, [row])
        label = batch.pop("labels")[0]
        with torch.no_grad():
            found = model(**batch).logits[0]
        there = label >= 0 if kind.problem == "tokens" else ...
        logits.append(found[there].double().numpy())
        labels.append(label[there].numpy())
    return Held(data, logits, labels)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def shares(truth: Any, said: Any, prefix: str = "", averages: Any = ("micro", "macro")) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for average in averages:
        scores = metrics.precision_recall_fscore_support(truth, said, average=average, zero_division=0)
        names = (f"{prefix}{name}_{average}" for name in ("precision", "recall", "f1"))
        found.update(zip(names, scores, strict=False))
    return found


def of_classes(_: Kind, held: Held, __: Any) -> dict[str, Any]:
    p, truth = softmax(np.stack(held.logits)), np.array(held.labels)
    sure, right = p.max(1), p.argmax(1) == truth
    bins = np.minimum((sure * 15).astype(int), 14)
    gaps = [abs(right[bins == n].sum() - sure[bins == n].sum()) for n in range(15)]
    return shares(truth, p.argmax(1), averages=["macro"]) | {
        "accuracy": float(right.mean()),
        "accuracy_ci95": list(stats.binomtest(right.sum(), len(right)).proportion_ci(method="wilson")),
        "mcc": metrics.matthews_corrcoef(truth, p.argmax(1)),
        "calibration_error": float(sum(gaps) / len(right)),
    }


def of_sets(_: Kind, held: Held, thresholds: np.ndarray | None) -> dict[str, Any]:
    p, truth = sigmoid(np.stack(held.logits)), np.stack(held.labels)
    found = shares(truth, p >= 0.5) | {"subset_accuracy": metrics.accuracy_score(truth, p >= 0.5)}
    found["f1_by_label"] = list(metrics.f1_score(truth, p >= 0.5, average=None, zero_division=0))
    return found | ({} if thresholds is None else shares(truth, p >= thresholds, "tuned_"))


def of_scores(_: Kind, held: Held, __: Any) -> dict[str, Any]:
    said, truth = np.concatenate(held.logits), np.array(held.labels, dtype=float)
    return {
        "pearson": stats.pearsonr(said, truth)[0],
        "spearman": stats.spearmanr(said, truth)[0],
        "mae": metrics.mean_absolute_error(truth, said),
        "rmse": metrics.root_mean_squared_error(truth, said),
    }


def of_words(kind: Kind, held: Held, _: Any) -> dict[str, Any]:
    said = [[kind.labels[n] for n in x.argmax(1)] for x in held.logits]
    truth = [[kind.labels[n] for n in x] for x in held.labels]
    report: Any = seqeval.metrics.classification_report(truth, said, output_dict=True, zero_division=0)
    found = {"token_accuracy": seqeval.metrics.accuracy_score(truth, said)}
    for average in ("micro", "macro"):
        for name in ("precision", "recall", "f1"):
            found[f"{name}_{average}"] = report[f"{average} avg"][name if name != "f1" else "f1-score"]
    return found


def kept_thresholds(run: Path, valid: Held) -> np.ndarray:
    """Of each label that which no other threshold beats by F1 on the validation split, its log-odds times
    m / (m + 1) where m samples have it.
    """
    kept = load_file(run / "final" / "calibration.safetensors")["thresholds"]
    p, truth = sigmoid(np.stack(valid.logits)), np.stack(valid.labels)
    for n, least in enumerate(kept):
        best = max(metrics.f1_score(truth[:, n], p[:, n] >= x, zero_division=0) for x in p[:, n])
        m = truth[:, n].sum()
        untouched = sigmoid(np.log(least / (1 - least)) * (m + 1) / m)
        assert metrics.f1_score(truth[:, n], p[:, n] >= untouched) == pytest.approx(best)
    assert any(abs(kept - 0.5) > 0.05)
    return kept


def kept_temperature(run: Path, valid: Held) -> float:
    """Guo et al. 2017: that of the least negative log likelihood on the validation split."""
    kept = summary(run)["metrics_by_split"]["test"]["temperature"]
    rows_there, truth = np.stack(valid.logits), np.array(valid.labels)

    def nll(heat: float) -> float:
        return float(-np.log(softmax(rows_there / heat)[np.arange(len(truth)), truth]).mean())

    best = optimize.minimize_scalar(nll, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9})
    assert kept == pytest.approx(best.x, rel=1e-3)
    return float(kept)


FIGURES = {"classes": of_classes, "multi-label": of_sets, "regression": of_scores, "tokens": of_words}


def expected_answer(kind: Kind, row: dict[str, Any], logits: np.ndarray, thresholds: Any) -> dict[str, Any]:
    """What docs/ say that `predict` answers, of what plain transformers compute."""
    if kind.problem == "classes":
        return {"prediction": kind.labels[logits.argmax()], "probability": softmax(logits).max()}
    if kind.problem == "multi-label":
        p = sigmoid(logits)
        said = [name for name, x, least in zip(kind.labels, p, thresholds, strict=True) if x >= least]
        return {"prediction": said, "probabilities": dict(zip(kind.labels, p, strict=True))}
    if kind.problem == "regression":
        return {"prediction": float(logits[0])}
    tags = [kind.labels[n] for n in logits.argmax(1)]
    entities, whole = [], " ".join(row["words"])
    for name, first, last in get_entities(tags):
        start = len(" ".join([*row["words"][:first], ""]))
        end = len(" ".join(row["words"][: last + 1]))
        sure = softmax(logits[first : last + 1]).max(1).mean()
        place = {"type": name, "text": whole[start:end], "start": start, "end": end}
        entities.append({**place, "probability": sure})
    unread = [None] * (len(row["words"]) - len(tags))
    return {"prediction": entities, "words": row["words"], "tags": tags + unread}


def same(found: Any, expected: Any) -> None:
    """Whatever is expected is found, numbers within 1e-6 of it."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            same(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected), (found, expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-6)
    else:
        assert found == expected


@pytest.mark.parametrize("name", list(KINDS))
def test_plain_losses_figures_answers_and_files(home: Path, name: str) -> None:
    """All that a run says is what plain libraries find, the same on two processes."""
    kind = KINDS[name]

    words, student = f"--model {home}/{name}/student", plain(kind, home / name / "student")
    runs = agree(home, "classifier", name, words, own_loss, lambda _: student, (1, 2))
    for run in runs:
        held = {split: answered(kind, run / "final", read(home, name, split)) for split in ("valid", "test")}
        thresholds, heat = None, 1.0
        if kind.problem == "multi-label":
            thresholds = kept_thresholds(run, held["valid"])
        elif kind.problem == "classes":
            heat = kept_temperature(run, held["valid"])
        for split, one in held.items():
            figures = FIGURES[kind.problem](kind, one, thresholds if split == "test" else None)
            same(summary(run)["metrics_by_split"][split], figures)
    assert 0.05 < figures["spearman" if kind.problem == "regression" else "f1_macro"] < 1

    succeed("export", str(run), "--to", "onnx", cwd=home)
    file = next((run / "exports" / "onnx").glob("*.onnx"))
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    tokenizer = AutoTokenizer.from_pretrained(file.parent)
    for row, logits in zip(*held["test"][:2], strict=True):
        batch = batch_of(kind, tokenizer, [row])
        label = batch.pop("labels")[0]
        made = session.run(None, {key: value.numpy() for key, value in batch.items()})[0][0]
        made = made[label.numpy() >= 0] if kind.problem == "tokens" else made
        assert made == pytest.approx(logits, abs=1e-5)

    expected = [
        expected_answer(kind, row, x / heat, thresholds) for row, x in zip(*held["test"][:2], strict=True)
    ]
    for form in ("torch", "onnx"):
        same(predictions(home, str(run), "--file", f"{name}/test.jsonl", "--form", form), expected)


def weighed(kind: Kind, counts: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """PyTorch's loss with the weights of `weighing`."""
    if kind.weighing == HUBER:
        return lambda logits, labels: F.huber_loss(logits[:, 0], labels)
    if kind.weighing == GIVEN:
        weight = torch.tensor([2, 1.5, 1, 0.5])
        return lambda logits, labels: F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight)
    weight = counts.sum() / (len(counts) * counts)
    if kind.weighing == BALANCED:
        return lambda logits, labels: F.cross_entropy(logits, labels, weight)
    if kind.weighing == FOCAL:

        def focal(logits: Tensor, labels: Tensor) -> Tensor:
            """Lin et al. 2017, with the weights as alpha; PyTorch's mean is over their sum."""
            nll, alpha = F.cross_entropy(logits, labels, reduction="none"), weight[labels]
            return (alpha * (1 - (-nll).exp()) ** 2 * nll).sum() / alpha.sum()

        return focal
    return lambda logits, labels: F.mse_loss(logits[:, 0], labels)


@pytest.mark.parametrize("name", ["one", "several", "score", "tagged"])
def test_distillation_and_weighed_losses(home: Path, name: str) -> None:
    """Hinton et al. 2015 of classes, of each label's there or not, of words; Sun et al. 2019."""
    kind, share, heat, follows = KINDS[name], 0.6, 1.7, name == "one"
    teacher = plain(kind, home / name / "teacher").eval()
    whole = [row.get("tags", [row.get("label")]) for row in read(home, name, "train")]
    counts = torch.tensor([sum(tags.count(label) for tags in whole) for label in kind.labels]).float()
    hard, pulls = weighed(kind, counts), list[float]()

    def soft(student: Tensor, known: Tensor) -> Tensor:
        if kind.problem == "regression":
            return F.mse_loss(student, known)
        if kind.problem == "multi-label":
            student, known = (torch.stack([x, torch.zeros_like(x)], -1) for x in (student, known))
        p, q = ((x.flatten(0, -2) / heat).log_softmax(-1) for x in (known, student))
        return heat**2 * F.kl_div(q, p, log_target=True, reduction="batchmean")

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        with torch.no_grad():
            known = teacher(**batch, output_hidden_states=True)
        kept = [state.half().float() for state in known.hidden_states[1:]]  # on disk they have 16 bits
        own = model(**batch, output_hidden_states=True)
        states = [[F.normalize(x[:, 0], dim=-1) for x in made] for made in (own.hidden_states[1:], kept)]
        hidden = torch.stack([(a - b).square().sum(-1).mean() for a, b in zip(*states, strict=True)]).mean()
        there = labels >= 0 if kind.problem == "tokens" else torch.ones(len(labels), dtype=torch.bool)
        pull = soft(own.logits[there], known.logits[there])
        pulls.append(float(pull.detach()))
        return (1 - share) * hard(own.logits[there], labels[there]) + share * pull + follows * hidden

    words = f"""--model {home}/{name}/student --teacher {home}/{name}/teacher --kd-weight {share}
     --temperature {heat} --distill-hidden {"on" if follows or name == "tagged" else "off"}
     --sparsity 0 --recover 0 {kind.weighing}"""
    agree(home, "pruning", name, words, loss, lambda run: plain(kind, home / name / "student"))
    assert min(pulls) > 1e-3
