"""The flags of sequence VAEs, and how often their monitor reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isobatch.core.number_ranges import Fraction, Positive, Probability, Rate, Share


@dataclass(frozen=True, slots=True)
class MonitorPace:
    """In steps: between reports and drawings, and how far a report looks back."""

    report_every: int
    plot_every: int
    window: int


PACES = {
    "full": MonitorPace(report_every=20, plot_every=500, window=100),
    "fast": MonitorPace(report_every=100, plot_every=2000, window=50),
}
"""--monitor -> its pace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceVAEOptions:
    """The flags of sequence VAEs."""

    backbone: Literal["gru", "transformer"] = "gru"
    """What encoder and decoder are made of."""
    hidden: Positive = 256
    """Width of encoder and decoder."""
    layers: Positive = 1
    """Layers of each."""
    latent: Positive = 32
    """Dimensions of the latent vector."""
    word_dropout: Probability = 0.0
    """Share of the decoder's inputs that it reads as unknown (Bowman et al. 2016)."""
    kl_schedule: Literal["constant", "linear", "cyclical"] = "constant"
    """The weight of the KL: constant, rising once (Bowman et al. 2016), or in cycles (Fu et al. 2019)."""
    kl_warmup: Fraction = 0.25
    """Share of the steps over which a linear schedule rises."""
    kl_cycles: Positive = 4
    """Cycles of a cyclical schedule."""
    beta: Rate = 1.0
    """The weight of the KL term at its highest (Higgins et al. 2017); 1 is the evidence lower bound."""
    free_bits: Rate = 0.0
    """Nats of KL of a sample, summed over dimensions, that cost nothing (Kingma et al. 2016)."""
    pretrain: Share = 0.0
    """Share of the run that trains an autoencoder first; the decoder then begins anew (Li et al. 2019)."""
    monitor: Literal["full", "fast", "off"] = "full"
    """The posterior monitor: reports every 20 steps (fast: 100), plots every 500 (2000), window 100 (50)."""
    monitor_every: Positive | None = None
    """Steps between reports; by default --monitor decides."""
    monitor_window: Positive | None = None
    """Steps that a report looks back; by default --monitor decides."""
    plot_every: Positive | None = None
    """Steps between drawings; by default --monitor decides."""
    on_collapse: Literal["warn", "stop", "remedy"] = "warn"
    """A collapsing posterior: say so, end the run (exit 3) when it has collapsed, or switch free bits on."""

    @property
    def pace(self) -> MonitorPace | None:
        """The monitor's; None where it is off."""
        if self.monitor == "off":
            return None
        pace = PACES[self.monitor]
        return MonitorPace(
            self.monitor_every or pace.report_every,
            self.plot_every or pace.plot_every,
            self.monitor_window or pace.window,
        )

    @property
    def remedy_nats(self) -> float:
        """Free bits that --on-collapse remedy switches on."""
        return max(2.0, self.latent / 8)
