"""Tests of presets: values of the recipe, and below the user's own flags of the plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import isobatch
from isobatch.core.errors import UserError
from isobatch.core.plan import Plan, PlanOptions
from isobatch.engine.planning.choices import unmet_wishes
from isobatch.launch.clusters.slurm.options import SlurmOptions
from isobatch.launch.commands.plan import PlanCommandOptions
from isobatch.launch.local.arguments import Request, parse_request
from isobatch.launch.local.options import AutoOptions
from isobatch.launch.local.run_setup import plan_options_from_request
from isobatch.tests.paths import ROOT

TASK = f"{ROOT}/tests/tasks/preset.py:Line"
COMMANDS: dict[str, type | None] = {
    "auto": AutoOptions,
    "plan": PlanCommandOptions,
    "slurm": SlurmOptions,
    "train.py": None,
}


def ask(*words: str, preset: str = "quick", command: str = "auto") -> Request:
    return parse_request(["--task", TASK, "--preset", preset, *words], command, COMMANDS[command])


def planned(**asked: Any) -> Plan:
    return isobatch.plan(isobatch.Recipe(TASK, preset="quick"), hardware="cpu:2x8gb", **asked)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_asks_the_plan_for_what_the_preset_names(command: str) -> None:
    asked = ask(command=command)
    assert asked.plan == PlanOptions(precision="16-mixed", workers=1, prefetch=4)
    assert asked.plan.preset_options == dict.fromkeys(("precision", "workers", "prefetch"), "quick")
    assert asked.recipe.lr == 0.02


def test_values_of_the_plan_are_no_part_of_the_recipe() -> None:
    quick, plain = ask().recipe, ask(preset="plain").recipe
    assert dataclasses.replace(quick, preset="plain") == plain
    assert dataclasses.replace(quick, preset="plain").hash() == plain.hash()
    assert not {"precision", "workers", "prefetch"} & (quick.to_dict().keys() | quick.options.keys())
    assert quick == ask("--workers", "0").recipe


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--workers 0", "workers", 0),
        ("--num-workers 3", "workers", 3),
        ("--workers none", "workers", None),
        ("--precision auto", "precision", "auto"),
        ("--use_amp False", "precision", "fp32"),
    ],
)
def test_the_users_own_flags_come_first(words: str, field: str, value: Any) -> None:
    asked = ask(*words.split()).plan
    assert getattr(asked, field) == value
    assert field not in asked.preset_options
    assert asked.prefetch == 4  # the others stay the preset's


def test_the_plan_says_who_asks() -> None:
    plan = planned(prefetch=3)
    assert (plan.workers, plan.reasons["workers"]) == (1, "the preset quick asks for it")
    assert (plan.prefetch, plan.reasons["prefetch"]) == (3, "you asked for it")


def test_a_presets_mixed_precision_is_a_wish() -> None:
    assert (planned().precision, planned().reasons["precision"]) == (
        "fp32",
        "fp16 needs a GPU, so this is fp32",
    )
    lines = unmet_wishes(ask().plan, planned())
    assert lines == ["the preset quick, --precision 16-mixed: fp16 needs a GPU, so this is fp32"]
    here = isobatch.Recipe(TASK, preset="strict")
    with pytest.raises(UserError, match="--precision fp16: fp16 needs a GPU"):
        isobatch.plan(here, hardware="cpu:2x8gb")


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("misspelt", "sets wokers, which no recipe or plan has"),
        ("wrong", "--workers many: is not an integer"),
        ("quik", r"--preset quik: valid for .*: quick, plain, .*\(did you mean quick\?\)"),
    ],
)
def test_a_wrong_preset_is_one_line(preset: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ask(preset=preset)


def test_a_job_knows_what_its_preset_asked() -> None:
    from isobatch.core.flags import options_to_dict

    asked = ask("--prefetch", "2").plan
    again = plan_options_from_request(options_to_dict(asked))
    assert (again, again.preset_options) == (asked, asked.preset_options)
    assert options_to_dict(PlanOptions(workers=1))["preset_options"] == {}
