"""`auto --task compress`: trains classifier, pruning and qat, exports each, and writes the report.

Each stage is a run of its own in --out. Typed again, the command goes on where it was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from isobatch.core.errors import DONE, STOPPED, UserError
from isobatch.core.extras import need
from isobatch.core.flags import BareValue, build_options, nearest_hint, spelling
from isobatch.core.terminal.console import print_answer
from isobatch.launch.commands.export import export_form
from isobatch.launch.local import words as flag_words
from isobatch.launch.local.arguments import known_flags, parse_request, split_words
from isobatch.launch.local.launch_run import AutoOptions, find_or_train
from isobatch.launch.report.page import text_of, write_report

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder

EXPORTS = {"classifier": ("onnx",), "pruning": ("hf", "dense", "onnx"), "qat": ("onnx-int4",)}
"""The stages in order -> what each exports."""
STAGES = tuple(EXPORTS)
SOURCES = {"pruning": "teacher", "qat": "pruned"}
"""The flag that names the run of the stage before."""
ONLY_FIRST = ("model", "tokenizer", "revision", "preset")
"""Flags of the first stage's initial model; each later stage starts from the model of the one before."""
GIVEN = {*SOURCES.values(), *flag_words.SOURCES}
"""Flags that the chain gives its stages, or none has."""
OWN = ("json",)
"""Flags of the command."""


def compress(words: Sequence[str]) -> int:
    """Usage: auto --task compress --data FOLDER --model MODEL [--fast] [flags of the three stages]"""
    own, flags = parse_stages(words)
    options = build_options(AutoOptions, own)
    for library in ("onnx", "onnxruntime", "matplotlib"):
        need(library, "--task compress")
    runs: list[RunFolder] = []
    for number, (stage, kinds) in enumerate(EXPORTS.items(), start=1):
        print(f"compress: stage {number} of {len(STAGES)}, {stage}", file=sys.stderr)
        source = {SOURCES[stage]: str(runs[-1].folder)} if runs else {}
        request = parse_request(_words_of(stage, flags[stage] | source), "auto", AutoOptions)
        run, verdict = find_or_train(request)
        if verdict.code == STOPPED:
            print("compress: the same command again begins where this one stopped", file=sys.stderr)
        if verdict.code != DONE:
            return verdict.code
        runs.append(run)
        for kind in kinds:
            if not (run.folder / "exports" / kind).is_dir():
                export_form(run, kind)
    folder = runs[-1].folder / "report"
    contents = write_report(runs, folder)
    return print_answer(contents.to_dict(), text_of(contents, folder), options.json)


def parse_stages(words: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """(flags of the command, stage -> its flags), those of all stages checked before the first trains.

    Raises UserError.
    """
    typed = split_words(words)[1]
    known = {stage: known_flags(stage) - GIVEN for stage in STAGES}
    every = set().union(*known.values(), OWN, flag_words.SOURCES)
    in_file = flag_words.translate(flag_words.flags_of_files(typed), every)
    found = in_file.below(flag_words.translate(typed, every))
    for note in found.notes.values():
        print(note, file=sys.stderr)
    given = {k: v for k, v in found.flags.items() if k not in ("task", *flag_words.SOURCES, *OWN)}
    if unknown := [flag for flag in given if flag not in every]:
        word = spelling(unknown[0])
        hint = nearest_hint(word, map(spelling, flag_words.words_for(every)))
        raise UserError(f"{word}: no stage of compress has such a flag{hint}")
    flags = {stage: _flags_of(stage, given, known[stage]) for stage in STAGES}
    start = {k: v for k, v in flags[STAGES[0]].items() if k in ONLY_FIRST}
    for stage in STAGES:
        parse_request(_words_of(stage, flags[stage] | start), "auto")
    return {k: v for k, v in found.flags.items() if k in OWN}, flags


def _words_of(stage: str, flags: Mapping[str, str]) -> list[str]:
    """The words that train a stage."""
    written = (f"--{k}" if isinstance(v, BareValue) else f"--{k}={v}" for k, v in flags.items())
    return ["--task", stage, *written]


def _flags_of(stage: str, flags: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """The flags of one stage; one with a number for each stage has this one's. Raises UserError."""
    place = STAGES.index(stage)
    found = {k: v for k, v in flags.items() if k in known and (place == 0 or k not in ONLY_FIRST)}
    if "name" in found:
        found["name"] += f"-{stage}"
    for length in {"epochs", "steps"} & found.keys():
        parts = found[length].split(",")
        if len(parts) not in (1, len(STAGES)):
            word = f"--{length} {found[length]}"
            raise UserError(f"{word}: give one number, or one for each of {', '.join(STAGES)}")
        found[length] = parts[place % len(parts)]
    return found
