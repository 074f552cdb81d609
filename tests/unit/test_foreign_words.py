"""Tests of launch/local/words.py: words of other tools become ours, or are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.flags import flags_of
from isobatch.launch.clusters.kubernetes.job import KubernetesOptions
from isobatch.launch.clusters.ray.driver import RayOptions
from isobatch.launch.clusters.slurm.options import SlurmOptions
from isobatch.launch.commands.chat import ChatOptions
from isobatch.launch.commands.evaluate import EvaluateOptions, evaluate
from isobatch.launch.commands.export import ExportOptions
from isobatch.launch.local.arguments import Request, known_flags, parse_request
from isobatch.launch.local.words import OF_CLUSTERS, SYNONYMS, VALUES, WORDS, translate
from isobatch.launch.predicting.predict import PredictOptions
from isobatch.launch.predicting.recommend import RecommendOptions
from isobatch.launch.report.page import ReportOptions

if TYPE_CHECKING:
    from pathlib import Path

TASKS = ("causal-lm", "dpo", "orpo", "classifier", "pruning", "qat", "recommender", "sequence-vae")


def ask(*words: str, task: str = "causal-lm") -> Request:
    return parse_request(["--task", task, *words], "auto")


def both(asked: Request) -> tuple[Any, ...]:
    return asked.recipe, asked.plan, asked.run


def lines(*words: str, task: str = "causal-lm") -> list[str]:
    """The notes that these words add."""
    usual = ask(task=task).notes
    return [note for note in ask(*words, task=task).notes if note not in usual]


def refusal(*words: str, task: str = "causal-lm") -> str:
    with pytest.raises(UserError) as refused:
        ask(*words, task=task)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    "text", ["loguniform:1e-4,1e-2", "log_uniform(1e-4, 1e-2)", "tag(log, interval(1e-4, 1e-2))"]
)
def test_a_range_of_other_tools_is_answered_with_ours(text: str) -> None:
    assert "a range is --lr 1e-4..1e-2 --trials 8" in refusal("--lr", text)
    assert "a range" not in refusal("--lr", "fast")


def test_held_out_data_is_understood_however_its_flag_is_called(tmp_path: Path) -> None:
    (rows := tmp_path / "rows.csv").write_text("text,label\na,b\n")
    of_evaluate = flags_of(EvaluateOptions)
    assert translate({"validation": "0.3"}, known_flags("classifier")).flags == {"valid": "0.3"}
    assert translate({"file": "rows.csv"}, of_evaluate).flags == {"test": "rows.csv"}
    assert translate({"file": "rows.csv"}, flags_of(PredictOptions)).flags == {"file": "rows.csv"}
    with pytest.raises(UserError, match=f"a file of samples is given as --test {rows}"):
        evaluate(["runs/one", str(rows)])


@pytest.mark.parametrize(
    ("word", "options", "ours"),
    [("p", ChatOptions, "prompt"), ("out", ReportOptions, "to"), ("format", ExportOptions, "to")],
)
def test_what_a_command_calls_otherwise_is_understood(word: str, options: type, ours: str) -> None:
    assert translate({word: "x"}, flags_of(options)).flags == {ours: "x"}


def test_chat_is_understood_as_the_task_that_learns_to() -> None:
    assert ask(task="chat").workload.name == "causal-lm"
    assert lines(task="chat") == []


NAMES = {"learning_rate": "0.5", "num_epochs": "3", "max_seq_length": "3", "output_dir": "x", "gpus": "3"}


@pytest.mark.parametrize(("word", "value"), NAMES.items())
def test_another_name_for_the_same_value_says_nothing(word: str, value: str) -> None:
    theirs, ours = ask(f"--{word}", value), ask(f"--{SYNONYMS[word].replace('_', '-')}", value)
    assert both(theirs) == both(ours) == both(ask(f"--{word.replace('_', '-')}={value}"))
    assert both(theirs) != both(ask())
    assert theirs.notes == ours.notes


def spelled(words: str) -> str:
    """Flags as messages spell them."""
    return " ".join(w.replace("_", "-") if w.startswith("--") else w for w in words.split())


BECOMES = [
    ("--warmup_ratio 0.125", "--warmup 12.5%", ""),
    ("--val-check-interval 500", "--eval-every 500", "in optimizer steps"),
    ("--strategy deepspeed_stage_2", "--strategy zero2", ""),
    ("--optim adamw_bnb_8bit", "--optimizer adamw8bit", ""),
    ("--load_best_model_at_end", "--patience 9999", "it keeps the best"),
    ("--attn_implementation eager", "--attention eager", ""),
    ("--fast_dev_run", "--steps 3", ""),
    ("--array 4", "--seed 4", ""),
    ("--resume_from_checkpoint false", "--resume never", ""),
]
"""Words, the same in our flags, and what is said beside."""
NO_EFFECT = [
    "--overwrite_output_dir",
    "--resume_from_checkpoint",
    "--devices auto",
    "--do_train",
    "--eval_strategy steps",
]
REFUSED = [
    ("--resume_from_checkpoint runs/a/checkpoint-500", "`resume RUN`"),
    ("--wandb_project thesis", "--tracker wandb"),
    ("--tf32 true", "--precision bf16"),
    ("--report_to all", "give one: tensorboard"),
    ("--gres gpu:8", "`slurm --gpus-per-node 8`"),
    ("--gpus-per-node h100:8", "`plan --hardware 2x8xh100`"),
    ("--time 12", "`slurm --time 12:00:00`"),
    ("--assume-samples 1e6", "`plan` takes it"),
    ("--pdf", "`report RUN`"),
    ("--limit_val_batches few", "has no meaning here"),
    ("--val_check_interval", "needs a value"),
    ("--fsdp full_shard", "fsdp2"),
    ("--all", "`recommend RUN --out FILE` gives the lists of all users"),
    ("--freeze_gpt2", "--freeze-gpt2: auto --task causal-lm has no such flag"),
]


BROUGHT = """
    output_dir=x overwrite_output_dir=true do_train=true do_eval=true eval_strategy=epoch
    per_device_train_batch_size=4 per_device_eval_batch_size=4 gradient_accumulation_steps=2
    learning_rate=1e-4 adam_epsilon=1e-8 max_grad_norm=1 num_train_epochs=3 max_steps=10
    lr_scheduler_type=cosine warmup_ratio=0.1 warmup_steps=10 logging_steps=10 save_steps=100
    save_total_limit=2 bf16=true local_rank=-1 dataloader_num_workers=2 dataloader_drop_last=false
    remove_unused_columns=false run_name=x label_smoothing_factor=0.1 optim=adamw_torch report_to=none
    gradient_checkpointing=true auto_find_batch_size=true max_seq_length=128 attn_implementation=sdpa
    base_model=small datasets=demo sequence_len=128 micro_batch_size=2 num_epochs=3 cutoff_len=128
    max_epochs=3 devices=2 strategy=ddp accumulate_grad_batches=2 gradient_clip_val=1
    val_check_interval=0.5 fast_dev_run=true log_every_n_steps=10 gpus=2 num_labels=3
