"""Answers to held-out prompts during training: the same on any processes, as transformers writes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.report.page import collect, write_report
from isobatch.tests.integration.helpers import launch, run_code, succeed, summary

if TYPE_CHECKING:
    from pathlib import Path

TOOLS = '{"type": "function", "function": {"name": "sound", "parameters": {}}}'
TASK = ["auto", "--task", "causal-lm", "--data", "calls.jsonl", "--quiet", "--answers", "4", "--before"]
MODEL = ["--batch-size", "8", "--lr", "1e-2", "--model", "tiny", "--vocab-size", "300", "--max-length", "192"]


def read(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations that call a tool, and a run of them, runs/one."""
    folder = tmp_path_factory.mktemp("answers")
    rows = [
        [
            {"role": "system", "content": TOOLS},
            {"role": "user", "content": f"the {animal}?"},
            {"role": "assistant", "content": f'{{"name": "sound", "arguments": {{"of": "{animal}"}}}}'},
        ]
        for animal in ("cow", "dog", "cat", "duck") * 10
    ]
    (folder / "calls.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    more = ["--steps", "60", "--eval-every", "20", "--valid", "0.2", "--name", "one"]
    succeed(*TASK, *MODEL, *more, cwd=folder)
    return folder


AS_TRANSFORMERS = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
final, file = sys.argv[1:]
net, tokenizer = AutoModelForCausalLM.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final)
for row in [json.loads(line) for line in open(file)][-4:]:
    asked = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")
    most = len(tokenizer(row["reference"], add_special_tokens=False).input_ids) + 32
    said = net.generate(**asked, max_new_tokens=most, do_sample=False)[0][asked.input_ids.shape[1]:]
    print(json.dumps(tokenizer.decode(said, skip_special_tokens=False)))
"""


def test_answers_are_those_of_transformers_and_stand_before_and_after(home: Path) -> None:
    run, rows = home / "runs" / "one", read(home / "runs" / "one", "answers.jsonl")
    assert [row["step"] for row in rows] == [step for step in (0, 20, 40, 60) for _ in range(4)]
    done = run_code(AS_TRANSFORMERS, "runs/one/final", "runs/one/answers.jsonl", cwd=home)
    assert done.returncode == 0, done.stderr
    for text, row in zip(map(json.loads, done.stdout.splitlines()[-4:]), rows[-4:], strict=True):
        assert text.removesuffix("<|endoftext|>").removesuffix("<|im_end|>") == row["answer"]
        assert row["exact_match"] == (row["answer"].strip() == row["reference"].strip())
    found, shares = summary(run), ("exact_match", "valid_tool_calls")
    for metrics, part in ((found["before"], rows[:4]), (found["metrics"], rows[-4:])):
        assert [metrics[name] for name in shares] == [sum(row[name] for row in part) / 4 for name in shares]
    assert found["before"]["loss"] > found["metrics"]["loss"]
    assert found["metrics"]["valid_tool_calls"] > 0, rows[-4:]
    write_report(collect([RunFolder.open(str(run))]), home / "report")
    page = (home / "report" / "report.html").read_text()
    assert "before and after training: one" in page
    assert "valid tool calls before training" in page


@pytest.mark.slow
def test_two_processes_in_other_micro_batches_answer_the_same(home: Path) -> None:
    more = ["--steps", "20", "--eval-every", "20", "--valid", "0.2", "--processes", "2", "--micro-batch", "2"]
    succeed(*TASK, *MODEL, *more, "--name", "two", cwd=home)
    succeed(*TASK, *MODEL, *more[:-4], "--name", "single", "--again", cwd=home)
    two, single = ((home / "runs" / name / "answers.jsonl").read_text() for name in ("two", "single"))
    assert two == single
    verified = succeed("verify", "runs/two", "--processes", "1", cwd=home)
    assert "held-out metrics recomputed" in verified.stdout


def test_a_strategy_that_shards_weights_is_refused_before_training(home: Path) -> None:
    refused = launch(*TASK, *MODEL, "--strategy", "fsdp2", "--processes", "2", "--name", "no", cwd=home)
    assert refused.returncode == 2
    assert "--answers 4 writes texts" in refused.stderr
    assert not (home / "runs" / "no").exists()
