"""What the monitor costs of a sequence VAE's steps: `python -m benchmarks sequence-vae --data FOLDER`."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from isobatch.benchmarks.sessions import make_builder, stopwatch, train
from isobatch.models.sequence_vae import monitor as monitoring

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.benchmarks.report import Row


def measure(quick: bool, data: str) -> Iterator[Row]:
    """A row for each pace: time inside the monitor over the time of the steps."""
    steps = 120 if quick else 220
    values = {"data": data, "max_length": 128, "steps": steps, **({"hidden": 64} if quick else {})}
    methods = [(monitoring.PosteriorMonitor, name) for name in ("record", "add")]
    for pace in ("full", "fast"):
        with (
            make_builder("sequence-vae", {**values, "monitor": pace}) as builder,
            stopwatch(*methods, (builder.state.task, "_report")) as inside,
        ):
            seconds = train(builder)
        yield {
            "monitor": pace,
            "steps": steps,
            "ms a step": round(1e3 * median(seconds), 2),
            "ms in the monitor a step": round(1e3 * inside[0] / steps, 3),
            "share": f"{inside[0] / sum(seconds):.2%}",
        }
