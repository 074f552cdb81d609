"""Every word that documents about users' training scripts use: what it becomes here, or why it is no flag.

The table is tested always, the documents where they lie beside the clone: each of their command lines must be
accepted, and each flag and keyword be in the table.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.flags import spelling
from isobatch.launch.clusters.slurm.options import SlurmOptions
from isobatch.launch.commands.plan import PlanCommandOptions
from isobatch.launch.local.arguments import Request, known_flags, parse_request
from isobatch.launch.local.options import AutoOptions
from isobatch.launch.local.words import SYNONYMS
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENTS = ROOT.parent / "shared" / "documents"
TEXTS = {file.name[:3]: file.read_text(encoding="utf-8") for file in sorted(DOCUMENTS.glob("[0-9]*.txt"))}
ABOUT = {
    "000": ("recommender",),
    "001": ("pruning", "qat"),
    "002": ("causal-lm",),
    "003": ("sequence-vae",),
    "004": ("causal-lm",),
}
"""A document, by the first digits of its name -> the tasks it is about."""
SCRIPTS = {
    "8_pruning_with_finetuning.py": "pruning",
    "10_qat_kd_4bit.py": "qat",
    "train_optimized.py": "sequence-vae",
    "train.py": "causal-lm",
}
"""A training script of the documents -> the task that is in its place."""
OTHER_SCRIPTS = {"7_evaluate_and_generate_report.py": "the command `report`"}
COMMANDS = {"auto": AutoOptions, "plan": PlanCommandOptions, "slurm": SlurmOptions}
LORA = " --adapter lora --model models/gpt2"
TABLE: dict[str, list[tuple[str, str]]] = {
    "recommender": [
        ("--freeze_gpt2 True", "--text frozen"),
        ("--freeze_gpt2 False", "--text lora"),
        ("--freeze_gpt2", "--text frozen"),
        ("--gpt2_model_name models/gpt2", "--model models/gpt2"),
        ("--r 4", "--lora-r 4"),
        ("--use_amp True", "--precision 16-mixed"),
        ("--use_amp False", "--precision fp32"),
        ("--use_cache True --freeze_gpt2 True", "--text-cache on --text frozen"),
        ("--use_cache False", "--text-cache off"),
    ],
    "pruning": [
        ("--fast", "--mode fast"),
    ],
    "qat": [
        ("--num_epochs 2", "--epochs 2"),
        ("--pruned_model_path models/your_model", "--pruned models/your_model"),
    ],
    "causal-lm": [
        ("--bias none" + LORA, "--lora-bias none" + LORA),
        ("--bias all" + LORA, "--lora-bias all" + LORA),
        ("--dataset texts.txt", "--data texts.txt"),
        ("--device_map auto", ""),
        ("--early_stopping_patience 3", "--patience 3"),
        ("--eval_steps 5000", "--eval-every 5000"),
        ("--evaluation_strategy steps --eval_steps 5000", "--eval-every 5000"),
        ("--evaluation_strategy epoch", "--eval-every 1ep"),
        ("--batch_size 4 --gradient_accumulation_steps 4", "--batch-size 16"),
        ("--per_device_train_batch_size 4 --gradient_accumulation_steps 4", "--batch-size 16"),
        ("--load_in_8bit True" + LORA, "--load-bits 8" + LORA),
        ("--mode reduce-overhead", "--compile reduce-overhead"),
        ("--num_workers 8", "--workers 8"),
        ("--optimizer AdamW8bit", "--optimizer adamw8bit"),
        ("--prefetch_factor 4", "--prefetch 4"),
        ("--r 4" + LORA, "--lora-r 4" + LORA),
        ("--save_steps 5000", "--save-every 5000"),
        ('--target_modules ["c_attn","c_proj"]' + LORA, "--lora-targets c_attn,c_proj" + LORA),
        ("--task_type CAUSAL_LM", ""),
    ],
    "sequence-vae": [
        ("--batch_size 4 --accumulate_grad_batches 2", "--batch-size 8"),
        ("--compile_model", "--compile on"),
        ("--detect_anomaly", "--anomaly on"),
        ("--detect_anomaly False", ""),
        ("--devices 2", "--processes 2"),
        ("--disable_metrics_monitoring", "--monitor off"),
        ("--drop_last False", ""),
        ("--enable_model_summary False", ""),
        ("--fast_detection", "--monitor fast"),
        ("--batch_size 4 --gradient_accumulation_steps 2", "--batch-size 8"),
        ("--limit_val_batches 0.1", "--eval-fraction 0.1"),
        ("--max_sequence_length 100", "--max-length 100"),
        ("--num_workers 12", "--workers 12"),
        ("--persistent_workers", ""),
        ("--persistent_workers True", ""),
        ("--pin_memory", "--pin-memory on"),
        ("--pin_memory True", "--pin-memory on"),
        ("--plot_frequency 1000", "--plot-every 1000"),
        ("--shuffle True", ""),
        ("--sync_batchnorm False", ""),
        ("--update_frequency 100", "--monitor-every 100"),
        ("--use_dynamic_padding", ""),
        ("--val_check_interval 0.1", "--eval-every 0.1ep"),
        ("--val_check_interval 500", "--eval-every 500"),
        ("--verbose False", "--quiet"),
        ("--window_size 50", "--monitor-window 50"),
    ],
}
"""Task -> (a use of words, the same in our flags; nothing where it has no effect).

