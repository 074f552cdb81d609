"""Figures of sequence VAEs for the report and plots/: what the posterior monitor saw over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.models.protocols import Drawing, TaskReport

if TYPE_CHECKING:
    from collections.abc import Mapping

COLOURS = "viridis"


class SequenceVAEReport(TaskReport):
    """KL per dimension, active units, reconstruction against KL, and a projection of the latent space."""

    curves: ClassVar[tuple[str, ...]] = ("reconstruction", "kl")
    reported: ClassVar[tuple[str, ...]] = (
        *("kl_per_dimension", "window_kl", "window_reconstruction", "active_units", "mutual_information"),
        *("mutual_information_ceiling", "latent_projection"),
    )

    def run_drawings(self, run: Mapping[str, Any]) -> list[Drawing]:
        """From the rows of metrics.jsonl that follow a report of the monitor."""
        rows = [row for row in run["reported"] if "kl_per_dimension" in row]
        if not rows:
            return []
        points = [row for row in rows if row.get("latent_projection")]
        return [
            Drawing("Posterior over the steps", lambda *axes: _posterior(axes, rows, run["run"]), 12, 3.4, 3),
            Drawing(
                "Latent space",
                lambda *axes: _latent(axes, rows, points),
                9 if points else 5,
                3.6,
                1 + bool(points),
            ),
        ]


def _posterior(axes: Any, rows: list[Mapping[str, Any]], name: str) -> None:
    """KL per dimension as a map, active units, mutual information under its ceiling."""
    heat, units, information = axes
    steps = [row["step"] for row in rows]
    kl = [row["kl_per_dimension"] for row in rows]
    image = heat.pcolormesh(
        steps, range(len(kl[0])), list(zip(*kl, strict=True)), shading="nearest", cmap=COLOURS, vmin=0
    )
    heat.figure.colorbar(image, ax=heat, label="KL, nats")
    heat.set(xlabel="step", ylabel="dimension", title=name)
    units.plot(steps, [row["active_units"] for row in rows])
    units.set(xlabel="step", ylabel="active units", ylim=(0, len(kl[0])))
    information.plot(steps, [row["mutual_information"] for row in rows], label="mutual information")
    information.plot(
        steps, [row["mutual_information_ceiling"] for row in rows], ls="--", c="grey", label="its ceiling"
    )
    information.plot(steps, [row["window_kl"] for row in rows], label="KL")
    information.set(xlabel="step", ylabel="nats")
    information.legend(fontsize=8, frameon=False)


def _latent(axes: Any, rows: list[Mapping[str, Any]], points: list[Mapping[str, Any]]) -> None:
    """Reconstruction against KL, coloured by step; posterior means of the newest projection."""
    trade = axes[0]
    dots = trade.scatter(
        [row["window_kl"] for row in rows],
        [row["window_reconstruction"] for row in rows],
        c=[row["step"] for row in rows],
        cmap=COLOURS,
        s=14,
    )
    trade.figure.colorbar(dots, ax=trade, label="step")
    trade.set(xlabel="KL, nats per sample", ylabel="reconstruction, nats per sample")
    if points:
        x, y = zip(*points[-1]["latent_projection"], strict=True)
        axes[1].scatter(x, y, s=8, alpha=0.6)
        axes[1].set(
            xlabel="first component",
            ylabel="second component",
            title=f"posterior means, step {points[-1]['step']}",
        )
