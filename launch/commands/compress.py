"""`auto --task compress`: trains classifier, pruning and qat, exports each, and writes the report.

Each stage is a run of its own in --out. Typed again, the command goes on where it was stopped.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from isobatch.core.errors import DONE, STOPPED
from isobatch.core.extras import need
from isobatch.core.flags import build_options
from isobatch.core.terminal.console import print_answer
from isobatch.launch.commands.export import export_form
from isobatch.launch.local.arguments import parse_request
from isobatch.launch.local.launch_run import AutoOptions, find_or_train
from isobatch.launch.report.page import text_of, write_report
from isobatch.launch.sweeps.chain import parse_chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.runs.run_folder import RunFolder

EXPORTS = {"classifier": ("onnx",), "pruning": ("hf", "dense", "onnx"), "qat": ("onnx-int4",)}
"""The stages in order -> what each exports."""
SOURCES = {"pruning": "teacher", "qat": "pruned"}
"""The flag that names the run of the stage before."""


def compress(words: Sequence[str]) -> int:
    """Usage: auto --task compress --data FOLDER --model MODEL [--fast] [flags of the three stages]"""
    chain = parse_chain("compress", words, {"json"})
    options = build_options(AutoOptions, chain.own)
    for library in ("onnx", "onnxruntime", "matplotlib"):
        need(library, "--task compress")
    runs: list[RunFolder] = []
    for number, (stage, kinds) in enumerate(EXPORTS.items(), start=1):
        print(f"compress: stage {number} of {len(EXPORTS)}, {stage}", file=sys.stderr)
        source = {SOURCES[stage]: str(runs[-1].folder)} if runs else {}
        request = parse_request(chain.words(stage, source), "auto", AutoOptions)
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
