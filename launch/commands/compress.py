"""`auto --task compress`: trains classifier, pruning and qat, exports each, and writes the report.

Each stage is a run of its own in --out. Typed again, the command goes on where it was stopped.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import BareValue, build_options, nearest_hint
from isobatch.core.measures import format_bytes, format_p_value
from isobatch.core.package import GO_ON_VARIABLE
from isobatch.engine.registry import CHAINS
from isobatch.launch.commands.export import export_form
from isobatch.launch.local.arguments import known_flags, parse_request, split_words
from isobatch.launch.local.launch_run import AutoOptions, find_or_train
from isobatch.launch.local.words.config_files import flags_of_files, join
from isobatch.launch.local.words.foreign_words import translate, words_for
from isobatch.launch.local.words.meanings import spelling
from isobatch.launch.report.command import text_of, write_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from isobatch.engine.runs.run_folder import RunFolder

STAGES = CHAINS["compress"]
ONLY_FIRST = ("model", "tokenizer", "revision", "preset")
"""Flags of the first stage's initial model; each later stage starts from the model of the one before."""
EXPORTS = {"classifier": ("onnx",), "pruning": ("hf", "dense", "onnx"), "qat": ("onnx-int4",)}

LEAST_TO_JUDGE = 30
"""Held-out rows: fewer cannot tell a classifier from chance."""
SMALL_GAIN = 0.05
"""Share of the parameters: pruning that removes no more is seldom felt."""
REMOVABLE = {"both": "their weights", "heads": "the heads", "neurons": "the neurons"}
"""--granularity -> what --sparsity is a part of."""


def compress(words: Sequence[str]) -> int:
    """Usage: auto --task compress --data FOLDER --model MODEL [--fast] [flags of the three stages]"""
    _, flags = split_words(words)
    file, base = flags_of_files(flags)
    known = set().union(*map(known_flags, STAGES)) | {"json"}
    flags = join(file, base, flags, known) if base else flags
    for name in ("task", "config", "like", "from"):
        flags.pop(name, None)
    options = build_options(AutoOptions, {k: flags.pop(k) for k in ("json",) if k in flags}, "auto")
    translated = translate(flags, set().union(*map(flags_of_stage, STAGES)))
    stage_flags = _flags_per_stage(translated.flags, translated.written)
    _check_all_stages(stage_flags)
    for note in translated.notes:
        print(note, file=sys.stderr)
    runs: list[RunFolder] = []
    for number, stage in enumerate(STAGES, start=1):
        print(f"compress: stage {number} of {len(STAGES)}, {stage}", file=sys.stderr)
        source_flag = {"pruning": "teacher", "qat": "pruned"}.get(stage)
        source_options = {source_flag: str(runs[-1].folder)} if source_flag else {}
        stage_words = _to_words(stage, {**stage_flags[stage], **source_options})
        request = parse_request(stage_words, "auto", AutoOptions)
        with _goes_on_by_the_same_command():
            run, verdict = find_or_train(request)
        if verdict.code != DONE:
            return verdict.code
        runs.append(run)
        if stage == STAGES[0]:
            refuse_chance(run)
        for kind in EXPORTS[stage]:
            if not (run.folder / "exports" / kind).is_dir():
                export_form(run, kind)
    if warning := small_gain(runs[0], runs[1]):
        print(warning, file=sys.stderr)
    folder = runs[-1].folder / "report"
    contents = write_report(runs, folder)
    print("\n".join(["compress kept:", *map(kept_line, STAGES, runs)]), file=sys.stderr)
    dumped = atomic_files.json_text(contents.to_dict(), ensure_ascii=False) if options.json else ""
    print(dumped or text_of(contents, folder))
    return DONE


@contextlib.contextmanager
def _goes_on_by_the_same_command() -> Iterator[None]:
    """A stage that is stopped says what goes on with the chain; `resume` would train that stage alone."""
    os.environ[GO_ON_VARIABLE] = "the same compress command again, which begins where this one stopped"
    try:
        yield
    finally:
        del os.environ[GO_ON_VARIABLE]


