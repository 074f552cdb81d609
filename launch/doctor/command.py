"""`doctor`: tries what training needs on this machine, or says why a run failed or hangs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.errors import DONE, FAILED
from isobatch.core.measures import printable
from isobatch.core.terminal.console import print_answer
from isobatch.launch.control.runs import RunsOptions
from isobatch.launch.doctor.machine import check_machine
from isobatch.launch.doctor.run_checks import check_run
from isobatch.launch.local.arguments import read_command
from isobatch.launch.local.run_setup import one_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.launch.doctor.check import Check

NAME_WIDTH, STATE_WIDTH = 22, 9


def doctor(words: Sequence[str]) -> int:
    """Usage: doctor [--out FOLDER] [--json]: what is wrong with this machine; each check really tries.
    doctor RUN [--json]: why a run failed or hangs, and whether its files are whole.

    Each line is ok, warning or broken, with what mends it. Exit 3 where something is broken.
    """
    positional, options = read_command(words, RunsOptions, "doctor")
    run = Path(one_run(positional, "doctor")).expanduser() if positional else None
    checks = check_run(run) if run else check_machine(Path(options.out))
    found = []
    for check in checks:
        found.append(check)
        if not options.json:  # as soon as it is known
            print(printable(line(check)), flush=True)
    count = Counter(check.state for check in found)
    text = f"{count['broken']} broken, {count['warning']} warnings, of {len(found)} checks"
    print_answer({"checks": [asdict(check) for check in found]}, text, options.json)
    return FAILED if count["broken"] else DONE


def line(check: Check) -> str:
    """A check as aligned text; what mends it stands under it."""
    state = check.state.ljust(STATE_WIDTH)
    text = " ".join(check.text.split())
    remedy = f"\n{'':<{STATE_WIDTH + NAME_WIDTH}}-> {check.remedy}" if check.remedy else ""
    return f"{state}{check.name:<{NAME_WIDTH}}{text}{remedy}"
