"""Figures of sequence VAEs for the report and plots/: what the posterior monitor saw over the steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.models.protocols import Drawing, TaskReport

if TYPE_CHECKING:
    from collections.abc import Mapping

COLOURS = "viridis"


class SequenceVAEReport(TaskReport):
    """KL per dimension, active units, and reconstruction against KL."""

    curves: ClassVar = ("reconstruction", "kl")
    reported: ClassVar = (
        *("kl_per_dimension", "window_kl", "window_reconstruction", "active_units", "mutual_information"),
        "mutual_information_ceiling",
    )

    def run_drawings(self, run: Mapping[str, Any]) -> list[Drawing]:
        """From the rows of metrics.jsonl that follow a report of the monitor."""
        rows = [row for row in run["reported"] if "kl_per_dimension" in row]
        if not rows:
            return []
        columns = {name: [row.get(name) for row in rows] for name in ("step", *self.reported)}
        return [
            Drawing("Posterior over the steps", partial(_posterior, columns), 12, 3.4, 3),
            Drawing("Reconstruction against KL", partial(_trade, columns), 5, 3.6),
        ]


def _posterior(columns: Mapping[str, list[Any]], *axes: Any) -> None:
    """KL per dimension as a map, active units, mutual information under its ceiling."""
    heat, units, information = axes
    steps, kl = columns["step"], list(zip(*columns["kl_per_dimension"], strict=True))
    image = heat.pcolormesh(steps, range(len(kl)), kl, shading="nearest", cmap=COLOURS, vmin=0)
    heat.figure.colorbar(image, ax=heat, label="KL, nats")
    heat.set(xlabel="step", ylabel="dimension")
    units.plot(steps, columns["active_units"])
    units.set(xlabel="step", ylabel="active units", ylim=(0, len(kl)))
    information.plot(steps, columns["mutual_information"], label="mutual information")
    information.plot(steps, columns["mutual_information_ceiling"], ls="--", c="grey", label="its ceiling")
    information.plot(steps, columns["window_kl"], label="KL")
    information.set(xlabel="step", ylabel="nats")
    information.legend(fontsize=8, frameon=False)


def _trade(columns: Mapping[str, list[Any]], axes: Any) -> None:
    """Reconstruction against KL, coloured by step."""
    kl, reconstruction = columns["window_kl"], columns["window_reconstruction"]
    dots = axes.scatter(kl, reconstruction, c=columns["step"], cmap=COLOURS, s=14)
    axes.figure.colorbar(dots, ax=axes, label="step")
    axes.set(xlabel="KL, nats per sample", ylabel="reconstruction, nats per sample")
