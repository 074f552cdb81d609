"""From the words on the command line to a recipe, plan options and run options, all checked.

Fire splits the words; every name and value is then checked against the dataclasses, before anything heavy
is imported and before anything runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core import number_ranges
from isobatch.core.errors import NotHereError, UserError
from isobatch.core.extras import need
from isobatch.core.flags import SWITCH_WORDS, BareValue, Flag, convert, flags_of, nearest, spelling
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.core.terminal import print_lines
from isobatch.engine.optimization.schedule import phase_schedules
from isobatch.engine.registry import CHAINS, TASKS, LoadedWorkload, task_word, workload
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.local import words as flag_words
from isobatch.launch.local.words import A_RUN, LEFT, Translation
from isobatch.models.capabilities import ChecksPlan, KeepsRows

Groups = dict[str, dict[str, Flag]]
"""Name of a group, such as `recipe` -> its flags by name."""
SWITCHES = ("json", "png", "trust", "now", "follow", "quiet", "again", "debug", "yes", "anyway", "all")
"""Flags that are on or off in every command that has them: what stands behind one is a word of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchScaling:
    """Flags that change the global batch of the recipe."""

    per_device_batch_size: number_ranges.Positive | None = None
    """With --gradient-accumulation-steps and --processes: the global batch in other tools' words."""
    gradient_accumulation_steps: number_ranges.Positive | None = None
    """Multiplies the batch: --per-device-batch-size, or --batch-size, which then is the batch of one of so
    many steps. (The plan accumulates as it needs, whatever is asked.)"""

    def applied(self, recipe: Recipe, processes: int | None) -> tuple[Recipe, list[str]]:
        """The recipe with the global batch asked for, and a line where it was named in other tools' words.

        `processes`: the number that the user gave.
        """
        each, steps, notes = self.per_device_batch_size, self.gradient_accumulation_steps, []
        if each or steps:
            first = {"per_device_batch_size": each} if each else {"batch_size": recipe.batch_size}
            factors = {**first, "gradient_accumulation_steps": steps, "processes": each and processes}
            given = {name: factor for name, factor in factors.items() if factor}
            recipe = dataclasses.replace(recipe, batch_size=math.prod(given.values()))
            product = " x ".join(f"{spelling(name)} {factor}" for name, factor in given.items())
            notes.append(f"{product} is a global batch of {recipe.batch_size}, on any number of processes")
        return recipe, notes


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

    workload: LoadedWorkload
    recipe: Recipe
    plan: PlanOptions
    run: RunOptions
    extra: dict[str, Any]
    """The command's own flags."""
    notes: list[str]
    """Lines for the user on values that were derived, such as those of a preset."""


Point = tuple[Request, tuple[str, ...]]
"""A request of a sweep, with the names of what was swept."""


