"""What a forger does who knows the code: seals a changed log anew."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from isobatch.core.atomic_files import rows_in
from isobatch.engine.runs.metrics_log import SEAL, MetricsLog, first_seal

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.engine.runs.run_folder import RunFolder


def one_process() -> Any:
    """What a checkpoint's writer asks of a communicator, for one process."""
    world = SimpleNamespace(rank=0, size=1, is_main=True, node=0, device=torch.device("cpu"))
    world.all_gather_objects = lambda value: [value]
    world.barrier = lambda: None
    return world


def edit_log(run: RunFolder, edit: Callable[[list[dict[str, Any]]], Any], sealed: bool = True) -> None:
    """Edit the rows of a run's log; `sealed`: and seal them again."""
    rows = list(rows_in(run.metrics))
    edit(rows)
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if sealed:
        reseal(run)


def reseal(run: RunFolder) -> None:
    """Write the rows of a run's log again, with true seals."""
    rows = list(rows_in(run.metrics))
    run.metrics.unlink()
    journal = MetricsLog(run, writes=True)
    journal._continue(first_seal(run))  # noqa: SLF001
    for row in rows:
        if SEAL in row:
            journal.seal(row["phase"], row["step"])
        else:
            journal.log_metrics(row)
