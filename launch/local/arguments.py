"""From the words on the command line to a recipe, plan options and run options, all checked.

Fire splits the words; every name and value is then checked against the dataclasses, before anything heavy
is imported and before anything runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core import number_ranges
from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue, Flag, build_options, convert, flags_of, nearest_hint
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.optimization.schedule import phase_schedules
from isobatch.engine.registry import Workload, workload
from isobatch.engine.runs.run_options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SYNONYMS = {
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "learning_rate": "lr",
    "warmup_steps": "warmup",
    "lr_scheduler_type": "schedule",
    "max_grad_norm": "clip",
    "num_workers": "workers",
    "dataloader_num_workers": "workers",
    "max_sequence_length": "max_length",
    "max_seq_length": "max_length",
    "block_size": "max_length",
    "devices": "processes",
    "num_processes": "processes",
    "mixed_precision": "precision",
    "compile_model": "compile",
    "torch_compile": "compile",
    "gradient_checkpointing": "activation_checkpointing",
    "output_dir": "out",
    "report_to": "tracker",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "early_stopping_patience": "patience",
    "model_name_or_path": "model",
    "text_model": "model",
    "dataset": "data",
    "pruned_model_path": "pruned",
    "trust_remote_code": "remote_code",
    "per_device_train_batch_size": "per_device_batch_size",
}
"""Flags of other tools -> our flag."""
SWITCHES: dict[str, dict[str, str]] = {
    "fast": {"mode": "fast"},
    "full": {"mode": "full"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "load_in_8bit": {"load_bits": "8"},
    "load_in_4bit": {"load_bits": "4"},
    "fast_detection": {"monitor": "fast"},
    "disable_metrics_monitoring": {"monitor": "off"},
    "use_dynamic_padding": {},
    "use_cache": {"text_cache": "on"},
}
"""Switches of other tools -> our flags and values. Padding is always dynamic, whatever its switch says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchScaling:
    """Flags that change the global batch of the recipe."""

    scale_batch: number_ranges.Rate | None = None
    """Train with this many times the global batch: a NEW recipe, which says what it was scaled from."""
    lr_rule: Literal["sqrt", "linear", "none"] = "sqrt"
    """How the learning rate follows a scaled batch: sqrt, linear or none."""
    per_device_batch_size: number_ranges.Positive | None = None
    """With --gradient-accumulation-steps and --processes: the global batch in other tools' words."""
    gradient_accumulation_steps: number_ranges.Positive | None = None
    """See --per-device-batch-size."""


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed and checked command line: the recipe, and options of the plan and of the run."""

    workload: Workload
    recipe: Recipe
    plan: PlanOptions
    run: RunOptions
    extra: dict[str, Any]
    """The command's own flags."""
    notes: list[str]
    """Lines for the user on values that were derived, such as those of a preset."""


