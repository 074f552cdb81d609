"""Annotated number types with a range: a field `x: Fraction = 0.5` becomes a flag whose range is checked."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Between:
    """A closed range of valid numbers; `above` excludes the lower end."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def allows(self, value: float) -> bool:
        """Whether `value` is finite and within the range."""
        is_high_enough = value > self.low if self.above else value >= self.low
        return math.isfinite(value) and is_high_enough and value <= self.high

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        return low if self.high == math.inf else f"{low} and at most {self.high:g}"


Positive = typing.Annotated[int, Between(1)]
KeptOneIn = typing.Annotated[int, Between(2)]
Trials = typing.Annotated[int, Between(1, 1000)]
Count = typing.Annotated[int, Between(0)]
Seed = typing.Annotated[int, Between(0, 2**63 - 1)]
PortNumber = typing.Annotated[int, Between(0, 65535)]
Rate = typing.Annotated[float, Between(0)]
Fraction = typing.Annotated[float, Between(0, 1, above=True)]
HeldOutShare = typing.Annotated[float, Between(0, 0.9, above=True)]
Share = typing.Annotated[float, Between(0, 1)]
Momentum = typing.Annotated[float, Between(0, 0.999999)]
AboveZero = typing.Annotated[float, Between(0, above=True)]
Precision = typing.Annotated[float, Between(0.5, 0.9999)]
Probability = typing.Annotated[float, Between(0, 0.999)]
