"""From the words on the command line to a recipe, plan options and run options, all checked.

Fire splits the words; every name and value is then checked against the dataclasses, before anything heavy
is imported and before anything runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import keyword
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core import number_ranges
from isobatch.core.errors import UserError
from isobatch.core.flags import SWITCH_WORDS, BareValue, Flag, convert, flags_of, nearest
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.optimization.schedule import phase_schedules
from isobatch.engine.registry import Workload, workload
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.local.words.config_files import config_text, flags_of_files, join
from isobatch.launch.local.words.foreign_words import our_name, translate, words_for
from isobatch.launch.local.words.meanings import spelling
from isobatch.launch.local.words.other_tools import ELSEWHERE, SYNONYMS
from isobatch.launch.local.words.sweeps import combinations

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


SWITCHES = ("json", "png", "trust", "now", "follow", "watch", "quiet", "again", "debug", "yes")
"""Flags that are on or off in every command that has them: what stands behind one is a word of its own."""


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
    """Multiplies the batch: --per-device-batch-size, or --batch-size, which then is the batch of one of so
    many steps. (The plan accumulates as it needs, whatever is asked.)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagFiles:
    """Flags that name a file of flags; those on the command line come before its own."""

    config: str | None = None
    """A YAML or JSON file of flags, as --dump-config prints; a run's recipe.json is one."""
    like: str | None = None
    """A run, whose recipe is taken."""
    from_: str | None = None
    """A run, whose recipe is taken and with whose trained weights this one begins: a NEW recipe, which says
    what it came from."""


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

    words = _switched_on(words)
    if malformed := [word for word in words if word == "--" or word.startswith("--=")]:
        raise UserError(f"what is {malformed[0]!r}? A flag is --name value or --name=value")
    written = _flags_as_written(words)
    if repeated := [name for name, count in Counter(name for name, _ in written).items() if count > 1]:
        raise UserError(f"{spelling(repeated[0])} is given twice: give it once")
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


def _switched_on(words: Sequence[str]) -> list[str]:
    """The words with `=True` behind each switch that stands before something that is no value of it."""
    return [
        f"{word}=True"
        if word[:2] == "--" and word[2:] in SWITCHES and after.lower() not in SWITCH_WORDS
        else word
        for word, after in zip(words, [*words[1:], ""], strict=False)
    ]


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


@dataclass(frozen=True, slots=True)
class SortedFlags:
    """Flags in our words, checked and divided among the dataclasses that declare them."""

    values: dict[str, dict[str, Any]]
    """Group -> name -> value."""
    written: dict[str, str]
    """Our name -> the name that the user wrote."""
    notes: list[str]
    """What words of other tools became."""


def sort_flags(flags: Mapping[str, str], groups: Mapping[str, Mapping[str, Flag]], where: str) -> SortedFlags:
    """Translate, check and divide flags. `groups`: name of a group -> its flags; `where`: who takes them.

    Raises UserError.
    """
    known = {name for names in groups.values() for name in names}
    translated = translate(flags, known)
    _refuse_unknown(translated.written, known, where)
    values = {
        group: {k: convert(names[k], v) for k, v in translated.flags.items() if k in names}
        for group, names in groups.items()
    }
    return SortedFlags(values, translated.written, translated.notes)


def command_options(flags: Mapping[str, str], kind: type, command: str) -> Any:
    """Options of a command without a recipe, as an instance of the dataclass `kind`. Raises UserError."""
    found = sort_flags(flags, {command: flags_of(kind, command)}, command)
    for note in found.notes:
        print(note, file=sys.stderr)
    fields = {f"{name}_" if keyword.iskeyword(name) else name: v for name, v in found.values[command].items()}
    return kind(**fields)


def task_name(words: Sequence[str]) -> str:
    """The value of --task in lower case, typed or in a file; empty where there is none."""
    flags = split_words(words)[1]
    task = flags.get("task") or flags_of_files(flags)[1].get("task", "")
    return task.replace("_", "-").lower()


def known_flags(task: str) -> set[str]:
    """Names of all flags that `auto` takes for a task, without those of AutoOptions."""
    return {name for names in _groups(workload(task), "auto", None).values() for name in names}


def parse_request(words: Sequence[str], command: str, options_class: type | None = None) -> Request:
    """Parse and check the words of a command that needs a recipe; no torch is imported.

    `options_class`: dataclass of the command's own flags, for `Request.extra`. Raises UserError.
    """
    chosen, flags = _task_and_flags(words, command, options_class)
    return _request(chosen, flags, command, options_class)