"""
"""Flags most brought from other tools that are taken."""


@pytest.mark.parametrize("word", BROUGHT.split())
def test_what_users_bring_is_taken(word: str) -> None:
    ask(f"--{word}")


@pytest.mark.parametrize("word", ["--depth", "--foo", "--rank", "--zero"])
def test_a_word_like_none_gets_no_wrong_hint(word: str) -> None:
    assert "did you mean" not in refusal(word, "3")


@pytest.mark.parametrize(("words", "ours", "remark"), BECOMES)
def test_a_word_becomes_ours_and_says_so(words: str, ours: str, remark: str) -> None:
    assert both(ask(*words.split())) == both(ask(*ours.split()))
    assert both(ask(*words.split())) != both(ask())
    assert lines(*words.split()) == [f"{spelled(words)} is {ours}" + (f": {remark}" if remark else "")]


@pytest.mark.parametrize("words", NO_EFFECT)
def test_a_word_without_effect_says_why(words: str) -> None:
    assert both(ask(*words.split())) == both(ask())
    (line,) = lines(*words.split())
    assert line.startswith(f"{spelled(words)} has no effect: ")


@pytest.mark.parametrize(("words", "way_out"), REFUSED)
def test_what_cannot_be_had_is_one_line_with_the_way_out(words: str, way_out: str) -> None:
    message = refusal(*words.split())
    assert message.startswith(spelled(words))
    assert way_out in message


@pytest.mark.parametrize("kind", [SlurmOptions, KubernetesOptions, RayOptions])
def test_a_dry_run_of_a_cluster_submits_nothing(kind: type) -> None:
    words = ["--task", "causal-lm", "--cpu", "--dry-run"]
    request = parse_request(words, "submit", kind)
    assert request.extra["submit"] is False
    assert request.notes[0] == "--dry-run is --submit off: it is only printed"
    with pytest.raises(UserError, match="--submit and --dry-run say the same thing"):
        parse_request([*words, "--submit"], "submit", kind)


def test_switches_of_other_tools() -> None:
    assert ask("--fast").recipe == ask("--mode", "fast").recipe
    assert ask("--full").recipe == ask("--mode", "full").recipe == ask().recipe
    assert ask("--fast", "off").recipe == ask("--no-fast").recipe == ask().recipe
    assert ask("--bf16").plan == ask("--precision", "bf16").plan
    assert ask("--fp32").plan == ask("--precision", "fp32").plan
    assert ask("--nproc", "2").plan == ask("--processes", "2").plan
    assert (ask("--fp16").plan.precision, ask("--no-fp16").plan.precision) == ("fp16", "auto")
    assert lines("--fp16") == lines("--full") == lines("--no-fast") == []
    for bits in (8, 4):
        assert refusal(f"--load-in-{bits}bit").startswith(f"--load-bits {bits}: rounded weights cannot train")
    for name in ("fast_detection", "disable_metrics_monitoring", "use_cache"):
        assert refusal(f"--{name}").startswith(f"--{name.replace('_', '-')}: ")  # the word that was typed


def test_a_global_batch_in_other_tools_words() -> None:
    words = ["--per-device-batch-size", "4", "--gradient-accumulation-steps", "3", "--processes", "2"]
    assert ask(*words).recipe.batch_size == 24  # 4 * 3 * 2
    assert lines(*words) == [
        "--per-device-batch-size 4 x --gradient-accumulation-steps 3 x --processes 2 is a global batch of 24,"
        " on any number of processes"
    ]
    assert ask(*words[:4]).recipe.batch_size == 12  # 4 * 3 on as many processes as there are
    assert ask("--per-device-train-batch-size", "4").recipe.batch_size == 4
    assert ask("--processes", "2").recipe == ask().recipe  # the plan alone changes no recipe


def test_with_accumulation_alone_the_batch_is_that_of_a_step() -> None:
    words = ["--batch-size", "4", "--accumulate-grad-batches", "2"]
    assert both(ask(*words)) == both(ask("--batch-size", "8"))
    line = (
        "--batch-size 4 x --gradient-accumulation-steps 2 is a global batch of 8, on any number of processes"
    )
    assert lines(*words) == [line]
    # On more processes it is the same: --batch-size is global.
    assert ask(*words, "--devices", "2").recipe == ask("--batch-size", "8").recipe
    alone = ask("--gradient-accumulation-steps", "4")
    assert alone.recipe.batch_size == 4 * ask().recipe.batch_size
    assert alone.notes[-1].startswith("--batch-size 16 x --gradient-accumulation-steps 4 is a")


def test_a_list_as_python_writes_it_is_a_list() -> None:
    for written in ("['c_attn', 'c_proj']", '["c_attn","c_proj"]', "(c_attn, c_proj)", "c_attn,c_proj"):
        found = translate({"target_modules": written}, {"lora_targets"})
        assert found.flags == {"lora_targets": "c_attn,c_proj"}


OWN = """
from dataclasses import dataclass
from isobatch.tests.tasks import failing


