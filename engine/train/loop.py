"""The loop of training: the same for every workload, run, proof and measurement.

Each optimizer step is computed by `train_step`. Its figures are read while the next step runs, so that the
loop waits for no device; what the hooks decide by them therefore takes effect one step later, the same on
every rank. Whatever needs all ranks at one place happens in a pause between two steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.engine.train.figures import StepOutput
from isobatch.engine.train.first_step import check_sums
from isobatch.engine.train.step import train_step

if TYPE_CHECKING:
    from isobatch.engine.train.hooks import Ending, Hooks
    from isobatch.engine.train.state import Training


def run_phase(state: Training, hooks: Hooks, start: int = 0, stop: int | None = None) -> Ending:
    """Train steps start..stop-1 of the phase that `state` stands in; by default all from `start` on.

    Returns how it ended. All ranks call this, with the same hooks.
    """
    last = state.schedule.steps if stop is None else stop
    with hooks.phase(state, start):
        # A resume may find that the phase had stopped early: then it trains nothing.
        if start and hooks.ended():
            return "early"
        if not state.schedule.steps:
            hooks.pause(state, 0, {"save"})
        pending: StepOutput | None = None
        for batch in state.batches(start, last):
            step = batch.work.step + 1
            if batch.left_out:
                # No weight moves; log rows, evaluations and checkpoints are what they would have been.
                output = StepOutput(batch)
            else:
                if not state.layout.names:
                    check_sums(state, batch)
                with hooks.around(state, step):
                    output = train_step(state, batch, hooks)
                output.seconds = hooks.lap()
            # The step before, whose figures have arrived while this one was computed.
            asked, pending = hooks.figures(state, pending), output
            if asked or step == last or hooks.due(state, step):
                # This step's figures first: what happens in the pause belongs behind them.
                asked |= hooks.figures(state, pending) | ({"save"} if step == last else set())
                pending = None
                asked = hooks.pause(state, step, asked)
                if "stop" in asked:
                    return "stopped"
                if "end_phase" in asked:
                    return "early"
        return "done"