def parse_sweep(
    words: Sequence[str], command: str, options_class: type | None = None
) -> list[tuple[Request, tuple[str, ...]]]:
    """As `parse_request`, where a flag of the recipe may list several values: (request, names of those flags)
    for each combination. Raises UserError.
    """
    chosen, flags = _task_and_flags(words, command, options_class)
    groups = _groups(chosen, command, options_class)
    known = {name for names in groups.values() for name in names}
    found = combinations(flags, {**groups["recipe"], **groups["options"]}, lambda name: our_name(name, known))
    return [(_request(chosen, one.flags, command, options_class), one.swept) for one in found]


def _task_and_flags(
    words: Sequence[str], command: str, options_class: type | None
) -> tuple[Workload, dict[str, str]]:
    """The workload that --task names, and all flags as they were written, with those of a file below them.

    Raises UserError.
    """
    positional, flags = split_words(words)
    if positional:
        raise UserError(
            f"{command}: what is {positional[0]!r}? Flags start with --; a value with spaces needs quotes"
        )
    file, base = flags_of_files(flags)
    task = flags.get("task", base.get("task", BareValue()))
    if isinstance(task, BareValue) and (gone := next((name for name in flags if name in LEFT), None)):
        raise UserError(f"{spelling(gone)}: was taken out: {LEFT[gone]}")
    if isinstance(task, BareValue):
        raise UserError(f"{command}: needs --task NAME (`describe` lists them)")
    chosen = workload(task)
    known = {name for names in _groups(chosen, command, options_class).values() for name in names}
    return chosen, join(file, base, flags, known)


def _request(chosen: Workload, flags: Mapping[str, str], command: str, options_class: type | None) -> Request:
    """The request that flags with one value each make. Raises UserError."""
    found = sort_flags(flags, _groups(chosen, command, options_class), f"{command} --task {chosen.name}")
    values = found.values
    if {"per_device_batch_size", "batch_size"} <= found.written.keys():
        raise UserError(
            "--per-device-batch-size and --batch-size both say how large a batch is: give one of them"
        )
    processes = values["plan"].get("processes")
    scaling = BatchScaling(**values["scaling"])
    asked = {**values["recipe"], **values["options"]}
    if scaling.per_device_batch_size:  # before the mode's own batch is named
        asked["batch_size"] = scaling.per_device_batch_size
    if like := values["files"].get("like"):
        measured = (RunFolder.open(like).summary() or {}).get("metrics")
        asked = {**chosen.task.inherit(asked, measured or {}), **asked}
    recipe, preset_notes = chosen.complete(asked)
    plan = chosen.plan_options(recipe.preset, values["plan"])
    if start := values["files"].get("from"):
        recipe = _starting_from(RunFolder.open(start), recipe, chosen, found.written)
    recipe, batch_notes = _with_batch_scaling(recipe, scaling, processes, found.written)
    notes = [*found.notes, *preset_notes, *batch_notes]
    request = Request(chosen, recipe, plan, RunOptions(**values["run"]), values["command"], notes)
    check_request(request, getattr(options_class, "data_is_elsewhere", False))
    return request


def _starting_from(run: RunFolder, recipe: Recipe, chosen: Workload, written: Collection[str]) -> Recipe:
    """The recipe that begins with the weights of a run. Raises UserError where they would mean nothing."""
    if run.recipe.task != recipe.task:
        raise UserError(f"--from {run.folder}: is a run of {run.recipe.task}, not of {recipe.task}")
    if len(chosen.make(recipe)[0].phases()) > 1:
        raise UserError(f"--from {run.folder}: {recipe.task} trains in phases: give --teacher RUN")
    if recipe.data != run.recipe.data and "tokenizer" not in written:
        if (run.final / "tokenizer.json").is_file():
            recipe = dataclasses.replace(recipe, tokenizer=str(run.final.resolve()))
        elif recipe.task == "recommender":
            raise UserError(
                f"--from {run.folder}: its weights belong to the users and items of {run.recipe.data}:"
                " leave --data out"
            )
    return dataclasses.replace(recipe, starts_from=run.exported_weights())