def split_words(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Positional words, and flags by name with `_` for `-`, all values as text. Raises UserError.

    Fire reads --a b and --a=b; a flag without a value, and --no-a, are given theirs before.
    """
    written, bare = [], dict[str, bool]()
    for word, after in zip(words, [*words[1:], "--"], strict=False):
        if word == "--" or word.startswith("--="):
            raise UserError(f"what is {word!r}? A flag is --name value or --name=value")
        if _is_flag(word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            is_bare = False
            if name.startswith("no_"):
                name, equals, value = name[3:], "=", str(value == "False")
            elif not equals and (_is_flag(after) or (name in SWITCHES and after.lower() not in SWITCH_WORDS)):
                is_bare, equals, value = True, "=", "True"
            if name in bare:
                several = ", as a,b" * (name == "data")
                raise UserError(f"{spelling(name)} is given twice: give it once{several}")
            bare[name] = is_bare
            word = f"--{name}{equals}{value}"
        written.append(word)
    if not bare:
        return written, {}
    import fire

    found: dict[str, Any] = {}

    @fire.decorators.SetParseFn(str)
    def collect(*positional: str, **flags: str) -> None:
        found.update(positional=list(positional), flags=flags)

    # By default Fire splits the words at a lone "-" into several calls.
    fire.Fire(collect, command=[*written, "--", "--separator=\x00"], name="isobatch")
    return found["positional"], {k: BareValue(v) if bare[k] else v for k, v in found["flags"].items()}


def _is_flag(word: str) -> bool:
    """What Fire takes for one."""
    return word.startswith("--") or re.match("-[a-zA-Z]", word) is not None


def sort_flags(
    flags: Mapping[str, str], groups: Groups, where: str
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """(group -> name -> value of flags as they were written, lines on words of other tools).

    `where`: who takes them. Raises UserError.
    """
    found = flag_words.translate(flags, _known(groups))
    refuse_wrong(found, _known(groups), where)
    return _values(found.flags, groups), list(found.notes.values())


def _known(groups: Groups) -> dict[str, Flag]:
    return {name: flag for flags in groups.values() for name, flag in flags.items()}


def _values(flags: Mapping[str, str], groups: Groups) -> dict[str, dict[str, Any]]:
    """Group -> name -> value. `flags`: in our words, all known."""
    return {
        group: {name: convert(flag, flags[name]) for name, flag in own.items() if name in flags}
        for group, own in groups.items()
    }


def command_options(flags: Mapping[str, str], kind: type, command: str) -> Any:
    """Options of a command without a recipe, as an instance of the dataclass `kind`. Raises UserError."""
    values, notes = sort_flags(flags, {command: flags_of(kind)}, command)
    print_lines(*notes)
    return kind(**values[command])


def read_command(words: Sequence[str], kind: type, command: str) -> tuple[list[str], Any]:
    """(positional words, options) of a command without a recipe. Raises UserError."""
    positional, flags = split_words(words)
    return positional, command_options(flags, kind, command)


def task_name(words: Sequence[str]) -> str:
    """The value of --task in lower case, typed or in a file; empty where there is none."""
    flags = split_words(words)[1]
    return (flags.get("task") or flag_words.flags_of_files(flags).get("task", "")).replace("_", "-").lower()


def known_flags(task: str) -> set[str]:
    """Names of all flags that `auto` takes for a task, without those of AutoOptions."""
    return set(_known(_groups(workload(task), None)))


def parse_request(words: Sequence[str], command: str, options_class: type | None = None) -> Request:
    """Parse and check the words of a command that needs a recipe; no torch is imported.

    `options_class`: dataclass of the command's own flags, for `Request.extra`. Raises UserError.
    """
    chosen, groups, found = _read(words, command, options_class)
    return _request(chosen, groups, found, getattr(options_class, "data_is_elsewhere", False))


def parse_sweep(words: Sequence[str], command: str, options_class: type | None = None) -> list[Point]:
    """As `parse_request`, where a flag of the recipe may list several values: (request, names of those flags)
    for each combination; of equal values, however spelt, the first stays. Raises UserError.
    """
    chosen, groups, found = _read(words, command, options_class)
    points: dict[str, Point] = {}
    sweepable = groups["recipe"] | groups["options"]
    trials = _values(found.flags, {"own": groups["command"]})["own"].get("trials", 0)
    for draw in flag_words.drawn(found.flags, sweepable, trials):
        for flags, swept in flag_words.combinations(found.flags | draw, sweepable):
            request = _request(chosen, groups, Translation(flags, found.notes))
            points.setdefault(request.recipe.hash(), (request, tuple(sorted({*swept, *draw}))))
    return list(points.values())


def labelled(point: Point) -> Request:
    """The request of a sweep's point with what was swept behind --name; a run without a name is called after
    its recipe."""
    request, swept = point
    if not request.run.name or not swept:
        return request
    name = f"{request.run.name}-{flag_words.label(request.recipe, swept)}"
    return dataclasses.replace(request, run=dataclasses.replace(request.run, name=name))


def _read(
    words: Sequence[str], command: str, options_class: type | None
) -> tuple[LoadedWorkload, Groups, Translation]:
    """The workload that --task names, the flags that there are, and those given, in our words, with a file's
    below them. Raises UserError.
    """
    positional, typed = split_words(words)
    if positional:
        raise UserError(f"{command}: {'; '.join(_misplaced(word, typed) for word in positional)}")
    in_file = flag_words.flags_of_files(typed)
    task = typed.get("task", in_file.get("task", BareValue()))
    if isinstance(task, BareValue):
        gone = "".join(f"; {spelling(name)} was taken out: {LEFT[name]}" for name in typed if name in LEFT)
        run = next((typed[word] for word in ("resume", "resume_from_checkpoint") if word in typed), "auto")
        way = f"`isobatch resume {run}` goes on with a run" if Path(run).is_dir() else "`describe` lists them"
        raise UserError(f"{command}: needs --task NAME ({way}; causal-lm is for language models){gone}")
    chosen = workload(task)
    groups = _groups(chosen, options_class)
    known = _known(groups)
    source = next((name for name in ("from", "like") if name in typed), "")
    other = in_file.get("task", chosen.name) if source else chosen.name
    if other != chosen.name and (source == "from" or in_file.keys() - known.keys()):
        takes = "pruned" if other == "pruning" else "teacher"
        way = f": give it as --{takes}" if takes in known else ""
        way = ": --model RUN/final begins with its weights" if "adapter" in known else way
        raise UserError(f"--{source} {typed[source]}: is a run of {other}, not of {chosen.name}{way}")
    given = flag_words.translate(typed, known)
    if task_word(task) in TASKS and task.lower().replace("_", "-") != chosen.name:
        given.notes["task"] = f"--task {task} is --task {chosen.name}"
    is_whole = all(name in in_file for name, flag in groups["recipe"].items() if flag.default is not None)
    for name in ("preset", "mode") if is_whole else ():  # defaults, below the values of a whole recipe
        if given.flags.get(name, in_file.get(name)) != in_file.get(name):
            why = "the file or run of flags beside it has a value for each, so that it would not be followed"
            raise UserError(f"--{name} {given.flags[name]}: {why}: leave it out, or type its flags instead")
    found = flag_words.translate(in_file, known).below(given)
    refuse_wrong(found, known, f"{command} --task {chosen.name}")
    return chosen, groups, found


def _misplaced(word: str, typed: Mapping[str, str]) -> str:
    """What a word is that stands where a flag should, beside those that were typed."""
    flag = "--task" if task_word(word) in (*TASKS, *CHAINS) else "--data" if Path(word).exists() else ""
    flag = "--from" if Path(word, "recipe.json").is_file() else flag
    way = "Flags start with --; values have commas between (1e-3,3e-3); spaces need quotes (10%, not 10 %)"
    given = f"{typed['data']},{word}" if flag == "--data" and "data" in typed else word
    return f"what is {word!r}? {f'Give it as {flag} {given}' if flag else way}"


def _request(chosen: LoadedWorkload, groups: Groups, found: Translation, elsewhere: bool = False) -> Request:
    """The request that flags with one value each make. Raises UserError."""
    values = _values(found.flags, groups)
    if {"per_device_batch_size", "batch_size"} <= found.flags.keys():
        raise UserError("--per-device-batch-size and --batch-size both say how large a batch is: give one")
    scaling = BatchScaling(**values["scaling"])
    asked = {**values["recipe"], **values["options"]}
    if values["command"].get("assume_length") and asked.get("model"):
        asked.setdefault("data", "elsewhere")  # a demo's recipe is for a minute on two cores
    if scaling.per_device_batch_size:  # before the mode's own batch is named
        asked["batch_size"] = scaling.per_device_batch_size
    recipe, preset_notes = chosen.complete(asked)
    plan = chosen.plan_options(recipe.preset, values["plan"])
    if start := values["files"].get("from"):
        recipe = _starting_from(RunFolder.open(start), recipe, chosen, found.flags)
    recipe, batch_notes = scaling.applied(recipe, values["plan"].get("processes"))
    notes = [*found.notes.values(), *preset_notes, *batch_notes]
    run = RunOptions(**values["run"])
    if run.hook:
        from isobatch.engine.train.own_hooks import with_learning_hooks

        recipe = with_learning_hooks(recipe, run.hook)
    request = Request(chosen, recipe, plan, run, values["command"], notes)
    try:
        check_request(request, elsewhere)
    except NotHereError as error:
        if "assume_length" not in groups["command"].keys() - request.extra.keys():
            raise
        what, _, why = str(error).partition(": ")
        raise UserError(f"{what}: add --assume-length 512 for a plan without it; else: {why}") from None
    return request


def _starting_from(run: RunFolder, recipe: Recipe, chosen: LoadedWorkload, given: Collection[str]) -> Recipe:
    """The recipe that begins with the weights of a run. Raises UserError where they would mean nothing."""
    if len(chosen.make(recipe)[0].phases()) > 1:
        raise UserError(f"--from {run.folder}: {recipe.task} trains in phases: give --teacher RUN")
    if recipe.data != run.recipe.data and "tokenizer" not in given and recipe.options.get("text") != "off":
        places = (run.final, Path(run.facts.folder) if recipe.task == "recommender" else run.final)
        if place := next((p for p in places if (p / "tokenizer.json").is_file()), None):
            recipe = dataclasses.replace(recipe, tokenizer=str(place.resolve()))
        elif recipe.task == "recommender":
            raise UserError(f"--from {run.folder}: its tokenizer is gone: give --tokenizer, or --text off")
    return dataclasses.replace(recipe, starts_from=run.exported_weights())


def request_text(request: Request) -> str:
    """The request as a file for --config: all of its recipe, and options that differ from their defaults."""
    groups = _groups(request.workload, None)
    recipe = {name: getattr(request.recipe, name) for name in groups["recipe"]}
    shown = [
        ("recipe: what is learnt", groups["recipe"], recipe),
        (f"recipe of {request.workload.name}", groups["options"], request.recipe.options),
    ]
    if start := request.recipe.starts_from:
        shown.append(("with the weights of", {"from": groups["files"]["from"]}, {"from": start["run"]}))
    for title, group, options in (("plan: how fast", "plan", request.plan), ("run", "run", request.run)):
        changed = {n: f for n, f in groups[group].items() if getattr(options, n) != f.default}
        shown.append((title, changed, {name: getattr(options, name) for name in changed}))
    return flag_words.config_text(group for group in shown if group[1])


def check_request(request: Request, elsewhere: bool = False) -> None:
    """Checks of the task, its data and the tracker that need no torch. Raises UserError.

    Where lengths are assumed, only a plan is wanted, and the data may be missing. `elsewhere`: whether it
    trains on another machine, which has the data and the tracker.
    """
    task, data = request.workload.make(request.recipe)
    if request.extra.get("assume_samples") and not request.extra.get("assume_length"):
        raise UserError("--assume-samples: say with --assume-length how many tokens each has")
    if request.extra.get("assume_length"):
        (task.check_for_plan if isinstance(task, ChecksPlan) else task.check)()
        return
    takes_rows = request.recipe.starts_from and isinstance(task, KeepsRows)
    if 0 in (request.recipe.steps or ()) and not takes_rows:
        raise UserError("--steps 0: trains nothing, which is for a recommender's --from RUN: give at least 1")
    if not elsewhere:
        places = {"data": request.recipe.data, "model": request.recipe.model, "out": request.run.out}
        for name, place in places.items():
            if place and Path(place, "recipe.json").is_file():
                raise UserError(f"--{name} {place}: is a run: {A_RUN[name].format(place)}")
        task.check()
        data.check()
        if request.run.tracker != "none":
            need(request.run.tracker, f"--tracker {request.run.tracker}")
    # Checks --phase, and that --epochs has one number or one per phase.
    phase_schedules(request.recipe, task.phases(), steps_per_epoch=1)


def _groups(chosen: LoadedWorkload, options_class: type | None) -> Groups:
    return {
        "recipe": flags_of(Recipe),
        "options": chosen.option_flags(),
        "plan": flags_of(PlanOptions),
        "run": flags_of(RunOptions),
        "scaling": flags_of(BatchScaling),
        "files": flags_of(FlagFiles),
        "command": flags_of(options_class) if options_class else {},
    }


def refuse_wrong(found: Translation, known: Mapping[str, Flag | None], where: str) -> None:
    """Raises UserError that names all flags that are unknown, with what may be meant, and all values that
    are not valid. `known`: name -> flag; None where its value is checked elsewhere.
    """
    valid = [*known, *(word for word, ours in flag_words.SYNONYMS.items() if ours in known)]
    said = list(found.wrong)
    for name, text in found.flags.items():
        try:
            if flag := known.get(name):
                [convert(flag, value) for value in flag_words.values_of(flag, text)]
        except UserError as error:
            ends = re.search(r"(?:uniform|interval|range)\W+([\d.e+-]+)\W+([\d.e+-]+)", text)
            way = f"; a range is {spelling(name)} {ends[1]}..{ends[2]} --trials 8" if ends else ""
            said.append(f"{error}{way}")
        if name not in known:
            near = nearest(name, valid) if len(name) > 1 else ""
            way = f"did you mean {spelling(near)}?" if near else "`describe` lists flags"
            way = f"taken out: {LEFT[name]}" if name in LEFT else way
            said.append(f"{spelling(name)}: {where} has no such flag ({way})")
    if said:
        raise UserError("; ".join(said))
