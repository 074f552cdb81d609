"""Instructions and chats: a model learns to answer, and `chat` shows it."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.report.page import collect, write_report
from isobatch.launch.serving.command import ServeOptions, make_app
from isobatch.tests.integration.helpers import (
    launch,
    losses,
    port_of,
    post,
    run_card,
    run_code,
    succeed,
    summary,
    warm_command,
)

if TYPE_CHECKING:
    from pathlib import Path

ANIMALS = {"cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "owl": "hoot"}
ASK = ("What does a {} say?", "Which sound has the {}?", "Tell me what {}s say.", "The {} says what?")
TASK = ["auto", "--task", "causal-lm", "--quiet", "--batch-size", "8", "--lr", "3e-3", "--vocab-size", "400"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 48 instructions, 24 chats of two turns, and a run of the first, runs/asked."""
    folder = tmp_path_factory.mktemp("instructions")
    asked = [
        {"instruction": ask.format(name), "input": extra, "output": f"It says {sound}."}
        for extra in ("", "Be short.")
        for ask in ASK
        for name, sound in ANIMALS.items()
    ]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    chats = [
        {
            "messages": [
                {"role": "user", "content": ask.format(name)},
                {"role": "assistant", "content": f"It says {sound}."},
                {"role": "user", "content": "Louder!"},
                {"role": "assistant", "content": f"It says {sound.upper()}!"},
            ]
        }
        for ask in ASK
        for name, sound in ANIMALS.items()
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    flags = ["--data", "asked.jsonl", "--model", "tiny", "--steps", "200", "--ledger", "--save-every", "75"]
    succeed(*TASK, *flags, "--keep", "9", "--name", "asked", "--processes", "1", cwd=folder)
    return folder


def test_an_answer_is_learnt_and_given(home: Path) -> None:
    run = home / "runs" / "asked"
    assert losses(run)[-1] < 0.2 * losses(run)[0]
    words = ["generate", "runs/asked", "--prompt", "What does a duck say?", "--temperature", "0", "--json"]
    done = succeed(*words, cwd=home)
    assert json.loads(done.stdout)["text"].strip() == "It says quack."
    behind = ["generate", "runs/asked", "What does a duck say?", "--max_new_tokens=60", "--temperature=0"]
    assert launch(*behind, cwd=home).stdout.strip() == "It says quack."
    assert run_card(run / "final").strip(), "its card asks a question as the template says"
    assert "[reference: It says" in (run / "log.txt").read_text()
    assert json.loads((run / "facts.json").read_text())["extra"]["turns"] == 1
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    asked = [{"role": "user", "content": "What does a duck say?"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("### Instruction:\nWhat does a duck say?\n\n### Response:\n")
    assert summary(run)["metrics"]["unit"] == "response token"
    made = write_report(collect([RunFolder.open(str(run))]), home / "report")
    assert made.runs[0]["metrics"]["perplexity"] == summary(run)["metrics"]["perplexity"]
    for page in ("report.md", "report.html"):
        assert "[reference: It says" in (home / "report" / page).read_text()


BY_HAND = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
final, file = sys.argv[1:]
net, tokenizer = AutoModelForCausalLM.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final)
total, count = 0.0, 0
for line in open(file).read().splitlines()[-2:]:  # every twentieth part is held out: the last two
    row = json.loads(line)
    prompt = "Below is an instruction that describes a task, paired with an input that provides further"
    prompt += " context. Write a response that appropriately completes the request.\\n\\n### Instruction:\\n"
    prompt += row["instruction"] + "\\n\\n### Input:\\n" + row["input"] + "\\n\\n### Response:\\n"
    asked = tokenizer(prompt, add_special_tokens=False).input_ids
    answer = tokenizer(row["output"], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    with torch.no_grad():
        logs = net(torch.tensor([asked + answer])).logits[0].log_softmax(-1)
    for place, token in enumerate(answer, len(asked)):
        total -= float(logs[place - 1, token])
        count += 1
print(total / count)
"""


def test_perplexity_is_of_the_answers_tokens_as_others_compute_it(home: Path) -> None:
    done = run_code(BY_HAND, "runs/asked/final", "asked.jsonl", cwd=home)
    assert done.returncode == 0, done.stderr
    found = summary(home / "runs" / "asked")["metrics"]
    assert found["loss"] == pytest.approx(float(done.stdout), rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(float(done.stdout)), rel=1e-4)


def test_a_chat_goes_on_over_turns(home: Path) -> None:
    flags = ["--data", "chats.jsonl", "--model", "tiny", "--steps", "250", "--name", "chats"]
    succeed(*TASK, *flags, cwd=home)
    words = warm_command("chat", "runs/chats", "--temperature", "0")
    talk = "What does a cow say?\nLouder!\n/reset\nWhat does a dog say?\n/quit\n"
    said = subprocess.run(words, cwd=home, input=talk, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    answers = [line.strip() for line in said.stdout.splitlines() if line.strip()]
    assert answers == ["It says moo.", "It says MOO!", "It says woof."]


def test_chat_needs_a_model_that_was_taught_to(home: Path) -> None:
    plain = home / "runs" / "plain"
    shutil.copytree(home / "runs" / "asked", plain)
    facts = json.loads((plain / "facts.json").read_text())
    del facts["extra"]["template"]
    (plain / "facts.json").write_text(json.dumps(facts))
    refused = launch("chat", "runs/plain", cwd=home)
    assert refused.returncode == 2
    assert "was not trained on conversations" in refused.stderr


def test_a_served_language_model_answers_as_generate_does(home: Path) -> None:
    from starlette.testclient import TestClient

    question = "What does a duck say?"
    asked = {"messages": [{"role": "user", "content": question}], "temperature": 0.9, "seed": 4}
    words = ["--prompt", question, "--temperature", "0.9", "--seed", "4", "--tokens", "20"]
    generated = launch("generate", "runs/asked", *words, "--json", cwd=home)
    with TestClient(make_app(str(home / "runs" / "asked"), ServeOptions())) as client:
        body = asked | {"model": "asked", "max_tokens": 20}
        whole = client.post("/v1/chat/completions", json=body).json()
        lines = client.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    streamed = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert whole["choices"][0]["message"]["content"] == streamed == json.loads(generated.stdout)["text"]
    assert whole["usage"]["completion_tokens"] <= 20


def test_ctrl_c_ends_a_server_at_once_though_it_writes(home: Path) -> None:
    words = warm_command("serve", "runs/asked", "--port", "0")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=home, **pipes) as server:
        body = {"prompt": "def", "max_tokens": 100_000, "temperature": 2, "stream": True}
        assert post(port_of(server), "/v1/completions", body).read(5) == b"data:"
        began = time.monotonic()
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=30)
    assert time.monotonic() - began < 3
    assert said.splitlines()[-1] == "isobatch: the server has ended"
    assert server.returncode == 0