def request_text(request: Request) -> str:
    """The request as a file for --config: all of its recipe, and options that differ from their defaults."""
    groups = _groups(request.workload, "auto", None)
    recipe = {name: getattr(request.recipe, name) for name in groups["recipe"]}
    shown = [
        ("recipe: what is learnt", groups["recipe"], recipe),
        (f"recipe of {request.workload.name}", groups["options"], request.recipe.options),
    ]
    for title, group, options in (("plan: how fast", "plan", request.plan), ("run", "run", request.run)):
        changed = {n: f for n, f in groups[group].items() if getattr(options, n) != f.default}
        shown.append((title, changed, {name: getattr(options, name) for name in changed}))
    return config_text(group for group in shown if group[1])


def check_request(request: Request, elsewhere: bool = False) -> None:
    """Checks of the task, its data and the tracker that need no torch. Raises UserError.

    Where lengths are assumed, only a plan is wanted, and the data may be missing. `elsewhere`: whether it
    trains on another machine, which has the data and the tracker.
    """
    task, data = request.workload.make(request.recipe)
    if elsewhere:
        phase_schedules(request.recipe, task.phases(), steps_per_epoch=1)
        return
    if request.extra.get("assume_length"):
        task.check_for_plan()
        return
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
        "files": flags_of(FlagFiles, "recipe"),
        "command": flags_of(options_class, command) if options_class else {},
    }


LEFT = {
    "watch": "`diff` compares what is logged so far: run it again",
    "witness": "keep a signed `isobatch receipt RUN --sign KEY` elsewhere",
    "against": "run `isobatch verify` under that Python",
    "compare_bits": "run it with --load-bits 16, 8 and 4 in turn",
    "critical_batch": "try batches by a sweep, as in --batch-size 32,64,128, and compare what they learn",
    "noise_scale_every": "try batches by a sweep, as in --batch-size 32,64,128, and compare what they learn",
    "remember": "type the flags that `tune` prints",
}
"""Flags that were taken out -> what to use instead."""


def _refuse_unknown(written: Mapping[str, str], known: Collection[str], where: str) -> None:
    """Raises UserError for unknown names. `written`: our name -> the name that the user wrote."""
    unknown = {name: word for name, word in written.items() if name not in known}
    if taken := next((name for name in unknown if f"no{name}" in known), None):
        raise UserError(f"{spelling('no' + taken)}: needs a value")  # Fire reads --noise alone as "no ise"
    said = [f"{spelling(word)}{_hint_of(name, word, known)}" for name, word in unknown.items()]
    if len(said) == 1:
        (name, word), *_ = unknown.items()
        raise UserError(f"{spelling(word)}: {where} has no such flag{_hint_of(name, word, known)}")
    if said:
        raise UserError(f"{where} has none of these flags: {', '.join(said)}")


def _hint_of(name: str, word: str, known: Collection[str]) -> str:
    """What may be meant by an unknown flag; of a word of another tool, our own for it."""
    if name in LEFT:
        return f" (taken out: {LEFT[name]})"
    if word != name:
        return f" ({ELSEWHERE.get(name, f'it stands for {spelling(name)}')})"
    meant = nearest(spelling(word), map(spelling, sorted({*known, *words_for(known)})))
    ours = {spelling(theirs): spelling(own) for theirs, own in SYNONYMS.items() if own in known}
    here = f", {ours[meant]} here" if meant in ours else ""
    return f" (did you mean {meant}{here}?)" if meant else ""


def _with_batch_scaling(
    recipe: Recipe, scaling: BatchScaling, processes: int | None, written: Mapping[str, str]
) -> tuple[Recipe, list[str]]:
    """The recipe with the global batch asked for, and a line where it was named in other tools' words.

    `processes`: the number that the user gave; `written`: our name of a flag -> the name that was written.
    """
    factors = {
        "per_device_batch_size": scaling.per_device_batch_size,
        "gradient_accumulation_steps": scaling.gradient_accumulation_steps,
    }
    notes = []
    if any(factors.values()):
        if scaling.per_device_batch_size:
            factors["processes"] = processes
        else:
            factors = {"batch_size": recipe.batch_size, **factors}
        given = {name: factor for name, factor in factors.items() if factor}
        recipe = dataclasses.replace(recipe, batch_size=math.prod(given.values()))
        product = " x ".join(
            f"{spelling(written[k])} {v}" if k in written else f"the default {spelling(k)} {v}"
            for k, v in given.items()
        )
        notes.append(f"{product} is a global batch of {recipe.batch_size}, on any number of processes")
    if scaling.scale_batch is not None:
        recipe = recipe.scaled(scaling.scale_batch, scaling.lr_rule)
    return recipe, notes
