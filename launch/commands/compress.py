"""`auto --task compress`: trains classifier, pruning and qat, exports each, reports, and chooses a form.

Each stage is a run of its own in --out. Typed again, the command goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from isobatch.core.errors import DONE, STOPPED, ExportError, TrainingError, UserError
from isobatch.core.extras import has, need
from isobatch.core.flags import BareValue, build_options, flags_of
from isobatch.core.recipe import DEMO
from isobatch.core.terminal import doing, print_answer, print_lines
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.commands.export import export_form
from isobatch.launch.local import words as flag_words
from isobatch.launch.local.arguments import known_flags, parse_request, refuse_wrong, split_words
from isobatch.launch.local.launch_run import find_or_train
from isobatch.launch.local.options import AutoOptions
from isobatch.launch.local.run_setup import held_out
from isobatch.launch.report import pareto
from isobatch.launch.report.page import collect, text_of, write_report
from isobatch.models.encoder import baselines, evaluation, problems

STAGES = ("classifier", "pruning", "qat")
"""The workloads in order; a chain may have several stages of the last, or none."""
SOURCES = {"pruning": ("teacher", "classifier"), "qat": ("pruned", "pruning")}
"""The flag that names the run of an earlier stage, and that stage."""
ONLY_FIRST = ("model", "tokenizer", "revision", "preset")
"""Flags of the first stage's initial model; each later stage starts from the model of the one before."""
GIVEN = {*(flag for flag, _ in SOURCES.values()), *flag_words.SOURCES, "bits"}
"""Flags that the chain gives its stages, or none has."""
UNTRAINED = ("onnx-dynamic", "onnx-static")
"""Forms that are rounded after training: one that answers otherwise is left out, and the chain goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressOptions:
    """Flags of the chain itself."""

    quantize: tuple[Literal["dynamic", "static", "int8-qat", "int4"], ...] = ("dynamic", "static", "int4")
    """How to round: dynamic and static in seconds, after training; int8-qat and int4 by a training each.
    By default the two that cost nothing, and the smallest file."""
    choose: str = "within 0.5%"
    """Which point of the table is copied to chosen/ of the last stage, as runs/NAME-qat/chosen: smallest,
    fastest, accurate, or the fastest `within 0.5%` (points of the headline figure, at least one held-out
    sample) of the most accurate."""
    anyway: bool = False
    """Go on where the trained base does not beat the baselines."""
    json: bool = False
    """One JSON object on standard output."""

    def __post_init__(self) -> None:
        pareto.check_choice(self.choose)


OWN = tuple(flags_of(CompressOptions))


class Stage(NamedTuple):
    """A run of the chain, and the forms that it is exported to."""

    name: str
    """What its run's name ends with."""
    task: str
    flags: Mapping[str, str]
    exports: tuple[str, ...]


def stages_of(quantize: Collection[str]) -> list[Stage]:
    """The stages in order. Dynamic int8 is in every report, as what costs nothing."""
    rounded = [f"onnx-{kind}" for kind in ("dynamic", "static") if kind in (*quantize, "dynamic")]
    found = [
        Stage("classifier", "classifier", {}, ("onnx", "onnx-dynamic")),
        Stage("pruning", "pruning", {}, ("hf", "dense", "onnx", *rounded)),
    ]
    for kind, name, bits in (("int8-qat", "qat-int8", 8), ("int4", "qat", 4)):
        if kind in quantize:
            found.append(Stage(name, "qat", {"bits": str(bits)}, (f"onnx-int{bits}",)))
    return found


def compress(words: Sequence[str]) -> int:
    """Usage: auto --task compress --data FOLDER --model MODEL [--fast] [flags of the three stages]
    [--quantize dynamic,static,int8-qat,int4] [--choose smallest|fastest|accurate|"within 0.5%"] [--anyway]
    """
    options, stages, flags = parse_stages(words)
    for library in ("onnx", "onnxruntime", "onnxscript", "matplotlib"):
        need(library, "--task compress")
    runs: dict[str, RunFolder] = {}
    for number, stage in enumerate(stages, start=1):
        print_lines(f"compress: stage {number} of {len(stages)}, {stage.name}")
        given = dict(flags[stage.name])
        if stage.task in SOURCES:
            flag, before = SOURCES[stage.task]
            given[flag] = str(runs[before].folder)
        run, verdict = find_or_train(parse_request(_words_of(stage.task, given), "auto", AutoOptions))
        if verdict.code == STOPPED:
            print_lines("compress: the same command again begins where this one stopped")
        if verdict.code != DONE:
            return verdict.code
        runs[stage.name] = run
        if stage.task not in SOURCES:
            check_worth(run, options.anyway)
        for kind in (one for one in stage.exports if not (run.folder / "exports" / one).is_dir()):
            try:
                export_form(run, kind)
            except (ExportError, UserError) as error:
                if kind not in UNTRAINED:
                    raise
                print_lines(f"compress: {run.folder.name} has no {kind}: {error}")
    folder = run.folder / "report"
    contents = collect(list(runs.values()))
    points = pareto.points_of(list(runs.values()), contents.models)
    chosen = pareto.choose(points, options.choose)
    copied = pareto.copy(chosen, run.folder / "chosen")
    run.record_export(run.folder / "chosen")
    for row, point in zip(contents.models, points, strict=True):
        row["chosen"] = point is chosen
    write_report(contents, folder)
    text = "\n\n".join((text_of(contents, folder), pareto.text_of(points, chosen, options.choose, copied)))
    front = [one.name for one in pareto.front(points)]
    choice = {"pareto": front, "choice": chosen.name, "chosen": str(copied)}
    return print_answer(contents.to_dict() | choice, text, options.json)


