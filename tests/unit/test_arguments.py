"""Tests of launch/local/arguments.py: from words to a checked recipe, plan and run options, or one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.core.errors import UserError
from isobatch.core.flags import flags_of
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.registry import LoadedWorkload, workload
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.commands.chat import ChatOptions
from isobatch.launch.local.arguments import BatchScaling, Request, command_options, parse_request, split_words
from isobatch.launch.local.verify_run import VerifyOptions

FLAGS = {
    "recipe": """task mode preset data format model tokenizer revision seed epochs steps phase least_steps
        batch_size max_length lr weight_decay warmup schedule decay decay_shape clip dropout
        optimizer train_fraction eval_fraction eval_every patience min_delta group_by_length
        noise adam_beta1 adam_beta2 adam_eps ema label_smoothing lr_floor order
        shuffle_window on_spike""",
    "scaling": "per_device_batch_size gradient_accumulation_steps",
    "plan": """micro_batch processes workers prefetch pin_memory precision strategy copies compile
        activation_checkpointing attention pack device memory_limit stream_cache""",
    "run": """out name resume again save_every keep checkpoint_copy before log_every tracker ledger hook
        anomaly hang_timeout max_restarts debug quiet""",
    "causal-lm": """lora_r lora_alpha lora_dropout lora_targets lora_scale lora_plus lora_init lora_layers
        lora_experts lora_bias adapter load_bits frozen_dtype also_train generate_tokens
        answers remote_code teacher kd_weight kd_top kd_direction temperature text_column
        template template_kwargs response_only mix clean stride vocab_size data_config valid""",
}


def ask(*words: str) -> Request:
    return parse_request(["--task", "causal-lm", *words], "auto")


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as refused:
        ask(*words)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_new_flag_is_a_decision() -> None:
    found = {
        "recipe": flags_of(Recipe),
        "scaling": flags_of(BatchScaling),
        "plan": flags_of(PlanOptions),
        "run": flags_of(RunOptions),
        "causal-lm": workload("causal-lm").option_flags(),
    }
    assert {group: list(flags) for group, flags in found.items()} == {g: f.split() for g, f in FLAGS.items()}
    names = [name for flags in found.values() for name in flags]
    assert len(names) == len(set(names)), "one word, one meaning"
    assert all(flag.help for flags in found.values() for flag in flags.values())


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--lr=-1"], {"lr": "-1"}),
        (["--lr", "-1e-3"], {"lr": "-1e-3"}),
        (["--name", "a = b"], {"name": "a = b"}),
        (["--data", 'it\'s "my" data/ünï 日本'], {"data": 'it\'s "my" data/ünï 日本'}),
        (["--name", "-"], {"name": "-"}),
        (["--quiet", "--name", "x"], {"quiet": "True", "name": "x"}),
        (["--no-compile"], {"compile": "False"}),
        (["--no-compile=False"], {"compile": "True"}),
    ],
)
def test_words_become_flags(words: list[str], flags: dict[str, str]) -> None:
    assert split_words(words) == ([], flags)


def test_positional_words_are_kept_in_order() -> None:
    """A switch takes no word that is not its own."""
    found = split_words(["runs/a b", "--json", "x", "--watch", "off", "--steps", "3"])
    assert found == (["runs/a b", "x"], {"json": "True", "watch": "off", "steps": "3"})


@pytest.mark.parametrize("word", ["--", "--=3"])
def test_a_lone_dash_pair_is_one_refusal(word: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="what is '--"):
        split_words([word, "--lr", "1"])
    assert capfd.readouterr().err == ""  # Fire would print its usage and leave


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20))
def test_any_value_arrives_as_typed(value: str) -> None:
    assert split_words([f"--name={value}"]) == ([], {"name": value})


@pytest.mark.parametrize(
    ("words", "start", "hint"),
    [
        (
            ["--epohs", "3", "--learning-rat", "1", "--zzz", "1"],
            "--epohs: auto --task causal-lm has no such flag (did you mean --epochs?); --learning-rat: ",
            "(did you mean --learning-rate?); --zzz: ",
        ),
        (["--use-cache"], "--use-cache: ", ""),
        (["--noise"], "--noise: needs a value", ""),
        (["--lr=-1"], "--lr -1: must be at least 0", ""),
        (["--epochs", "2,3"], "--epochs 2.0,3.0: give one number, or one for each of 1 phases", ""),
        (["--phase", "recover"], "--phase recover: this task's phases are train", ""),
        (["--fast", "--mode", "full"], "--mode and --fast say the same thing", ""),
        (["--batch-size", "8", "--per-device-batch-size", "4"], "--per-device-batch-size and --batch", ""),
        (["--batch-size", "1", "--batch_size=2"], "--batch-size is given twice", ""),
        (["--batch-size", "--quiet"], "--batch-size: needs a value", ""),
        (["--num-epochs"], "--epochs: needs a value", ""),
    ],
)
def test_one_line_names_the_flag_the_value_and_the_way_out(words: list[str], start: str, hint: str) -> None:
    message = refusal(*words)
    assert message.startswith(start)
    assert hint in message


@pytest.mark.parametrize("words", [["--lr", "1"], ["--task"], ["--task", "--quiet"]])
def test_a_task_is_needed(words: list[str]) -> None:
    with pytest.raises(UserError, match="needs --task NAME"):
        parse_request(words, "auto")


@pytest.mark.parametrize("word", ["--resume", "--resume_from_checkpoint"])
def test_a_run_to_go_on_with_needs_no_task(word: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"isobatch resume {tmp_path}` goes on"):
        parse_request([word, str(tmp_path)], "auto")
    with pytest.raises(UserError, match="`describe` lists them"):
        parse_request([word, "auto"], "auto")


def test_fast_mode_changes_the_recipe_and_says_how() -> None:
    fast, full = ask("--fast").recipe, ask().recipe
    changed = {f.name for f in dataclasses.fields(Recipe) if getattr(fast, f.name) != getattr(full, f.name)}
    note = next(n for n in ask("--fast").notes if n.startswith("fast mode changes the recipe: "))
    # The demo is as short as fast mode makes texts, so the length is named but stays.
    assert changed == {"mode", "train_fraction", "eval_fraction"}
    assert note.endswith(
        "max_length 128, train_fraction 0.25, eval_fraction 0.25"
    )  # no patience: no min_delta
    assert "train_fraction" not in " ".join(ask("--fast", "--train-fraction", "0.5").notes)
    assert (ask("--fast").plan, ask("--fast").run) == (ask().plan, ask().run)


def test_the_demo_is_announced(tmp_path: Path) -> None:
    assert "no --data given: causal-lm runs its embedded demo" in ask().notes
    assert "--data demo: causal-lm runs its embedded demo" in ask("--data", "demo").notes
    text = tmp_path / "it's a text 日本.txt"
    text.write_text("words")
    own = ask("--data", str(text), "--model", "tiny")
    assert (own.recipe.data, own.notes) == (str(text), [])


OWN = Path(__file__).parents[1] / "tasks" / "failing.py"


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        ("nofile.py", "there is no file .*nofile.py"),
        ("nofile.py:Line", "there is no file .*nofile.py"),
        (str(OWN), "which class\\? Write .*failing.py:Class; found: Line, Slow"),
        (f"{OWN}:", "which class\\?"),
        (f"{OWN}:Lin", r"no Task called Lin there \(did you mean Line\?\)"),
    ],
)
def test_of_file_and_class_the_wrong_one_is_named(place: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        parse_request(["--task", place], "auto")


class Layered(workload("causal-lm").task):  # type: ignore[misc]
    """A value of its own in every layer; the later layer is the stronger."""

    defaults = {"lr": 1.0, "clip": 1.0, "warmup": "1", "weight_decay": 1.0, "epochs": 1.0, "model": "tiny"}
    demo = {"lr": 2.0, "clip": 2.0, "warmup": "2", "weight_decay": 2.0}
    presets = {"p": {"lr": 3.0, "clip": 3.0, "warmup": "3"}}
    fast = {"lr": 4.0, "clip": 4.0, "steps": 7}


def layered(**asked: Any) -> Recipe:
    return LoadedWorkload("causal-lm", Layered, workload("causal-lm").data).complete(asked)[0]


def test_the_later_layer_wins() -> None:
    recipe = layered(preset="p", mode="fast", lr=5.0)
    found = (recipe.max_length, recipe.weight_decay, recipe.warmup.value, recipe.clip, recipe.lr)
    assert found == (128, 2.0, 3.0, 4.0, 5.0)  # the common default, demo, preset, fast, the user
    assert layered(data="x.txt").weight_decay == 1.0  # the task's default; no demo
    assert layered(data="x.txt", preset="p").lr == 3.0


def test_steps_in_a_later_layer_take_the_place_of_epochs() -> None:
    assert (layered().epochs, layered().steps) == ((1.0,), None)
    assert (layered(mode="fast").epochs, layered(mode="fast").steps) == (None, (7,))
    again = layered(mode="fast", epochs=(2.0,))
    assert (again.epochs, again.steps) == ((2.0,), None)


def test_plan_and_run_flags_do_not_change_the_recipe() -> None:
    asked = ask("--precision", "bf16-mixed", "--no-compile", "--quiet", "--out", "a b", "--num-workers", "0")
    assert asked.recipe == ask().recipe
    assert (asked.plan.precision, asked.plan.compile, asked.plan.workers) == ("bf16-mixed", "off", 0)
    assert (asked.run.quiet, asked.run.out) == (True, "a b")


def test_a_command_of_its_own_refuses_what_it_does_not_know() -> None:
    assert command_options({"devices": "3", "bf16": "True"}, PlanOptions, "resume") == PlanOptions(
        processes=3, precision="bf16"
    )
    with pytest.raises(UserError, match="--processes and --devices say the same thing"):
        command_options({"devices": "3", "processes": "2"}, PlanOptions, "resume")
    with pytest.raises(UserError, match=r"--learning-rate: resume has no such flag"):
        command_options({"learning_rate": "3"}, PlanOptions, "resume")


@pytest.mark.parametrize(
    ("flags", "kind", "answer"),
    [
        ({"against": "p"}, VerifyOptions, "--against: it has no such flag (taken out: run `isobatch"),
        (
            {"compare_bits": "True", "zzz": "1"},
            ChatOptions,
            "--compare-bits: it has no such flag (taken out: run it with --load-bits",
        ),
    ],
)
def test_a_flag_that_was_taken_out_says_what_to_use(flags: dict[str, str], kind: type, answer: str) -> None:
    with pytest.raises(UserError) as refused:
        command_options(flags, kind, "it")
    assert str(refused.value).startswith(answer)