@dataclass(frozen=True)
class Words:
    r: int = 1
    bias: str = "none"
    dataset: str = "mine"


class Line(failing.Line):
    Options = Words
"""


def test_a_flag_of_the_task_comes_before_a_word_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    asked = ask("--r", "3", "--bias", "all", "--dataset", "other", task=f"{tmp_path / 'own.py'}:Line")
    assert (asked.recipe.options["r"], asked.recipe.options["bias"]) == (3, "all")
    assert (asked.recipe.options["dataset"], asked.recipe.data) == ("other", "demo")
    assert asked.notes == []


def test_every_word_stands_for_flags_that_a_task_has() -> None:
    known = set().union(*map(known_flags, TASKS))
    assert {*SYNONYMS.values()} | VALUES.keys() <= known | {"mode"} | flags_of(SlurmOptions).keys()
    assert not known & {*SYNONYMS, *WORDS}, "a word that is a flag of ours"


@pytest.mark.parametrize(
    ("word", "ours"),
    [("customer", "user"), ("basket", "items"), ("n", "top"), ("k", "top"), ("top_n", "top")],
)
def test_words_of_shops_ask_for_lists(word: str, ours: str) -> None:
    assert translate({word: "7"}, flags_of(RecommendOptions)).flags == {ours: "7"}


def test_fast_mode_names_no_batch_that_another_flag_decides() -> None:
    notes = ask("--fast", "--per_device_train_batch_size", "8", task="classifier").notes
    assert any(note.startswith("fast mode changes") for note in notes)
    assert not any("batch_size 64" in note for note in notes)


CLUSTERS = {"partition": SlurmOptions, "claim": KubernetesOptions, "ray_workers": RayOptions}
CLUSTERS |= {"private": ExportOptions}
SHORT = {"partition": "ABCDFGHIJLMNOQSWabcdekmnopqstvwx", "claim": "efilnov", "ray_workers": "Na"}
SHORT |= {"private": ""}
"""The letters that sbatch, kubectl and ray take, and those of their users."""


def test_each_cluster_has_words_of_its_own() -> None:
    assert OF_CLUSTERS.keys() == CLUSTERS.keys()
    for flag, words in OF_CLUSTERS.items():
        own = flags_of(CLUSTERS[flag]).keys()
        assert not own & words.keys(), "a word that is a flag of ours"
        assert {*SHORT[flag]} <= words.keys()
        rules = [rule for forms in words.values() for rule in forms.values() if rule[0] not in "!#"]
        assert {rule.split()[0] for rule in rules} <= own | known_flags("causal-lm")


@pytest.mark.parametrize(("flag", "word"), [(flag, word) for flag in CLUSTERS for word in OF_CLUSTERS[flag]])
def test_a_flag_of_a_clusters_own_tools_is_understood_or_has_a_way_out(flag: str, word: str) -> None:
    own = {*flags_of(CLUSTERS[flag]), *known_flags("causal-lm")}
    found = translate({word: "7"}, own)
    assert found.flags.keys() <= own, "else it is said that there is no such flag"
    assert all(f"{'--' if word[1:] else '-'}{word.replace('_', '-')} 7: " in wrong for wrong in found.wrong)
    assert len(found.flags) + len(found.wrong) + len(found.notes) > 0


def test_a_letter_may_have_its_number_behind_it() -> None:
    own = flags_of(SlurmOptions)
    with pytest.raises(UserError, match="-n 4: --nodes 2"):
        parse_request(["--task", "causal-lm", "-n4", "--cpu"], "slurm", SlurmOptions)
    asked = parse_request(["--task", "causal-lm", "-N2", "-p", "gpu"], "slurm", SlurmOptions)
    assert (asked.extra["nodes"], asked.extra["partition"], "p" in own) == (2, "gpu", False)
    assert {"-N 2 is --nodes 2", "-p gpu is --partition gpu"} <= {*asked.notes}
