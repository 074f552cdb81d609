"""Figures of sequence VAEs for the report and plots/: what the posterior monitor saw over the steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.models.protocols import Drawing, TaskReport

if TYPE_CHECKING:
    from collections.abc import Mapping

COLOURS = "viridis"


class SequenceVAEReport(TaskReport):
    """KL per dimension, active units, reconstruction against KL, and a projection of the latent space."""

    curves: ClassVar = ("reconstruction", "kl")
    reported: ClassVar = (
        *("kl_per_dimension", "window_kl", "window_reconstruction", "active_units", "mutual_information"),
        *("mutual_information_ceiling", "latent_projection"),
    )

    def run_drawings(self, run: Mapping[str, Any]) -> list[Drawing]:
        """From the rows of metrics.jsonl that follow a report of the monitor."""
        rows = [row for row in run["reported"] if "kl_per_dimension" in row]
        if not rows:
            return []
        columns = {name: [row.get(name) for row in rows] for name in ("step", *self.reported)}
        points = [row for row in rows if row.get("latent_projection")]
        posterior, latent = partial(_posterior, columns), partial(_latent, columns, points)
        return [
            Drawing("Posterior over the steps", posterior, 12, 3.4, 3),
            Drawing("Latent space", latent, 9 if points else 5, 3.6, 1 + bool(points)),
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


def _latent(columns: Mapping[str, list[Any]], points: list[Mapping[str, Any]], *axes: Any) -> None:
    """Reconstruction against KL, coloured by step; posterior means of the newest projection."""
    kl, reconstruction = columns["window_kl"], columns["window_reconstruction"]
    dots = axes[0].scatter(kl, reconstruction, c=columns["step"], cmap=COLOURS, s=14)
    axes[0].figure.colorbar(dots, ax=axes[0], label="step")
    axes[0].set(xlabel="KL, nats per sample", ylabel="reconstruction, nats per sample")
    if points:
        x, y = zip(*points[-1]["latent_projection"], strict=True)
        axes[1].scatter(x, y, s=8, alpha=0.6)
        axes[1].set(title=f"posterior means, step {points[-1]['step']}")
