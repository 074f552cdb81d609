"""The data of mine.py: points of the plane from a csv file, or two half circles made here."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isobatch import Columns, Data, UserError

HEADER = ["x", "y", "label"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PointOptions:
    """Flags of this kind of data."""

    holdout: float = 0.2
    """Share of the points that is kept for validation."""


class Points(Data):
    """Columns `x` (n, 2) and `label` (n,), 0 or 1, both float32."""

    Options = PointOptions

    def check(self) -> None:
        if not 0 < self.options.holdout < 1:
            raise UserError(f"--holdout {self.options.holdout:g}: must be above 0 and below 1")
        if self._file is not None and not self._file.is_file():
            raise UserError(f"--data {self.recipe.data}: there is no such file")

    def identity(self) -> dict[str, Any]:
        """Prepared data is kept under this: it must change whenever `read` would return something else."""
        content = self._file.read_bytes() if self._file else b""
        return {"points": hashlib.sha256(content).hexdigest(), "holdout": self.options.holdout}

    def read(self) -> Mapping[str, Columns]:
        table = _half_circles(400) if self._file is None else _read_csv(self._file)
        order = np.random.default_rng(0).permutation(len(table))
        held_out = max(1, round(self.options.holdout * len(table)))
        return {"valid": _columns(table[order[:held_out]]), "train": _columns(table[order[held_out:]])}

    def read_rows(self) -> Columns:
        """Points to predict: the label is not needed."""
        return {"x": _read_csv(Path(self.recipe.data), HEADER[:2])}

    @property
    def _file(self) -> Path | None:
        return None if self.recipe.data == "demo" else Path(self.recipe.data).expanduser()


def _columns(table: np.ndarray) -> Columns:
    return {"x": table[:, :2], "label": table[:, 2]}


def _read_csv(file: Path, header: list[str] = HEADER) -> np.ndarray:
    """(n, len(header)) float32."""
    with file.open(newline="", encoding="utf-8") as stream:
        rows = csv.DictReader(stream)
        if missing := [name for name in header if name not in (rows.fieldnames or [])]:
            raise UserError(f"{file}: has no column {missing[0]}")
        return np.array([[row[name] for name in header] for row in rows], np.float32).reshape(-1, len(header))


def _half_circles(count: int) -> np.ndarray:
    """(count, 3) float32: two half circles that reach into each other."""
    generator = np.random.default_rng(0)
    angle, label = generator.uniform(0, np.pi, count), np.arange(count) % 2
    side = 1 - 2 * label
    x = np.cos(angle) * side + label + generator.normal(0, 0.1, count)
    y = np.sin(angle) * side + 0.5 * label + generator.normal(0, 0.1, count)
    return np.stack([x, y, label], axis=1).astype(np.float32)
