"""Types of recipe fields whose numbers have a range: `x: Fraction = 0.5` becomes a flag that is checked."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Between:
    """The closed range a number must lie in. `above` makes the lower end open."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def allows(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (value > self.low if self.above else value >= self.low)
            and value <= self.high
        )

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        return low if self.high == math.inf else f"{low} and at most {self.high:g}"


Positive = typing.Annotated[int, Between(1)]
Count = typing.Annotated[int, Between(0)]
Seed = typing.Annotated[int, Between(0, 2**63 - 1)]
Rate = typing.Annotated[float, Between(0)]
Temperature = typing.Annotated[float, Between(0, above=True)]
Fraction = typing.Annotated[float, Between(0, 1, above=True)]
Share = typing.Annotated[float, Between(0, 1)]
Probability = typing.Annotated[float, Between(0, 0.999)]