def split_words(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Positional words, and flags by name with `_` for `-`, all values as text. Raises UserError.

    Fire reads --a b, --a=b and --no-a.
    """
    import fire

    if malformed := [word for word in words if word == "--" or word.startswith("--=")]:
        raise UserError(f"what is {malformed[0]!r}? A flag is --name value or --name=value")
    written = _flags_as_written(words)
    if repeated := [name for name, count in Counter(name for name, _ in written).items() if count > 1]:
        raise UserError(f"{_spell(repeated[0])} is given twice: give it once")
    found: dict[str, Any] = {}

    @fire.decorators.SetParseFn(str)
    def collect(*positional: str, **flags: str) -> None:
        found.update(positional=positional, flags=flags)

    # By default Fire splits the words at a lone "-" into several calls.
    fire.Fire(collect, command=[*words, "--", "--separator=\x00"], name="isobatch")
    flags = {}
    for name, value in found["flags"].items():
        key = name.replace("-", "_")
        if key.startswith("_"):  # Fire has removed the "no" of --no-compile
            flags[key[1:]] = "False"
        elif key.startswith("no_") and value in ("True", "False"):
            flags[key[3:]] = "False" if value == "True" else "True"
        else:
            flags[key] = value if dict(written).get(key, True) else BareValue(value)
    return list(found["positional"]), flags


def _flags_as_written(words: Sequence[str]) -> list[tuple[str, bool]]:
    """(name without a leading no, whether it has a value) of each flag; flags are what Fire takes for one."""
    is_flag = [word.startswith("--") or bool(re.match("-[a-zA-Z]", word)) for word in words] + [True]
    found = []
    for position, word in enumerate(words):
        if is_flag[position]:
            valued = "=" in word or not is_flag[position + 1]
            name = word.lstrip("-").partition("=")[0].replace("-", "_")
            found.append((re.sub("^no_" if valued else "^no_?", "", name), valued))
    return found


def command_options(flags: Mapping[str, str], kind: type, command: str) -> Any:
    """Options of a command without a recipe, as an instance of the dataclass `kind`. Raises UserError."""
    renamed, typed, _ = _translate(flags)
    _refuse_unknown(typed, flags_of(kind, command), command)
    return build_options(kind, renamed, command)


def task_name(words: Sequence[str]) -> str:
    """The value of --task in lower case; empty where there is none."""
    return split_words(words)[1].get("task", "").replace("_", "-").lower()


def known_flags(task: str) -> set[str]:
    """Names of all flags that `auto` takes for a task, without those of AutoOptions."""
    return {name for names in _groups(workload(task), "auto", None).values() for name in names}


def parse_request(words: Sequence[str], command: str, options_class: type | None = None) -> Request:
    """Parse and check the words of a command that needs a recipe; no torch is imported.

    `options_class`: dataclass of the command's own flags, for `Request.extra`. Raises UserError.
    """
    positional, flags = split_words(words)
    if positional:
        raise UserError(
            f"{command}: what is {positional[0]!r}? Flags start with --; a value with spaces needs quotes"
        )
    if isinstance(flags.get("task", BareValue()), BareValue):
        raise UserError(f"{command}: needs --task NAME (`tasks` lists them)")
    chosen = workload(flags["task"])
    flags, typed, notes = _translate(flags)
    groups = _groups(chosen, command, options_class)
    known = {name: group for group, names in groups.items() for name in names}
    _refuse_unknown(typed, known, f"{command} --task {chosen.name}")
    if "gradient_accumulation_steps" in flags and "per_device_batch_size" not in flags:
        raise UserError(
            "--gradient-accumulation-steps: the batch is global here and the plan accumulates as it needs;"
            " with --per-device-batch-size it names a global batch"
        )
    if "per_device_batch_size" in flags and "batch_size" in flags:
        raise UserError(
            "--per-device-batch-size and --batch-size both say how large a batch is: give one of them"
        )
    values = {
        group: {k: convert(known_flags[k], v) for k, v in flags.items() if k in known_flags}
        for group, known_flags in groups.items()
    }
    plan = PlanOptions(**values["plan"])
    recipe, preset_notes = chosen.complete({**values["recipe"], **values["options"]})
    recipe = _with_batch_scaling(recipe, BatchScaling(**values["scaling"]), plan)
    request = Request(
        chosen, recipe, plan, RunOptions(**values["run"]), values["command"], notes + preset_notes
    )
    check_request(request)
    return request


def check_request(request: Request) -> None:
    """Checks of the task, its data and the tracker that need no torch. Raises UserError."""
    task, data = request.workload.make(request.recipe)
    task.check()
    data.check()
    _check_tracker(request.run.tracker)
    # Checks --phase, and that --epochs has one number or one per phase.
    phase_schedules(request.recipe, task.phases(), steps_per_epoch=1)


def _check_tracker(name: str) -> None:
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(f"--tracker {name} needs: pip install {name}")


def _groups(chosen: Workload, command: str, options_class: type | None) -> dict[str, dict[str, Flag]]:
    return {
        "recipe": flags_of(Recipe, "recipe"),
        "options": chosen.option_flags(),
        "plan": flags_of(PlanOptions, "plan"),
        "run": flags_of(RunOptions, "run"),
        "scaling": flags_of(BatchScaling, "recipe"),
        "command": flags_of(options_class, command) if options_class else {},
    }


def _translate(flags: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Our name -> value, our name -> the name that was typed, and notes on flags without effect."""
    out: dict[str, str] = {}
    typed: dict[str, str] = {}
    notes = []
    for name, value in flags.items():
        meaning = _expand_flag(name, value)
        if name in SWITCHES and not SWITCHES[name]:
            notes.append(f"{_spell(name)} has no effect: it is always so here")
        for key, meaning_value in meaning.items():
            if key in typed:
                raise UserError(
                    f"{_spell(name)} and {_spell(typed[key])} say the same thing: give one of them"
                )
            out[key], typed[key] = meaning_value, name
    return out, typed, notes


def _expand_flag(name: str, value: str) -> dict[str, str]:
    if name not in SWITCHES:
        return {SYNONYMS.get(name, name): value}
    return SWITCHES[name] if convert(Flag(name, bool, False, "", ""), value) else {}


def _refuse_unknown(typed: Mapping[str, str], known: Mapping[str, Any], where: str) -> None:
    """Raises UserError for unknown names. `typed`: our name -> the name that was typed."""
    for name, word in typed.items():
        if name not in known:
            if f"no{name}" in known:  # Fire reads --noise without a value as "no ise"
                raise UserError(f"{_spell('no' + name)}: needs a value")
            synonyms = [k for k, v in SYNONYMS.items() if v in known]
            synonyms += [k for k, v in SWITCHES.items() if all(n in known for n in v)]
            hint = nearest_hint(_spell(word), [_spell(k) for k in (*known, *synonyms)])
            raise UserError(f"{_spell(word)}: {where} has no such flag{hint}")


def _spell(name: str) -> str:
    return "--" + name.replace("_", "-")


def _with_batch_scaling(recipe: Recipe, scaling: BatchScaling, plan: PlanOptions) -> Recipe:
    if scaling.per_device_batch_size or scaling.gradient_accumulation_steps:
        rows = scaling.per_device_batch_size or recipe.batch_size
        batch = rows * (scaling.gradient_accumulation_steps or 1) * (plan.processes or 1)
        recipe = dataclasses.replace(recipe, batch_size=batch)
    if scaling.scale_batch is None:
        return recipe
    return recipe.scaled(scaling.scale_batch, scaling.lr_rule)
