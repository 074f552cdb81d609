"""The posterior monitor against slow computations in fp64, and its verdicts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from isobatch.models.sequence_vae import monitor as posterior
from isobatch.models.sequence_vae.monitor import (
    STEP,
    TOTALS,
    Figures,
    History,
    Posterior,
    PosteriorMonitor,
    judge,
    sentence,
)
from isobatch.models.sequence_vae.task import MonitorPace

LATENT = 5


def drawn(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Posterior means and log variances (count, LATENT), some dimensions silent."""
    generator = np.random.default_rng(seed)
    scale = np.array([2.0, 0.5, 0.101, 0.05, 0.0])
    return generator.normal(size=(count, LATENT)) * scale, generator.normal(size=(count, LATENT)) * 0.3 - 0.5


def slow_kl(mean: np.ndarray, logvar: np.ndarray) -> np.ndarray:
    """(LATENT,) mean over samples, element by element."""
    total = np.zeros(LATENT)
    for row in range(len(mean)):
        for dimension in range(LATENT):
            variance = math.exp(logvar[row, dimension])
            total[dimension] += 0.5 * (mean[row, dimension] ** 2 + variance - 1 - math.log(variance))
    return total / len(mean)


def slow_mutual_information(mean: np.ndarray, logvar: np.ndarray, noise: np.ndarray) -> float:
    """By densities of every z under every posterior."""
    gaps = []
    for i in range(len(mean)):
        z = mean[i] + noise[i] * np.exp(logvar[i] / 2)
        densities = np.exp(-((z - mean) ** 2) / (2 * np.exp(logvar))) / np.sqrt(2 * math.pi * np.exp(logvar))
        products = densities.prod(1)
        gaps.append(math.log(products[i]) - math.log(products.mean()))
    return float(np.mean(gaps))


def test_kl_and_mutual_information_agree_with_slow_ones() -> None:
    mean, logvar = drawn(300)
    noise = np.random.default_rng(1).normal(size=mean.shape)
    found = Posterior(torch.from_numpy(mean), torch.from_numpy(logvar)).kl().mean(0)
    assert found.numpy() == pytest.approx(slow_kl(mean, logvar), abs=1e-12)
    ours = posterior.mutual_information(*(torch.from_numpy(a) for a in (mean, logvar, noise)))
    assert ours == pytest.approx(slow_mutual_information(mean, logvar, noise), abs=1e-9)