def refuse_chance(run: RunFolder) -> None:
    """Raise UserError where a classifier is no better than its largest class: there is nothing to keep."""
    summary = run.summary() or {}
    accuracy, split = summary.get("metrics", {}).get("accuracy"), summary.get("split")
    majority = run.facts.extra["majority"].get(split)
    if split is None or run.facts.samples[split] < LEAST_TO_JUDGE:
        return
    if accuracy is None or majority is None or round(accuracy, 6) > majority:  # which has six digits
        return
    raise UserError(
        f"compress stopped: the classifier learnt nothing: its accuracy, {accuracy:.1%}, is not above that of"
        f" always answering the largest class, {majority:.1%}; give more --epochs, another --lr or a"
        f" pretrained --model (`auto --task pruning --teacher {run.folder}` prunes it all the same)"
    )


def small_gain(dense: RunFolder, pruned: RunFolder) -> str:
    """A line where pruning left nearly all of the model."""
    before, after = ((run.summary() or {}).get("parameters", 0) for run in (dense, pruned))
    if not before or 1 - after / before > SMALL_GAIN:
        return ""
    return (
        f"compress: pruning removed {1 - after / before:.1%} of the parameters, which makes the model little"
        " smaller or faster: --granularity both with a higher --sparsity removes more"
    )


def kept_line(stage: str, run: RunFolder) -> str:
    """What a stage left of the model, and of its accuracy."""
    summary = run.summary() or {}
    metrics = summary.get("metrics", {})
    said = [f"{summary.get('parameters', 0):,} parameters"]
    if "heads_left" in metrics:
        heads, neurons = sum(metrics["heads_left"]), sum(metrics["neurons_left"])
        what = {"heads": "heads", "neurons": "neurons"}.get(
            run.recipe.options["granularity"], "weights of both"
        )
        said.append(f"{heads:,} heads, {neurons:,} neurons ({metrics['sparsity']:.1%} of the {what} removed)")
    if "bits" in metrics:
        said.append(f"{metrics['bits']} bits, {format_bytes(metrics['file_bytes'])}")
    if "accuracy" in metrics:
        said.append(f"accuracy {metrics['accuracy']:.2%}")
    if "mcnemar_p" in metrics:
        points = 100 * (metrics["accuracy"] - metrics["baseline_accuracy"])
        p = format_p_value(metrics["mcnemar_p"], 2)
        said[-1] += f" ({points:+.2f} points against its teacher, McNemar p {p})"
    return f"  {stage}: {'; '.join(said)}"


def _flags_per_stage(flags: Mapping[str, str], written: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Stage -> its flags. `written`: flag -> as the user wrote it. Raises UserError for unknown ones."""
    known = {stage: flags_of_stage(stage) for stage in STAGES}
    all_names = set().union(*known.values())
    for name in flags:
        if name not in all_names:
            flag = spelling(written[name])
            hint = nearest_hint(flag, map(spelling, sorted(all_names | words_for(all_names))))
            raise UserError(f"{flag}: no stage of compress has such a flag{hint}")
    found = {
        stage: {
            k: v for k, v in flags.items() if k in known[stage] and (position == 0 or k not in ONLY_FIRST)
        }
        for position, stage in enumerate(STAGES)
    }
    for position, stage in enumerate(STAGES):
        if "name" in flags:
            found[stage]["name"] = f"{flags['name']}-{stage}"
        for length in ("epochs", "steps"):
            if length in flags:
                found[stage][length] = _value_of_stage(flags[length], position, f"--{length}")
    return found


def _value_of_stage(word: str, position: int, flag: str) -> str:
    """The value for one stage of a flag with one number or one per stage. Raises UserError."""
    parts = word.split(",")
    if len(parts) not in (1, len(STAGES)):
        raise UserError(f"{flag} {word}: give one number, or one for each of {', '.join(STAGES)}")
    return parts[0] if len(parts) == 1 else parts[position]


def flags_of_stage(stage: str) -> set[str]:
    """Names of the flags that `auto` takes for a stage, but for those that the chain gives itself."""
    return known_flags(stage) - {"teacher", "pruned", "seeds", "config", "like", "from"}


def _check_all_stages(stage_flags: Mapping[str, Mapping[str, str]]) -> None:
    """Check the flags of all stages before the first trains, each with the first stage's model."""
    first = {k: v for k, v in stage_flags[STAGES[0]].items() if k in ONLY_FIRST}
    for stage in STAGES:
        parse_request(_to_words(stage, {**stage_flags[stage], **first}), "auto", AutoOptions)


def _to_words(stage: str, flags: Mapping[str, str]) -> list[str]:
    return [
        "--task",
        stage,
        *(f"--{k}" if isinstance(v, BareValue) else f"--{k}={v}" for k, v in flags.items()),
    ]
