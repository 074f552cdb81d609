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
    from collections.abc import Callable, Mapping

    from isobatch.models.sequence_vae.options import MonitorPace

TOTALS, STEP, COMPARED = "totals", "monitor.step", "monitor.compared"
"""Names of what a step records. TOTALS, always: samples, their tokens, KL and -log p(x|z)."""
LEAST_SAMPLES = 1024
"""Samples of the window of posteriors, at least, whatever the batch."""
COMPARED_SAMPLES, COMPARISONS = 8, 8
"""Samples of a batch that are decoded with their own and another's latent vector; batches that are kept."""
SHOWN_POINTS = 256
"""Points of a latent projection in metrics.jsonl."""


class PosteriorMonitor(nn.Module):
    """Window sums of the last steps, and the posteriors of the last samples."""

    sums: Tensor
    """(window, 4 + 4 L): TOTALS and the columns of `measure` of a step; row `step % window` is the newest."""
    rows: Tensor
    """(samples, 4 L): a row per sample with the columns of `measure`, 0 where there is none yet.

    Means are those around the mean of their step's batch: what moves all of them alike says nothing of the
    input, and would count as information if posteriors of several steps were compared as they are.
    """
    compared: Tensor
    """(COMPARISONS, 3): samples, their -log p(x|z), and the same with others' latent vectors."""
    history: Tensor
    """(History.size(L),): what the verdict needs of earlier reports."""

    def __init__(self, pace: MonitorPace, latent: int, batch_size: int) -> None:
        super().__init__()
        self.pace, self.latent = pace, latent
        self.rows_per_step = min(batch_size, -(-LEAST_SAMPLES // pace.window))
        self.blocks = -(-LEAST_SAMPLES // self.rows_per_step)
        """Steps after which all rows are replaced."""
        self.register_buffer("sums", torch.zeros(pace.window, 4 + 4 * latent))
        self.register_buffer("rows", torch.zeros(self.blocks * self.rows_per_step, 4 * latent))
        self.register_buffer("compared", torch.zeros(COMPARISONS, 3))
        self.register_buffer("history", torch.zeros(History.size(latent)))

    def reset(self) -> None:
        """Forget everything: a new phase begins."""
        for state in (self.sums, self.rows, self.compared, self.history):
            state.zero_()

    def reports_at(self, step: int, total: int) -> bool:
        """Whether a report follows step `step` (from 0) of `total`: in the phase's last step always."""
        return (step + 1) % self.pace.report_every == 0 or step + 1 == total

    def plots_at(self, step: int, total: int) -> bool:
        """Whether the report after step `step` (from 0) of `total` holds a latent projection."""
        regular = (step + 1) % self.pace.report_every == 0 and (step + 1) % self.pace.plot_every == 0
        return regular or step + 1 == total

    def watches(self, step: int, total: int) -> bool:
        """Whether the next report looks back as far as step `step` (from 0) of `total`."""
        until_report = min(-(step + 1) % self.pace.report_every, max(0, total - step - 1))
        return until_report < max(self.pace.window, self.blocks)

    def compares_at(self, step: int) -> bool:
        """Whether step `step` (from 0) also decodes with the latent vectors of other samples."""
        return (step + 1) % self.pace.compare_every == 0 and step >= self.blocks

    def posteriors(self, chosen: Tensor, step: int) -> Posterior:
        """Those of the window with these numbers (B,), moved to where posteriors are before step `step`.

        The window is the same on every process, and the numbers are keyed by the sample, so that the division
        into micro-batches does not matter.
        """
        newest = self.sums[(step - 1) % len(self.sums)]
        mean, logvar = self._posteriors(self.rows[chosen])
        return Posterior(mean + newest[4 : 4 + self.latent] / newest[0].clamp(min=1), logvar)

    def _posteriors(self, rows: Tensor) -> Posterior:
        return Posterior(rows[:, : self.latent], rows[:, self.latent : 2 * self.latent])

    @torch.no_grad()
    def measure(
        self,
        found: Posterior,
        kl: Tensor,
        positions: np.ndarray,
        to_device: Callable[[np.ndarray], Tensor] = torch.from_numpy,
    ) -> Tensor:
        """(1 + rows_per_step, 4 L): what a micro-batch adds to its step. `kl` (B, L), `positions` (B,).

        The columns: mean, log variance, squared mean and KL of each dimension. The first row is the sum over
        the samples; then come the samples of the first positions of the global batch, each in its row.
        """
        each = torch.cat([found.mean, found.logvar, found.mean.square(), kl], dim=1).to(self._double)
        out = torch.zeros(1 + self.rows_per_step, each.shape[1], dtype=each.dtype, device=each.device)
        torch.sum(each, 0, out=out[0])
        chosen = np.flatnonzero(positions < self.rows_per_step)
        out[to_device(1 + positions[chosen])] = each[to_device(chosen)]
        return out

    def nothing(self) -> dict[str, Tensor]:
        """Name -> what changes no sum."""
        device = self.rows.device
        step = torch.zeros(1 + self.rows_per_step, self.rows.shape[1], device=device)
        return {STEP: step, COMPARED: torch.zeros(3, device=device)}

    @property
    def _double(self) -> torch.dtype:
        return torch.float32 if self.rows.device.type == "mps" else torch.float64

    def add(self, step: int, total: int, recorded: Mapping[str, Tensor]) -> None:
        """Take the sums of step `step` of `total`, which are reduced over all processes, into the window."""
        if not self.watches(step, total):
            return
        count = recorded[TOTALS][0]
        found = recorded[STEP].to(self.rows.dtype)
        start = step % self.blocks * self.rows_per_step
        self.sums[step % len(self.sums)] = torch.cat([recorded[TOTALS].to(found.dtype), found[0]])
        block, newest = self.rows[start : start + self.rows_per_step], found[1:]
        centred = newest.clone()
        # Around the mean of n samples themselves the variance is smaller by (n - 1) / n.
        spread = (count / (count - 1).clamp(min=1)).sqrt().to(found.dtype)
        around = newest[:, : self.latent] - (count > 1) * found[0, : self.latent] / count.clamp(min=1)
        centred[:, : self.latent] = around * spread
        block.copy_(torch.where(_present(newest), centred, block))  # the last batch of an epoch may be short
        if self.compares_at(step):
            number = step // self.pace.compare_every % COMPARISONS
            self.compared[number] = recorded[COMPARED].to(self.compared.dtype)

    def report(self, step: int, steps: int, seed: int) -> Figures:
        """The figures of the window after step `step` (from 0) of `steps`. It waits for the device."""
        sums = self.sums.to(self._double)
        total = sums.sum(0)
        kl = total[4 + 3 * self.latent :]
        mean, _, squares = sums[:, 4 : 4 + 3 * self.latent].view(len(sums), 3, self.latent).unbind(1)
        variance = posterior.variance_within(mean, squares, sums[:, :1])
        window = self._posteriors(self.rows[_present(self.rows)[:, 0]].to(self._double))
        means = window.mean
        drawn = np.random.default_rng([seed, step]).standard_normal(tuple(means.shape))
        noise = torch.from_numpy(drawn).to(means)
        points = posterior.projection(means[:SHOWN_POINTS]) if self.plots_at(step, steps) else None
        compared = self.compared.to(self._double).sum(0)
        flat = torch.cat([total[:4], compared, kl, variance]).tolist()
        count, _, _, nll, compared_count, own_nll, other_nll = flat[:7]
        per_dimension = np.array(flat[7:]).reshape(2, self.latent)
        return Figures(
            step=step + 1,
            full=step + 1 >= max(len(self.sums), self.blocks) or step + 1 == steps,
            kl_per_dimension=(per_dimension[0] / count).tolist(),
            variance=per_dimension[1].tolist(),
            reconstruction=nll / count,
            mutual_information=posterior.mutual_information(means, window.logvar, noise),
            ceiling=math.log(len(means)),
            shuffle_gap=(other_nll - own_nll) / compared_count if compared_count else None,
            points=None if points is None else [[round(v, 3) for v in point] for point in points.tolist()],
        )

    def judge(self, figures: Figures) -> tuple[History, bool]:
        """(the history with this report, whether the verdict has changed)."""
        before = History.unpack(self.history.tolist())
        now = judge(figures, before)
        self.history.copy_(torch.from_numpy(now.pack()))
        return now, now.state != before.state


def _present(rows: Tensor) -> Tensor:
    """(N, 1) bool: whether a row is a sample's."""
    return (rows != 0).any(1, keepdim=True)


def metrics_of(figures: Figures) -> dict[str, Any]:
    """The fields of a report in metrics.jsonl."""
    found: dict[str, Any] = {
        "window_kl": figures.kl,
        "window_reconstruction": figures.reconstruction,
        "active_units": len(figures.active),
        "mutual_information": figures.mutual_information,
        "mutual_information_ceiling": figures.ceiling,
        "kl_per_dimension": [round(v, 6) for v in figures.kl_per_dimension],
    }
    if figures.shuffle_gap is not None:
        found["shuffle_gap"] = figures.shuffle_gap
    return found | ({"latent_projection": figures.points} if figures.points is not None else {})
