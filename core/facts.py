"""Facts: counts and lengths of the prepared data. Computed once by `prepare`, cached by content."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isobatch.core.errors import UserError

REMARKS = ("notes", "turns", "untaken", "held_out")
"""Fields of `extra` that say something of the data and decide nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Counts and lengths of prepared data; small enough for JSON, enough to plan from."""

    fingerprint: str
    """Hash of the prepared arrays: two runs with one fingerprint saw the same samples."""
    folder: str
    """Where the prepared arrays are on this machine; empty where the lengths are only assumed."""
    samples: dict[str, int]
    """Number of samples per split: train, and valid and test if they exist."""
    lengths: tuple[int, ...]
    """Quantiles of the training samples' lengths in tokens, shortest to longest."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the kind of data adds: vocabulary, labels, words, bytes, files of a tokenizer."""
    digest: str = ""
    """The digest of the digests of all prepared arrays; empty where there were none yet."""

    @property
    def longest(self) -> int:
        """Length of the longest training sample, in tokens."""
        return self.lengths[-1]

    @property
    def mean_length(self) -> float:
        """Mean length of the training samples, in tokens, estimated from the quantiles."""
        return sum(self.lengths) / len(self.lengths)

    @property
    def notes(self) -> list[str]:
        """Lines for the user on the data."""
        return list(self.extra.get("notes", []))

    @property
    def is_streamed(self) -> bool:
        """Whether the samples stay in a store, and the prepared arrays are an index of them."""
        return "stored_bytes" in self.extra

    def differing_fields(self, other: Facts) -> list[str]:
        """Names of the fields that differ, but for `folder` and REMARKS."""
        values, other_values = self._compared(), other._compared()
        return [name for name in values if values[name] != other_values[name]]

    def _compared(self) -> dict[str, Any]:
        extra = {name: value for name, value in self.extra.items() if name not in REMARKS}
        return {**self.to_dict(), "folder": "", "extra": extra}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Facts:
        """Facts from facts.json. Raises UserError where fields are missing."""
        names = {f.name for f in dataclasses.fields(cls)} - {"extra", "digest"}
        if missing := sorted(names - values.keys()):
            raise UserError(f"facts.json lacks {', '.join(missing)}: it was changed or cut short")
        return cls(**{**values, "lengths": tuple(values["lengths"])})
