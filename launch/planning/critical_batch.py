"""`plan --critical-batch RUN`: up to which global batch more devices pay, by a run's gradient noise scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import json_text, rows_in
from isobatch.core.errors import UserError
from isobatch.engine.optimization.noise_scale import LEAST_MEASUREMENTS, NoiseScale, noise_scale
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.local.arguments import command_options, split_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OPTION = "--noise-scale-every 0.1ep"


def measured_noise(run: RunFolder) -> NoiseScale | None:
    """The noise scale of a run's last phase; None where it measured none, or too little."""
    rows = [row for row in rows_in(run.metrics) if "gradient_variance" in row]
    return noise_scale(row for row in rows if row.get("phase") == rows[-1].get("phase"))


def critical_batch(place: str) -> dict[str, Any]:
    """The answer of --critical-batch as JSON. Raises UserError where the run measured too little."""
    run = RunFolder.open(place)
    if (found := measured_noise(run)) is None:
        raise UserError(
            f"--critical-batch {place}: this run has fewer than {LEAST_MEASUREMENTS} measurements of the"
            f" noise scale: train it with {OPTION}"
        )
    summary, batch = run.summary() or {}, run.recipe.batch_size
    seconds = summary.get("train_seconds")
    # Where the mean gradient is lost in noise, the lower end is what is known.
    noise = found.value if math.isfinite(found.value) else found.low
    finite = {"value": found.value, "low": found.low, "high": found.high}
    return {
        "global_batch": batch,
        "noise_scale": {name: value if math.isfinite(value) else None for name, value in finite.items()},
        "measurements": found.measurements,
        "measuring_seconds": found.seconds,
        "train_seconds": seconds if isinstance(seconds, float | int) else None,
        "largest_scale": allowed_scale(found, batch),
        "steps_at": {str(batch * k): relative_steps(noise, batch, batch * k) for k in (1, 2, 4, 8, 16, 32)},
    }


def allowed_scale(found: NoiseScale, batch: int) -> int:
    """The largest power of two by which the global batch stays below the noise scale's lower end, or 1."""
    scale = 1
    while 2 * scale * batch <= found.low and scale < 1024:
        scale *= 2
    return scale


def relative_steps(noise: float, batch: int, larger: int) -> float:
    """Steps at a larger batch over those at `batch`, for the same loss.

    S = S_min (1 + B_noise / B) (McCandlish et al. 2018, equation 2.7): halved while B is far below B_noise.
    """
    if math.isinf(noise):
        return batch / larger
    return (1 + noise / larger) / (1 + noise / batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticalBatchOptions:
    """Flags of `plan --critical-batch`, which needs no task: the run knows its own."""

    critical_batch: str
    """Say by this run's measured gradient noise up to which global batch more devices would pay."""
    json: bool = False
    """One JSON object on standard output."""


def run_of_critical_batch(words: Sequence[str]) -> str | None:
    """The run that --critical-batch names; None where the flag is not there. Raises UserError."""
    return split_words(words)[1].get("critical_batch") if any("critical" in w for w in words) else None


def print_critical_batch(place: str, words: Sequence[str]) -> int:
    """`plan --critical-batch RUN [--json]`. Raises UserError where the run measured too little."""
    positional, flags = split_words(words)
    if positional:
        raise UserError(f"plan: what is {positional[0]!r}? Write plan --critical-batch RUN [--json]")
    options = command_options(flags, CriticalBatchOptions, "plan --critical-batch")
    answer = critical_batch(place)
    print(json_text(answer) if options.json else format_critical_batch(answer))
    return 0


def format_critical_batch(answer: Mapping[str, Any]) -> str:
    """The answer in words, and a table of what larger batches would save."""
    scale, batch = answer["noise_scale"], answer["global_batch"]
    value, low, high = (_samples(scale[name]) for name in ("value", "low", "high"))
    cost = f"{answer['measuring_seconds']:.3g} s"
    if whole := answer["train_seconds"]:
        cost += f", {answer['measuring_seconds'] / whole:.1%} of the training"
    lines = [
        f"gradient noise scale in samples: {value} (90 % of resamples between {low} and {high};"
        f" {answer['measurements']} measurements took {cost})",
        _verdict(batch, answer["largest_scale"], low),
        "",
        "  global batch  steps needed  samples needed",
    ]
    for name, steps in answer["steps_at"].items():
        lines.append(f"  {int(name):>12,}  {steps:>11.0%}   {steps * int(name) / batch:>13.0%}")
    return "\n".join([*lines, "", "(against this run's; the model behind it is S = S_min (1 + B_noise / B))"])


def _samples(value: float | None) -> str:
    return "beyond what was measured" if value is None else f"{value:,.0f}"


def _verdict(batch: int, scale: int, low: str) -> str:
    if scale > 1:
        return (
            f"more devices pay up to a global batch of {batch * scale:,}: --scale-batch {scale} --lr-rule"
            " sqrt; beyond, samples are spent faster than steps are saved"
        )
    return f"more devices do not pay: at {batch:,} the global batch is near or above {low} already"