Words that are flags of the task here, with the same meaning, are not listed.
"""
REFUSED = {
    "causal-lm": {"device_ids 0,1": "--processes says how many GPUs", "strategy dp": "use ddp"},
    "sequence-vae": {"drop_last True": "leave it out", "shuffle False": "leave it out"},
}
"""Task -> word with a value whose meaning cannot be had -> the way out that the refusal names."""
NO_FLAGS = {
    "batch": "short for batch_size, in a sentence",
    "collate_fn": "a Python function: how samples are put together is the data's",
    "epoch": "short for epochs, in a sentence",
    "lora_config": "a Python variable",
    "net": "a Python variable",
    "peft_config": "a Python variable",
    "rank": "LoRA's, in a sentence: --lora-r",
    "requires_grad": "set on parameters in Python: --trainable names the parts that train",
    "trainer": "a Python variable",
    "training_args": "a Python variable",
}
"""Words of the documents that are no settings -> what they are."""


def flags_in(text: str) -> set[str]:
    """Names of flags, wherever they stand in a text."""
    return {name.lower().replace("-", "_") for name in re.findall(r"(?<![\w-])--([A-Za-z_][\w-]*)", text)}


def keywords_in(text: str) -> set[str]:
    """Names that a text gives a value, as in `model.use_cache = True`, `r=8` or `BATCH_SIZE = 64`."""
    names = re.findall(r"(?<![\w-])([A-Za-z_][\w.]*)\s*=(?!=)", text)
    return {name.rpartition(".")[2].lower() for name in names}


def command_lines(text: str) -> list[tuple[str, list[str]]]:
    """(script, its words) of each Python script that a text starts, continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", text)
    started = re.findall(r"^\s*!?(?:python|accelerate launch) (\S+\.py)\b([^\n#]*)", joined, re.M)
    return [(script, words.split()) for script, words in started]


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models and texts that uses of words name, as far as words are checked."""
    configs: dict[str, dict[str, Any]] = {
        "gpt2": {"model_type": "gpt2"},
        "your_model": {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
    }
    for name, config in configs.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "texts.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)


def ask(task: str, words: list[str], command: str = "auto") -> Request:
    return parse_request(["--task", task, *words], command, COMMANDS[command])


USES = [(task, *use) for task, uses in TABLE.items() for use in uses]


@pytest.mark.parametrize(("task", "theirs", "ours"), USES)
def test_a_word_becomes_what_the_table_says(task: str, theirs: str, ours: str) -> None:
    found, same = ask(task, theirs.split()), ask(task, ours.split())
    assert (found.recipe, found.plan, found.run) == (same.recipe, same.plan, same.run)
    for word in flags_in(theirs) - {*SYNONYMS, *known_flags(task), "fast"}:
        assert any(spelling(word) in note for note in found.notes), "it says what it became"


@pytest.mark.parametrize(
    ("task", "use", "way_out"), [(task, *item) for task, words in REFUSED.items() for item in words.items()]
)
def test_a_word_is_refused_with_the_way_out(task: str, use: str, way_out: str) -> None:
    word, _, value = use.partition(" ")
    with pytest.raises(UserError) as refused:
        ask(task, [f"--{word}", value])
    assert str(refused.value).startswith(f"{spelling(word)} {value}: ")
    assert way_out in str(refused.value)


@pytest.mark.parametrize("word", NO_FLAGS)
@pytest.mark.parametrize("task", TABLE)
def test_what_is_no_setting_is_no_flag(task: str, word: str) -> None:
    with pytest.raises(UserError, match=f"{spelling(word)}: auto --task {task} has no such flag"):
        ask(task, [f"--{word}", "1"])


needs_documents = pytest.mark.skipif(not TEXTS, reason=f"the documents do not lie in {DOCUMENTS}")


@needs_documents
@pytest.mark.parametrize("number", ABOUT)
def test_the_table_has_every_word_of_the_documents(number: str) -> None:
    text = TEXTS[number]
    known = {*NO_FLAGS}
    for task in ABOUT[number]:
        uses = [theirs for theirs, _ in TABLE[task]] + [f"--{use}" for use in REFUSED.get(task, {})]
        known |= known_flags(task) | flags_in(" ".join(uses))
    assert sorted((flags_in(text) | keywords_in(text)) - known) == []


@needs_documents
def test_every_document_is_known() -> None:
    assert TEXTS.keys() == ABOUT.keys()
    started = {script for text in TEXTS.values() for script, _ in command_lines(text)}
    assert started == {*SCRIPTS, *OTHER_SCRIPTS}


LINES = {(SCRIPTS[s], " ".join(w)) for text in TEXTS.values() for s, w in command_lines(text) if s in SCRIPTS}


@needs_documents
@pytest.mark.parametrize(("task", "words"), sorted(LINES))
def test_every_command_line_of_the_documents_is_taken(task: str, words: str) -> None:
    taken = {command: ask(task, words.split(), command) for command in COMMANDS}
    for asked in taken.values():
        assert (asked.recipe, asked.plan, asked.run) == (
            taken["auto"].recipe,
            taken["auto"].plan,
            taken["auto"].run,
        )
