"""`isobatch seen` on a run that was trained: it says what the run's ledger says, and the log's hash chain."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from isobatch.engine.train.figures import extend_chain
from isobatch.launch.forensics.seen import SeenOptions, answer_question, seen
from isobatch.launch.local.run_setup import open_run
from isobatch.tests.integration.helpers import RAGGED, ledger, rows, succeed

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

STEPS = 11


def test_what_the_run_recorded_is_what_seen_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--task", RAGGED, "--steps", str(STEPS), "--group-by-length", "--ledger", "--log-every", "4")
    succeed("auto", *words, "--name", "a", "--processes", "1", cwd=tmp_path)
    folder = tmp_path / "runs" / "a"
    recorded = defaultdict(list)
    for one in ledger(folder):
        for sample in one["samples"]:
            recorded[sample].append(one["step"])
    run, chain = open_run(folder), ""
    for sample in range(93):
        (row,) = answer_question(run, SeenOptions(sample=sample))["rows"]
        assert [one["step"] for one in row["seen"]] == recorded[sample]
    for step in range(1, STEPS + 1):
        answer = answer_question(run, SeenOptions(step=step))["rows_of_step"]
        chain = extend_chain(chain, np.array([row["row"] for row in answer["rows"]]))
    assert chain == [row["chain"] for row in rows(folder) if "chain" in row][-1]
    assert seen([str(folder), "--sample", "7", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["status"], said["steps_done"]) == ("done", {"train": STEPS})
