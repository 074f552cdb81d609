"""The posterior monitor: sums over a window of steps on the device, and a verdict at every report.

A step's sums ride in the reduction of its losses, so that a window is the same on any number of processes.
It lies in buffers of the model, so that checkpoints hold it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.models.sequence_vae import posterior
from isobatch.models.sequence_vae.posterior import Posterior
from isobatch.models.sequence_vae.verdict import Figures, History, judge

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isobatch.models.sequence_vae.options import MonitorPace

SUMS, ROWS = "monitor.sums", "monitor.rows"
"""Names of what a step records."""
LEAST_SAMPLES = 1024
"""Samples of the window of posteriors, at least, whatever the batch."""
SHOWN_POINTS = 256
"""Points of a latent projection in metrics.jsonl."""
COUNT, TOKENS, NLL, OTHER_NLL, OWN_NLL = range(5)
"""Places of the scalars at the beginning of a step's sums; then KL, mean and squared mean per dimension."""
SCALARS = 5


class PosteriorMonitor(nn.Module):
    """Window sums of the last steps, and the posteriors of the last samples."""

    sums: Tensor
    """(window, SCALARS + 3 L): a row per step; row `step % window` is the newest."""
    rows: Tensor
    """(samples, 2 L + 1): mean, log variance, and 1 where there is a sample."""
    history: Tensor
    """(History.size(L),): what the verdict needs of earlier reports."""

    def __init__(self, pace: MonitorPace, latent: int, batch_size: int) -> None:
        super().__init__()
        self.pace, self.latent = pace, latent
        self.rows_per_step = min(batch_size, -(-LEAST_SAMPLES // pace.window))
        self.blocks = -(-LEAST_SAMPLES // self.rows_per_step)
        """Steps after which all rows are replaced."""
        self.register_buffer("sums", torch.zeros(pace.window, SCALARS + 3 * latent))
        self.register_buffer("rows", torch.zeros(self.blocks * self.rows_per_step, 2 * latent + 1))
        self.register_buffer("history", torch.zeros(History.size(latent)))

    def reset(self) -> None:
        """Forget everything: a new phase begins."""
        for state in (self.sums, self.rows, self.history):
            state.zero_()

    def reports_at(self, step: int) -> bool:
        """Whether a report follows step `step` (from 0)."""
        return (step + 1) % self.pace.report_every == 0

    def plots_at(self, step: int) -> bool:
        """Whether the report after step `step` (from 0) holds a latent projection."""
        return self.reports_at(step) and (step + 1) % self.pace.plot_every == 0

    def compares_at(self, step: int) -> bool:
        """Whether step `step` (from 0) also decodes with the latent vectors of other samples."""
        return self.reports_at(step) and step >= self.blocks

    def posteriors(self, chosen: Tensor) -> Posterior:
        """Those of the window with these numbers (B,).

        The window is the same on every process, and the numbers are keyed by the sample, so that the division
        into micro-batches does not matter.
        """
        mean, logvar, _ = self.rows[chosen].split((self.latent, self.latent, 1), dim=1)
        return Posterior(mean, logvar)

    def step_sums(
        self, found: Posterior, kl: Tensor, length: Tensor, nll: Tensor, other_nll: Tensor | None
    ) -> Tensor:
        """(SCALARS + 3 L,): what a micro-batch adds to its step. `kl` (B, L)."""
        zero = torch.zeros_like(nll)
        own = zero if other_nll is None else nll
        scalars = [zero + len(kl), length.sum().to(nll.dtype), nll, zero if other_nll is None else other_nll]
        mean = found.mean.detach()
        per_dimension = [kl.detach().sum(0), mean.sum(0), mean.square().sum(0)]
        return torch.cat([torch.stack([*scalars, own]).detach(), *per_dimension])

    def step_rows(self, found: Posterior, positions: np.ndarray) -> Tensor:
        """(rows_per_step, 2 L + 1): the posteriors of the micro-batch that belong to the window."""
        rows = torch.zeros(self.rows_per_step, self.rows.shape[1], device=found.mean.device)
        chosen = np.flatnonzero(positions < self.rows_per_step)
        if len(chosen):
            places = torch.from_numpy(positions[chosen]).to(rows.device)
            taken = torch.from_numpy(chosen).to(rows.device)
            values = torch.cat([found.mean, found.logvar, torch.ones_like(found.mean[:, :1])], dim=1)
            rows[places] = values.detach()[taken]
        return rows

    def add(self, step: int, recorded: Mapping[str, Tensor]) -> None:
        """Take a step's sums, which are reduced over all processes, into the window."""
        start = step % self.blocks * self.rows_per_step
        self.sums[step % len(self.sums)] = recorded[SUMS].to(self.sums.dtype)
        block, newest = self.rows[start : start + self.rows_per_step], recorded[ROWS].to(self.rows.dtype)
        block.copy_(torch.where(newest[:, -1:] > 0, newest, block))  # the last batch of an epoch may be short

    def report(self, step: int, seed: int) -> Figures:
        """The figures of the window after step `step` (from 0). The only wait for the device is here."""
        double = torch.float32 if self.sums.device.type == "mps" else torch.float64
        sums = self.sums.to(double)
        total = sums.sum(0)
        kl, mean, squares = total[SCALARS:].view(3, self.latent)
        variance = posterior.mean_variance(mean, squares, total[COUNT])
        newest = sums[step % len(sums)]
        rows = self.rows[self.rows[:, -1] > 0].to(double)
        means, logvars = rows[:, :-1].chunk(2, dim=1)
        drawn = np.random.default_rng([seed, step]).standard_normal(tuple(means.shape))
        noise = torch.from_numpy(drawn).to(means)
        points = posterior.projection(means[:SHOWN_POINTS]) if self.plots_at(step) else None
        flat = torch.cat([total[:SCALARS], newest[[COUNT, OTHER_NLL, OWN_NLL]], kl, variance]).tolist()
        count, tokens, nll = flat[:3]
        newest_count, other_nll, own_nll = flat[SCALARS : SCALARS + 3]
        per_dimension = np.array(flat[SCALARS + 3 :]).reshape(2, self.latent)
        return Figures(
            step=step + 1,
            window=min(step + 1, len(sums)),
            full=step + 1 >= max(len(sums), self.blocks),
            kl_per_dimension=(per_dimension[0] / count).tolist(),
            variance=per_dimension[1].tolist(),
            nll=nll / count,
            nll_per_token=nll / tokens,
            mutual_information=posterior.mutual_information(means, logvars, noise),
            ceiling=math.log(len(means)),
            shuffle_gap=(other_nll - own_nll) / newest_count if own_nll else None,
            points=None if points is None else [[round(v, 3) for v in point] for point in points.tolist()],
        )

    def judge(self, figures: Figures) -> tuple[History, bool]:
        """(the history with this report, whether the verdict has changed)."""
        before = History.unpack(self.history.tolist())
        now = judge(figures, before)
        self.history.copy_(torch.from_numpy(now.pack()))
        return now, now.state != before.state


def metrics_of(figures: Figures) -> dict[str, Any]:
    """The fields of a report in metrics.jsonl."""
    found: dict[str, Any] = {
        "window_kl": figures.kl,
        "window_nll": figures.nll,
        "active_units": len(figures.active),
        "mutual_information": figures.mutual_information,
        "mutual_information_ceiling": figures.ceiling,
        "kl_per_dimension": [round(v, 6) for v in figures.kl_per_dimension],
    }
    if figures.shuffle_gap is not None:
        found["shuffle_gap"] = figures.shuffle_gap
    return found | ({"latent_projection": figures.points} if figures.points is not None else {})