def check_worth(run: RunFolder, anyway: bool) -> None:
    """Hold the base against the baselines on held-out samples, and say how it stands.

    Raises TrainingError where it is not worth what comes next, unless `anyway`; the base of a demo may be so.
    """
    doing("holding the base against simple models")
    split, batches = held_out(run)
    if split == "train":
        return
    problem = problems.of_facts(run.facts)
    mine = evaluation.predict(evaluation.open_runner(run.final), batches())
    found = baselines.standings(problem, mine, baselines.baselines_of(run.facts, batches))
    score = problem.score(problem.evidence(mine))
    where = f"on {len(mine.labels):,} {split} samples"
    said = [f"compress: {problem.title} of the base {where} {100 * score:.1f} %"]
    said += [f"{one['name']} {100 * one['score']:.1f} % (the base is {one['verdict']})" for one in found]
    said += [] if has("sklearn") else [baselines.UNCOMPARED]
    print_lines("; ".join(said))
    if why := baselines.why_not_worth_it(found, len(mine.labels)):
        verdict = f"{run.folder.name} {why} {where}"
        if not anyway and run.recipe.data != DEMO:
            way = "look at its labels, train it for more --epochs, at another --lr or from another --model"
            raise TrainingError(f"{verdict}, and smaller it is no better: {way}, or go on --anyway")
        print_lines(f"compress: {verdict}")


def parse_stages(words: Sequence[str]) -> tuple[CompressOptions, list[Stage], dict[str, dict[str, str]]]:
    """(options of the chain, its stages, name of each -> its flags), all checked before the first one trains.

    Raises UserError.
    """
    typed = split_words(words)[1]
    known = {task: known_flags(task) - GIVEN for task in STAGES}
    every = set().union(*known.values(), OWN, flag_words.SOURCES)
    in_file = flag_words.translate(flag_words.flags_of_files(typed), every)
    found = in_file.below(flag_words.translate(typed, every))
    print_lines(*found.notes.values())
    options = build_options(CompressOptions, {k: v for k, v in found.flags.items() if k in OWN})
    given = {k: v for k, v in found.flags.items() if k not in ("task", *flag_words.SOURCES, *OWN)}
    if "bits" in given:
        raise UserError(f"--bits {given['bits']}: of this chain --quantize int8-qat,int4 says it")
    if "dry_run" in given:
        raise UserError("--dry-run: a stage begins with what others wrote: `isobatch plan` shows one of them")
    refuse_wrong(flag_words.Translation(given, {}, found.wrong), dict.fromkeys(every), "auto --task compress")
    stages = stages_of(options.quantize)
    flags = {stage.name: _flags_of(stage, stages, given, known[stage.task]) for stage in stages}
    start = {k: v for k, v in flags[STAGES[0]].items() if k in ONLY_FIRST}
    for stage in stages:
        parse_request(_words_of(stage.task, flags[stage.name] | start), "auto")
    return options, stages, flags


def _words_of(stage: str, flags: Mapping[str, str]) -> list[str]:
    """The words that train a stage."""
    written = (f"--{k}" if isinstance(v, BareValue) else f"--{k}={v}" for k, v in flags.items())
    return ["--task", stage, *written]


def _flags_of(
    stage: Stage, stages: Sequence[Stage], flags: Mapping[str, str], known: Collection[str]
) -> dict[str, str]:
    """The flags of one stage; one with a number for each of them has this one's. Raises UserError."""
    place = stages.index(stage)
    found = {k: v for k, v in flags.items() if k in known and (place == 0 or k not in ONLY_FIRST)}
    found |= stage.flags
    if "name" in found:
        found["name"] += f"-{stage.name}"
    for length in {"epochs", "steps"} & found.keys():
        parts = found[length].split(",")
        if len(parts) not in (1, len(stages)):
            what = f"--{length} {found[length]}: {len(parts)} numbers for {len(stages)} stages"
            names = ", ".join(one.name for one in stages)
            raise UserError(f"{what}: give one number, or one for each of {names} (--quantize)")
        found[length] = parts[place % len(parts)]
    return found