def test_mutual_information_knows_its_ends() -> None:
    """Nothing is carried where all posteriors are one; all is where they are far apart."""
    noise = torch.randn(200, LATENT, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one = torch.zeros(200, LATENT, dtype=torch.float64)
    assert posterior.mutual_information(one, one, noise) == pytest.approx(0, abs=1e-12)
    apart = 1000.0 * torch.arange(200, dtype=torch.float64)[:, None].expand(-1, LATENT)
    assert posterior.mutual_information(apart, one, noise) == pytest.approx(math.log(200), abs=1e-6)


PACE = MonitorPace(report_every=10, plot_every=20, window=40)
BATCH, TOTAL = 32, 1000


def trained(
    ranks: int, steps: int, monitor: PosteriorMonitor | None = None, first: int = 0
) -> PosteriorMonitor:
    """A monitor that has seen `steps` global batches, each divided over `ranks` and its sums added up."""
    found = monitor or PosteriorMonitor(PACE, LATENT, BATCH)
    for step in range(first, steps):
        mean, logvar = (torch.from_numpy(a).float() for a in drawn(BATCH, seed=step))
        recorded: dict[str, Any] = {TOTALS: torch.zeros(4).double(), STEP: 0}
        for positions in np.array_split(np.random.default_rng(step).permutation(BATCH), ranks):
            part = Posterior(mean[positions], logvar[positions])
            recorded[STEP] = recorded[STEP] + found.measure(part, part.kl(), positions, torch.from_numpy)
            nll = 3.0 * part.mean.square().sum()
            recorded[TOTALS] += torch.stack(
                [nll.new_tensor(len(positions)), nll.new_tensor(7.0 * len(positions)), part.kl().sum(), nll]
            )
        found.add(step, TOTAL, recorded)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_report_agrees_with_a_slow_computation(ranks: int) -> None:
    steps = 60
    figures = trained(ranks, steps).report(steps - 1, TOTAL, seed=3)
    window = [drawn(BATCH, seed=step) for step in range(steps - PACE.window, steps)]
    mean, logvar = (np.concatenate(arrays) for arrays in zip(*window, strict=True))
    assert figures.kl_per_dimension == pytest.approx(slow_kl(mean, logvar), abs=1e-4)
    within = np.mean([array.var(0, ddof=1) for array, _ in window], axis=0)
    assert figures.variance == pytest.approx(within, abs=1e-4)
    assert figures.active == [0, 1, 2]
    assert figures.reconstruction == pytest.approx(3.0 * float((mean**2).sum(1).mean()), rel=1e-5)


def around_the_mean(mean: np.ndarray) -> np.ndarray:
    """Posterior means as the window keeps them: around their batch's mean, with the same variance."""
    kept: np.ndarray = (mean - mean.mean(0)) * np.sqrt(len(mean) / (len(mean) - 1))
    return kept


def test_a_mean_that_drifts_is_no_information() -> None:
    """Posteriors that are one within every batch, and move from step to step."""
    found = PosteriorMonitor(PACE, LATENT, BATCH)
    for step in range(60):
        part = Posterior(torch.full((BATCH, LATENT), 0.05 * step), torch.zeros(BATCH, LATENT))
        recorded = {TOTALS: torch.tensor([BATCH, 7.0 * BATCH, 0, 0])}
        recorded[STEP] = found.measure(part, part.kl(), np.arange(BATCH), torch.from_numpy)
        found.add(step, TOTAL, recorded)
    figures = found.report(59, TOTAL, seed=0)
    assert figures.active == []
    assert figures.mutual_information == pytest.approx(0, abs=1e-6)


def test_a_short_batch_leaves_the_other_posteriors() -> None:
    found = trained(1, 60)
    before = found.rows.clone()
    mean, logvar = (torch.from_numpy(a).float() for a in drawn(3, seed=99))
    part = Posterior(mean, logvar)
    own = found.measure(part, part.kl(), np.arange(3), torch.from_numpy)
    found.add(60, TOTAL, {STEP: own, TOTALS: torch.tensor([3.0, 21, 0, 0])})
    start = 60 % found.blocks * found.rows_per_step
    assert torch.equal(found.rows[start + 3 : start + 26], before[start + 3 : start + 26])
    assert found.rows[start : start + 3, :LATENT].numpy() == pytest.approx(
        around_the_mean(mean.numpy()), abs=1e-6
    )


def test_steps_that_no_report_looks_back_to_are_not_watched() -> None:
    """Every 100 steps a look back of 50: the first half costs nothing, and the report is the same."""
    pace = MonitorPace(report_every=100, plot_every=100, window=50)
    watched = PosteriorMonitor(pace, LATENT, BATCH)
    assert [step for step in (0, 49, 50, 99, 100, 149, 150) if watched.watches(step, TOTAL)] == [50, 99, 150]
    assert watched.watches(20, 30)  # the last step reports too
    every = PosteriorMonitor(pace._replace(report_every=1), LATENT, BATCH)
    seldom, often = (trained(1, 100, monitor).report(99, TOTAL, 0) for monitor in (watched, every))
    assert seldom.kl_per_dimension == often.kl_per_dimension
    assert seldom.mutual_information == often.mutual_information


def figures(step: int, kl: float, active: int = 2, **more: Any) -> Figures:
    """A report of 4 dimensions, the first `active` of them active."""
    variance = [1.0] * active + [0.001] * (4 - active)
    values = {"mutual_information": kl, "ceiling": 6.9, "reconstruction": 50.0, **more}
    return Figures(step=step, full=step >= 100, kl_per_dimension=[kl / 4] * 4, variance=variance, **values)


def states(reports: list[Figures]) -> tuple[list[str], History]:
    history, found = History(), []
    for report in reports:
        history = judge(report, History.unpack(history.pack()))
        found.append(history.state)
    return found, history


def test_the_verdict_of_a_collapse_says_since_when_and_what_to_do() -> None:
    falling = [figures(step, kl) for step, kl in ((80, 6.0), (100, 6.0), (120, 5.0), (140, 3.0))]
    reports = [*falling, figures(160, 1.0, active=1)]
    found, history = states(reports)
    assert found == ["starting", "healthy", "healthy", "healthy", "collapsing"]
    assert history.since == 120
    said = sentence(reports[-1], history, "try this")
    assert "collapsing since step 120" in said
    assert said.endswith("try this")
    found, history = states([*reports, figures(180, 0.05, active=0)])
    assert (found[-1], history.since) == ("collapsed", 180)


@pytest.mark.parametrize(
    "reports",
    [
        [figures(100 + 20 * n, 20 * 0.9**n) for n in range(20)],  # a large KL that falls to a few nats
        [figures(100 + 20 * n, 5 + (n % 4)) for n in range(20)],  # cycles
        [figures(100 + 20 * n, 0.5, active=1) for n in range(5)],  # little, but something is used
    ],
)
def test_the_verdict_of_a_healthy_posterior(reports: list[Figures]) -> None:
    assert set(states(reports)[0]) == {"healthy"}


def test_next_to_no_kl_is_not_healthy() -> None:
    reports = [figures(100 + 20 * n, 0.05, active=1) for n in range(3)]
    found, history = states(reports)
    assert (found, history.since) == (["starting", "collapsing", "collapsing"], 120)
    assert "since step 120: KL 0.05 nats, 1 of 4" in sentence(reports[-1], history, "")


def test_a_kl_that_free_bits_hold_up_may_carry_nothing() -> None:
    """The KL is four nats, but no unit is active and nothing of the input is in it."""
    assert states([figures(120, 4.0, active=0, mutual_information=0.01)])[0] == ["collapsed"]
