"""`predict`, `recommend --out` and `serve` of trained runs, as a user types them."""

from __future__ import annotations

import csv
import http.client
import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyarrow import parquet

from isobatch.core.errors import UserError
from isobatch.launch.predicting.command import predict
from isobatch.launch.serving.command import ServeOptions, make_app
from isobatch.tests.integration.helpers import launch, warm_command
from isobatch.tests.integration.test_bad_input import complaint
from isobatch.tests.paths import REGISTER

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = (1, 3, 9, 30, 2, 9, 60)
TEXTS = ["def get(self): return " + "self.headers " * n for n in LENGTHS]
BRIEF = ["--quiet", "--processes", "1"]
SOUNDS = {"cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a classifier, a quantized one, a classifier of pairs, and models of the other kinds."""
    folder = tmp_path_factory.mktemp("predict")
    pairs = [
        {"premise": f"the {a} sleeps", "hypothesis": f"a {b} sleeps", "label": "yes" if a == b else "no"}
        for a in SOUNDS
        for b in (a, *SOUNDS)
    ]
    asked = [{"instruction": f"What does a {a} say?", "output": sound} for a, sound in SOUNDS.items()]
    texts = [{"text": f"def {a}{n}(self): self.{a}", "label": a} for n in range(20) for a in SOUNDS]
    for name, rows in (("pairs", pairs), ("asked", asked * 9), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny = ["--model", "tiny", "--vocab-size", "300", "--batch-size", "8"]
    short = ["--max-length", "64", "--lr", "1e-3"]
    train(folder, "one", "--task", "classifier", "--data", "texts.jsonl", "--steps", "12", *tiny, *short)
    small = ["--task", "qat", "--data", "texts.jsonl", "--pruned", "runs/one", "--max-length", "64"]
    train(folder, "small", *small, "--steps", "4")
    train(folder, "pair", "--task", "classifier", "--data", "pairs.jsonl", "--steps", "4", *tiny)
    chat = ["--task", "causal-lm", "--data", "asked.jsonl", "--steps", "60", "--lr", "3e-3"]
    train(folder, "chat", *chat, *tiny)
    train(folder, "plain", "--task", "causal-lm", "--steps", "2")
    train(folder, "vae", "--task", "sequence-vae", "--steps", "3")
    train(folder, "items", "--task", "recommender", "--steps", "3", "--text", "off")
    return folder


def train(folder: Path, name: str, *words: str) -> None:
    done = launch("auto", *words, "--name", name, *BRIEF, cwd=folder)
    assert done.returncode == 0, done.stderr


def predictions(home: Path, *words: str) -> list[dict[str, Any]]:
    done = launch("predict", *words, "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def probabilities(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([list(row["probabilities"].values()) for row in rows])


def test_probabilities_are_those_of_transformers(home: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    final = home / "runs" / "one" / "final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    model = AutoModelForSequenceClassification.from_pretrained(final).eval()
    found = predictions(home, "runs/one", *TEXTS)
    for text, row in zip(TEXTS, found, strict=True):
        tokens = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")
        expected = model(**tokens).logits[0].double().softmax(0)
        named = {model.config.id2label[n]: float(p) for n, p in enumerate(expected)}
        assert row["probabilities"] == pytest.approx(named, abs=1e-6)
        assert row["prediction"] == max(named, key=lambda n: named[n])
        assert row["probability"] == max(row["probabilities"].values())
    assert isinstance(model, torch.nn.Module)


@pytest.mark.parametrize("form", ["runs/one", "runs/small", "runs/small --form onnx-int4"])
def test_an_answer_does_not_depend_on_its_batch(form: str, home: Path) -> None:
    words = form.split()
    together = predictions(home, *words, *TEXTS)
    alone = [predictions(home, *words, text)[0] for text in TEXTS[:4]]
    assert probabilities(together)[:4] == pytest.approx(probabilities(alone), abs=2e-6)
    assert len({json.dumps(row["probabilities"]) for row in together}) > 3


def test_the_int4_file_answers_as_the_trained_model_wherever_it_is_opened(home: Path) -> None:
    trained = probabilities(predictions(home, "runs/small", *TEXTS))
    for form in ("runs/small --form onnx-int4", "runs/small/final/model-int4.onnx", "runs/small/final"):
        found = probabilities(predictions(home, *form.split(), *TEXTS))
        assert found == pytest.approx(trained, abs=1e-3)


def test_a_file_of_pairs_has_the_columns_of_the_run(home: Path) -> None:
    rows = [{"premise": "the cow sleeps", "hypothesis": "a dog sleeps", "label": "?"}]
    with (home / "new.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    done = launch("predict", "runs/pair", "--file", "new.csv", "--out", "new.parquet", cwd=home)
    assert done.stdout == "1 rows -> new.parquet\n", done.stderr
    (found,) = parquet.read_table(home / "new.parquet").to_pylist()
    (typed,) = predictions(home, "runs/pair", "the cow sleeps", "a dog sleeps")
    assert found["label"] == "?"
    assert found["probabilities.no"] == pytest.approx(typed["probabilities"]["no"], abs=1e-6)
    (swapped,) = predictions(home, "runs/pair", "a dog sleeps", "the cow sleeps")
    assert swapped["probabilities"] != typed["probabilities"]
    assert "give them in twos" in complaint(launch("predict", "runs/pair", "a", cwd=home))


def test_a_language_model_answers_each_row(home: Path) -> None:
    rows = [{"id": n, "instruction": f"What does a {animal} say?"} for n, animal in enumerate(SOUNDS)]
    (home / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = predictions(home, "runs/chat", "--file", "q.jsonl", "--tokens", "12")
    alone = [predictions(home, "runs/chat", row["instruction"], "--tokens", "12")[0] for row in rows]
    assert [row["answer"] for row in found] == [row["answer"] for row in alone]
    assert [row["id"] for row in found] == list(range(len(rows)))
    generated = launch(
        *("generate", "runs/chat", "--prompt", rows[0]["instruction"], "--tokens", "12"),
        *("--temperature", "0", "--json"),
        cwd=home,
    )
    assert json.loads(generated.stdout)["text"] == found[0]["answer"]
    assert "continuation" in predictions(home, "runs/plain", "def", "--tokens", "4")[0]


def test_latent_codes_do_not_depend_on_the_batch(home: Path) -> None:
    together = predictions(home, "runs/vae", *TEXTS)
    alone = [predictions(home, "runs/vae", text)[0] for text in TEXTS[:3]]
    for one, other in zip(together, alone, strict=False):
        assert one["latent"] == pytest.approx(other["latent"], abs=1e-5)
    assert together[0]["kl"] > 0


def test_lists_for_all_users_are_those_of_each(home: Path) -> None:
    done = launch("recommend", "runs/items", "--out", "lists.parquet", "--top", "4", cwd=home)
    assert done.returncode == 0, done.stderr
    rows = parquet.read_table(home / "lists.parquet").to_pylist()
    users = list(dict.fromkeys(row["user"] for row in rows))
    assert len(rows) == 4 * len(users)
    chosen = users[::97]
    for user, found in zip(chosen, predictions(home, "runs/items", *chosen, "--top", "4"), strict=True):
        own = [row for row in rows if row["user"] == user]
        assert [row["rank"] for row in own] == [1, 2, 3, 4]
        assert [row["score"] for row in own] == pytest.approx(found["scores"], abs=1e-5)
        assert [row["item"] for row in own] == found["items"]


def test_similar_items_have_the_largest_cosine(home: Path) -> None:
    from safetensors.numpy import load_file

    done = launch("recommend", "runs/items", "--similar-to", "3", "--top", "5", "--json", cwd=home)
    found = json.loads(done.stdout)["items"]
    final = home / "runs" / "items" / "final"
    v = load_file(final / "model.safetensors")["items"].astype(np.float64)
    names = json.loads((final / "names.json").read_text())["items"]
    at = names.index("3")
    cosines = v @ v[at] / np.linalg.norm(v, axis=1) / np.linalg.norm(v[at])
    expected = [names[i] for i in np.argsort(-cosines) if i != at][:5]
    assert [entry["item"] for entry in found] == expected
    said = complaint(launch("recommend", "runs/items", "--similar-to", "nothing", cwd=home))
    assert "--similar-to nothing: is not in the training data" in said


OWN = """
import numpy as np
from isobatch import ArraySource, Data, Loss, Task

class Numbers(Data):
    def read(self):
        x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        return {"train": {"x": x}, "valid": {"x": x[::4]}}
    def read_rows(self):
        return {"x": np.loadtxt(self.recipe.data, dtype=np.float32, ndmin=2)}

class Half(Task):
    data = Numbers
    defaults = {"epochs": 1, "batch_size": 8}
    def build_model(self, facts):
        from torch import nn
        return nn.Linear(1, 1)
    def loss(self, model, batch, step):
        return {"loss": Loss((model(batch["x"]) - batch["x"] / 2).square().sum(), "sample")}
    def predict(self, model, batch):
        assert not model.training
        return {"y": model(batch["x"])[:, 0], "both": batch["x"].repeat(1, 2), "large": batch["x"][:, 0] > 0}
"""


def test_an_own_task_predicts_what_its_data_reads(home: Path) -> None:
    (home / "mine.py").write_text(OWN)
    (home / "x.txt").write_text("0.5\n-2\n")
    train(home, "half", "--task", "./mine.py:Half")
    found = predictions(home, "runs/half", "--file", "x.txt")
    assert [row["both"] for row in found] == [[0.5, 0.5], [-2.0, -2.0]]
    assert [row["large"] for row in found] == [True, False]
    held_out = predictions(home, "runs/half", "--split", "valid")
    assert [row["sample"] for row in held_out] == list(range(10))
    slope = (found[0]["y"] - found[1]["y"]) / 2.5
    for row in held_out:
        assert row["y"] == pytest.approx(found[0]["y"] + slope * (row["both"][0] - 0.5), abs=1e-5)
    assert "give --file FILE, or --split" in complaint(launch("predict", "runs/half", cwd=home))


WRONG: dict[str, tuple[list[str], str]] = {
    "no run": (["runs/none", "a"], "runs/none is not a run"),
    "nothing asked": (["runs/one"], "Give texts in quotes"),
    "no prompt": (["runs/plain"], "Give texts in quotes"),
    "no file": (["runs/one", "--file", "no.csv"], "there is no such file"),
    "empty file": (["runs/one", "--file", "empty.csv"], "holds no rows"),
    "both": (["runs/one", "a", "--file", "pairs.jsonl"], "not both"),
    "missing column": (["runs/one", "--file", "asked.jsonl"], "asked.jsonl line 1: has no column"),
    "misspelt column": (["runs/pair", "--file", "pairs.jsonl", "--text-column", "premis"], "mean premise?"),
    "misspelt flag": (["runs/one", "a", "--fil", "b"], "did you mean --file?"),
    "unread flag": (["runs/one", "a", "--tokens", "5"], "--tokens: changes nothing of a classifier run"),
    "no such form": (["runs/one", "a", "--form", "onnx"], "`export runs/one --to onnx` writes it"),
    "no int4": (["runs/one", "a", "--form", "onnx-int4"], "`auto --task qat --pruned runs/one`"),
    "ending": (["runs/one", "a", "--out", "b.xls"], "must end in .csv, .jsonl, .parquet"),
    "unfinished": (["runs/begun", "a"], "`resume runs/begun` goes on with it"),
    "unknown user": (["runs/items", "nobody"], "--user nobody: is not in the training data"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "empty.csv").write_text("text\n")
    begun = home / "runs" / "begun"
    begun.mkdir(exist_ok=True)
    for name in ("recipe.json", "facts.json"):
        (begun / name).write_bytes((home / "runs" / "one" / name).read_bytes())
    words, expected = WRONG[case]
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        predict(words)
    assert "\n" not in str(caught.value)


def test_a_served_language_model_answers_as_generate_does(home: Path) -> None:
    from starlette.testclient import TestClient

    question = "What does a duck say?"
    asked = {"messages": [{"role": "user", "content": question}], "temperature": 0.9, "seed": 4}
    words = ["--prompt", question, "--temperature", "0.9", "--seed", "4", "--tokens", "20"]
    generated = launch("generate", "runs/chat", *words, "--json", cwd=home)
    with TestClient(make_app(str(home / "runs" / "chat"), ServeOptions())) as client:
        body = asked | {"model": "chat", "max_tokens": 20}
        whole = client.post("/v1/chat/completions", json=body).json()
        lines = client.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    streamed = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert whole["choices"][0]["message"]["content"] == streamed == json.loads(generated.stdout)["text"]
    assert whole["usage"]["completion_tokens"] <= 20


def test_concurrent_requests_get_their_own_answers(home: Path) -> None:
    from starlette.testclient import TestClient

    expected = probabilities(predictions(home, "runs/one", *TEXTS))
    app, asked = make_app(str(home / "runs" / "one"), ServeOptions()), [n % len(TEXTS) for n in range(56)]
    with TestClient(app) as client, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: client.post("/predict", json={"texts": [TEXTS[n]]}).json(), asked))
    answers = probabilities([body["predictions"][0] for body in found])
    assert answers == pytest.approx(expected[asked], abs=2e-6)


def ask(port: int, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body))
    return connection.getresponse()


def port_of(server: subprocess.Popen[str]) -> int:
    assert server.stdout is not None
    line = server.stdout.readline()
    return int(line.partition("127.0.0.1:")[2].split()[0])


def test_the_int4_file_is_served_where_torch_cannot_be_imported(home: Path) -> None:
    script = "import sys; sys.modules['torch'] = None\n" + REGISTER
    script += "from isobatch.launch.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["serve", "runs/small/final/model-int4.onnx", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-c", script, *words], cwd=home, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            found = json.loads(ask(port_of(server), "/predict", {"texts": TEXTS}).read())
        finally:
            server.kill()
    expected = probabilities(predictions(home, "runs/small", "--form", "onnx-int4", *TEXTS))
    assert probabilities(found["predictions"]) == pytest.approx(expected, abs=1e-9)


def test_ctrl_c_ends_a_server_at_once_though_it_writes(home: Path) -> None:
    words = warm_command("serve", "runs/plain", "--port", "0")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=home, **pipes) as server:
        body = {"prompt": "def", "max_tokens": 100_000, "stream": True}
        assert ask(port_of(server), "/v1/completions", body).read(5) == b"data:"
        began = time.monotonic()
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=30)
    assert time.monotonic() - began < 3
    assert said == "isobatch: interrupted\n"
    assert server.returncode == 130


def test_what_cannot_be_served_is_one_line(home: Path) -> None:
    for words, expected in (
        (["runs/none"], "runs/none is not a run"),
        (["runs/plain", "--form", "onnx"], "--form: changes nothing of a causal-lm run"),
        (["runs/one", "--port", "70000"], "--port 70000: must be at"),
        (["runs/one", "--prot", "1"], "did you mean --port?"),
    ):
        assert expected in complaint(launch("serve", *words, cwd=home))
