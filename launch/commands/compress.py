"""`auto --task compress`: classifier, pruning, qat, exports and the report, one after the other.

Each stage is a run of its own in --out. Typed again, the command goes on where it was stopped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import BareValue, build_options, nearest_hint
from isobatch.engine.registry import CHAINS
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.commands.export import exported
from isobatch.launch.local.arguments import parse_request, split_words
from isobatch.launch.local.launch_run import AnswerOptions, find_or_train
from isobatch.launch.report.command import markdown, write

STAGES = CHAINS["compress"]
ONLY_FIRST = ("model", "tokenizer", "revision", "preset")
"""Flags that say what the first stage begins with; each later one begins with the stage before."""
EXPORTS = {"classifier": ("onnx",), "pruning": ("hf", "dense", "onnx"), "qat": ("onnx-int4",)}


def compress(words: Sequence[str]) -> int:
    """Usage: auto --task compress --data FOLDER --model MODEL [--fast] [flags of the three stages]"""
    _, flags = split_words(words)
    flags.pop("task")
    answer = build_options(AnswerOptions, {k: flags.pop(k) for k in ("json",) if k in flags}, "auto")
    given = _given(flags)
    _check(given)
    runs: list[RunFolder] = []
    for stage in STAGES:
        print(f"compress: {stage}", file=sys.stderr)
        source = {"pruning": "teacher", "qat": "pruned"}.get(stage)
        begins = {source: str(runs[-1].folder)} if source else {}
        run, verdict = find_or_train(
            parse_request(_words(stage, {**given[stage], **begins}), "auto", AnswerOptions)
        )
        if verdict.code != DONE:
            return verdict.code
        runs.append(run)
        for kind in EXPORTS[stage]:
            if not (run.folder / "exports" / kind).is_dir():
                exported(run, kind)
    folder = runs[-1].folder / "report"
    made = write(runs, folder)
    text = f"{markdown(made)}\n\n{folder}/report.html"
    print(json.dumps(made.to_dict(), ensure_ascii=False) if answer.json else text)
    return DONE


def _given(flags: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The flags of each stage; one that no stage knows is refused."""
    known = {stage: request_names(stage) for stage in STAGES}
    for name in flags:
        if not any(name in names for names in known.values()):
            every = sorted(set().union(*known.values()))
            spelt = "--" + name.replace("_", "-")
            hint = nearest_hint(spelt, ["--" + n.replace("_", "-") for n in every])
            raise UserError(f"{spelt}: no stage of compress has such a flag{hint}")
    found = {
        stage: {k: v for k, v in flags.items() if k in known[stage] and (place == 0 or k not in ONLY_FIRST)}
        for place, stage in enumerate(STAGES)
    }
    for place, stage in enumerate(STAGES):
        if "name" in flags:
            found[stage]["name"] = f"{flags['name']}-{stage}"
        for length in ("epochs", "steps"):
            if length in flags:
                found[stage][length] = _nth(flags[length], place, f"--{length}")
    return found


def _nth(word: str, place: int, flag: str) -> str:
    """The stage's own number of several."""
    parts = word.split(",")
    if len(parts) not in (1, len(STAGES)):
        raise UserError(f"{flag} {word}: give one number, or one for each of {', '.join(STAGES)}")
    return parts[0] if len(parts) == 1 else parts[place]


def request_names(stage: str) -> set[str]:
    """Every flag that a stage's `auto` takes, with the words of other tools."""
    from isobatch.launch.local.arguments import MEANINGS, SYNONYMS, known_flags

    known = known_flags(stage)
    words = {k for k, v in SYNONYMS.items() if v in known} | {
        k for k, v in MEANINGS.items() if set(v) <= known
    }
    return (known | words) - {"teacher", "pruned", "seeds"}


def _check(given: Mapping[str, Mapping[str, str]]) -> None:
    """What a later stage would refuse is refused now: each is asked with the first stage's model."""
    first = {k: v for k, v in given[STAGES[0]].items() if k in ONLY_FIRST}
    for stage in STAGES:
        parse_request(_words(stage, {**given[stage], **first}), "auto", AnswerOptions)


def _words(stage: str, flags: Mapping[str, str]) -> list[str]:
    return [
        "--task",
        stage,
        *(f"--{k}" if isinstance(v, BareValue) else f"--{k}={v}" for k, v in flags.items()),
    ]
