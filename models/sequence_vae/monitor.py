"""The posterior monitor: sums over a window of steps on the device, and a verdict at every report.

A step's sums ride in the reduction of its losses, so that a window is the same on any number of processes.
It lies in buffers of the model, so that checkpoints hold it.

Letters: B or N samples, L latent dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from isobatch.models.base import StepContext
    from isobatch.models.sequence_vae.task import MonitorPace

ACTIVE = 0.01
"""Variance of the posterior mean over the data above which a dimension is active (Burda et al. 2016)."""
ROWS_AT_A_TIME = 512
"""Rows of the N x N table of densities that are computed at once."""
TOTALS, STEP = "totals", "monitor.step"
"""Names of what a step records. TOTALS, always: samples, their tokens, KL and -log p(x|z)."""
LEAST_SAMPLES = 1024
"""Samples of the window of posteriors, at least, whatever the batch."""
State = Literal["starting", "healthy", "collapsing", "collapsed"]
STATES: tuple[State, ...] = ("starting", "healthy", "collapsing", "collapsed")
COLLAPSED_KL = 0.1
"""Nats per sample below which a posterior without active units has collapsed, and another is collapsing."""
RECOVERED_KL = 0.2
"""Nats per sample above which a posterior that was collapsing is healthy again."""
FALLING_REPORTS, FALL = 3, 0.98
"""A KL falls where each of so many reports in a row has less than this share of the one before."""
FORECAST_REPORTS = 10
"""A KL that falls is collapsing where, at this rate, it is below COLLAPSED_KL within so many reports."""


class Posterior(NamedTuple):
    """q(z|x): a Gaussian with independent dimensions. Both (B, L), fp32."""

    mean: Tensor
    logvar: Tensor

    def kl(self) -> Tensor:
        """(B, L) nats: KL(q(z|x) || N(0, 1)) per dimension (Kingma and Welling 2014, appendix B)."""
        return 0.5 * (self.mean.square() + self.logvar.exp() - 1 - self.logvar)

    def sample(self, noise: Tensor) -> Tensor:
        """(B, L): mean + noise times the standard deviation; `noise` (B, L) is standard normal."""
        return self.mean + noise * (0.5 * self.logvar).exp()


def mean_variance(total: Tensor, squares: Tensor, count: Tensor | float) -> Tensor:
    """(L,) variance over the data of the posterior mean, from its sums and sums of squares (L,)."""
    return squares / count - (total / count).square()


def variance_within(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    """(L,) variance over the data of the posterior mean, within S batches: (S, L), (S, L) and (S, 1).

    A mean that drifts from step to step while the encoder trains does not count. Where no batch has two
    samples there is no such variance, and it is that of all.
    """
    freedom = (count - 1).clamp(min=0).sum()
    if float(freedom) == 0:
        return mean_variance(total.sum(0), squares.sum(0), count.sum().clamp(min=1))
    return (squares - total.square() / count.clamp(min=1)).sum(0) / freedom


def mutual_information(mean: Tensor, logvar: Tensor, noise: Tensor) -> float:
    """Nats: E[log q(z|x) - log q(z)] under the aggregate posterior of these N samples.

    mean, logvar, noise (N, L); one z is drawn for a sample, by `noise`. Hoffman and Johnson 2016,
    estimated as by He et al. 2019, but with the same draws in both terms: their errors cancel. At most log N.
    """
    z = Posterior(mean, logvar).sample(noise)
    # log q(z_i|x_j) without the constant: -0.5 sum_l ((z_il - mean_jl)^2 / var_jl + logvar_jl), as products.
    conditional = -0.5 * (noise.square() + logvar).sum(1)
    precision = (-logvar).exp()
    scaled = mean * precision
    of_other = (mean * scaled + logvar).sum(1)
    aggregate = [
        torch.logsumexp(-0.5 * (rows.square() @ precision.T - 2 * rows @ scaled.T + of_other), dim=1)
        for rows in z.split(ROWS_AT_A_TIME)
    ]
    return float((conditional - torch.cat(aggregate)).mean()) + math.log(len(z))


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """One report: means over the window; nats per sample unless said otherwise."""

    step: int
    """Optimizer steps taken."""
    full: bool
    """Whether the window is full, or the phase ends."""
    kl_per_dimension: list[float]
    variance: list[float]
    """Of the posterior mean over the data, per dimension."""
    reconstruction: float
    """-log p(x|z)."""
    mutual_information: float
    ceiling: float
    """Log of the number of samples in the window: the largest mutual information it can show."""

    @property
    def kl(self) -> float:
        return sum(self.kl_per_dimension)

    @property
    def active(self) -> list[int]:
        """Numbers of the active dimensions."""
        return [number for number, value in enumerate(self.variance) if value > ACTIVE]

    def metrics(self) -> dict[str, Any]:
        """The fields of a report in metrics.jsonl."""
        return {
            "window_kl": self.kl,
            "window_reconstruction": self.reconstruction,
            "active_units": len(self.active),
            "mutual_information": self.mutual_information,
            "mutual_information_ceiling": self.ceiling,
            "kl_per_dimension": [round(v, 6) for v in self.kl_per_dimension],
        }


class History(NamedTuple):
    """What a verdict needs of earlier reports."""

    state: State = "starting"
    since: int = 0
    """Step of the report in which the state began; for collapsing, in which the KL began to fall."""
    kl: float = 0.0
    """Of the report before."""
    falling: int = 0
    """Reports in a row in which the KL fell."""
    falling_since: int = 0

    def pack(self) -> list[float]:
        """As five numbers, for a buffer."""
        return [STATES.index(self.state), *self[1:]]

    @classmethod
    def unpack(cls, values: Sequence[float]) -> History:
        state, since, kl, falling, falling_since = values
        return cls(STATES[int(state)], int(since), kl, int(falling), int(falling_since))


def has_collapsed(active: int, kl: float, mutual_information: float) -> bool:
    """No unit is active, and either the KL or what it says of the input is nothing."""
    return active == 0 and min(kl, mutual_information) < COLLAPSED_KL


def judge(figures: Figures, before: History) -> History:
    """The history with this report: its state is the verdict."""
    step = figures.step
    falls = figures.full and before.kl > 0 and figures.kl < FALL * before.kl
    falling = before.falling + 1 if falls else 0
    falling_since = (before.falling_since or step) if falls else 0
    state, since = _state(figures, before, falling), before.since
    if state != before.state:
        since = (falling_since or step) if state == "collapsing" else step
    return History(state, since, figures.kl, falling, falling_since)


def _state(figures: Figures, before: History, falling: int) -> State:
    if not figures.full:
        return "starting"
    if has_collapsed(len(figures.active), figures.kl, figures.mutual_information):
        return "collapsed"
    least = COLLAPSED_KL if before.state in ("starting", "healthy") else RECOVERED_KL
    if min(figures.kl, figures.mutual_information) < least:
        return "starting" if before.state == "starting" and figures.kl > before.kl else "collapsing"
    if falling >= FALLING_REPORTS:
        forecast = figures.kl * (figures.kl / before.kl) ** FORECAST_REPORTS
        return "collapsing" if forecast < COLLAPSED_KL else "healthy"
    return "healthy"


def sentence(figures: Figures, now: History, advice: str) -> str:
    """The verdict in plain words; `advice`: what to try where it is bad, empty for nothing."""
    active, information = len(figures.active) or "none", figures.mutual_information
    units = f"KL {figures.kl:.2f} nats, {active} of {len(figures.variance)} units active"
    carried = f"{units}, mutual information {information:.2f} of at most {figures.ceiling:.2f} nats"
    said = {
        "starting": f"no verdict on the posterior yet: {units}",
        "healthy": f"the posterior is healthy: {carried}",
        "collapsing": f"the posterior is collapsing since step {now.since}: {units}",
        "collapsed": f"the posterior has collapsed (step {now.since}): {carried}: the decoder ignores the"
        " latent vector",
    }[now.state]
    return f"{said}; {advice}" if advice and now.state.startswith("collaps") else said


class PosteriorMonitor(nn.Module):
    """Window sums of the last steps, and the posteriors of the last samples."""

    sums: Tensor
    """(window, 4 + 4 L): TOTALS and the columns of `measure` of a step; row `step % window` is the newest."""
    rows: Tensor
    """(samples, 4 L): a row per sample with the columns of `measure`, 0 where there is none yet.

    Means are those around the mean of their step's batch: what moves all of them alike says nothing of the
    input, and would count as information if posteriors of several steps were compared as they are.
    """
    history: Tensor
    """(5,): what the verdict needs of earlier reports."""

    def __init__(self, pace: MonitorPace, latent: int, batch_size: int) -> None:
        super().__init__()
        self.pace, self.latent = pace, latent
        self.has_recorded = False
        """Whether this process has recorded, in this phase, all that it ever records."""
        self.rows_per_step = min(batch_size, -(-LEAST_SAMPLES // pace.window))
        self.blocks = -(-LEAST_SAMPLES // self.rows_per_step)
        """Steps after which all rows are replaced."""
        self.register_buffer("sums", torch.zeros(pace.window, 4 + 4 * latent))
        self.register_buffer("rows", torch.zeros(self.blocks * self.rows_per_step, 4 * latent))
        self.register_buffer("history", torch.zeros(5))

    def reset(self) -> None:
        """Forget everything: a new phase begins."""
        self.has_recorded = False
        for state in self.buffers():
            state.zero_()

    def watches(self, step: int, total: int) -> bool:
        """Whether the next report looks back as far as step `step` (from 0) of `total`."""
        until_report = min(-(step + 1) % self.pace.report_every, max(0, total - step - 1))
        return until_report < max(self.pace.window, self.blocks)

    def record(self, found: Posterior, kl: Tensor, step: StepContext) -> None:
        """Record what the window needs of a micro-batch. `kl` (B, L)."""
        assert step.positions is not None
        if self.watches(step.number, step.total_steps):
            step.record(STEP, self.measure(found, kl, step.positions, step.to_device))
        if not self.has_recorded:  # the engine learns from a first step what may be recorded in later ones
            self.has_recorded = True
            step.record(STEP, self.rows.new_zeros(1 + self.rows_per_step, self.rows.shape[1]))

    @torch.no_grad()
    def measure(
        self, found: Posterior, kl: Tensor, positions: np.ndarray, to_device: Callable[[np.ndarray], Tensor]
    ) -> Tensor:
        """(1 + rows_per_step, 4 L): what a micro-batch adds to its step. `kl` (B, L), `positions` (B,).

        The columns: mean, log variance, squared mean and KL of each dimension. The first row is the sum over
        the samples; then come the samples of the first positions of the global batch, each in its row.
        """
        each = torch.cat([found.mean, found.logvar, found.mean.square(), kl], dim=1).to(self._double)
        out = each.new_zeros(1 + self.rows_per_step, each.shape[1])
        torch.sum(each, 0, out=out[0])
        chosen = np.flatnonzero(positions < self.rows_per_step)
        out[to_device(1 + positions[chosen])] = each[to_device(chosen)]
        return out

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

    def report(self, step: int, steps: int, seed: int) -> Figures:
        """The figures of the window after step `step` (from 0) of `steps`. It waits for the device."""
        sums = self.sums.to(self._double)
        total = sums.sum(0)
        mean, _, squares = sums[:, 4 : 4 + 3 * self.latent].view(len(sums), 3, self.latent).unbind(1)
        variance = variance_within(mean, squares, sums[:, :1])
        samples = self.rows[_present(self.rows)[:, 0]].to(self._double)
        means, logvar, *_ = samples.split(self.latent, dim=1)
        drawn = np.random.default_rng([seed, step]).standard_normal(tuple(means.shape))
        information = mutual_information(means, logvar, torch.from_numpy(drawn).to(means))
        flat = torch.cat([total[:4], total[4 + 3 * self.latent :], variance]).tolist()
        count, _, _, nll, *per_dimension = flat
        return Figures(
            step=step + 1,
            full=step + 1 >= max(len(self.sums), self.blocks) or step + 1 == steps,
            kl_per_dimension=[value / count for value in per_dimension[: self.latent]],
            variance=per_dimension[self.latent :],
            reconstruction=nll / count,
            mutual_information=information,
            ceiling=math.log(len(means)),
        )

    def judge(self, figures: Figures) -> tuple[History, bool]:
        """(the history with this report, whether the verdict has changed)."""
        before = History.unpack(self.history.tolist())
        now = judge(figures, before)
        self.history.copy_(torch.tensor(now.pack(), dtype=torch.float64))
        return now, now.state != before.state


def _present(rows: Tensor) -> Tensor:
    """(N, 1) bool: whether a row is a sample's."""
    return (rows != 0).any(1, keepdim=True)
