"""What is known of the groups of a shard, kept by itself: shards that are indexed are not read again."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.data.base import load, save
from isobatch.data.streaming.group_table import GroupPlace
from isobatch.data.streaming.shards import Extent
from isobatch.data.streaming.source import LENGTH

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.data.base import Column


@dataclass(slots=True)
class IndexedGroup:
    """A group of rows, and what is known of its samples."""

    place: GroupPlace
    rows: int
    digest: bytes
    sizes: dict[str, int]
    columns: dict[str, np.ndarray]
    """LENGTH and weights, (samples,) each."""

    @property
    def samples(self) -> int:
        return len(self.columns[LENGTH]) if self.columns else 0


def save_part(folder: Path, groups: list[IndexedGroup]) -> None:
    """Write a shard's part, all of it or nothing; another process may write the same one."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    described: list[dict[str, Any]] = [
        {
            "extent": list(group.place.extent),
            "rows": group.rows,
            "samples": group.samples,
            "digest": group.digest.hex(),
            "sizes": group.sizes,
        }
        for group in groups
    ]
    save(temporary, joined(groups))
    (temporary / "groups.json").write_text(json.dumps(described))
    try:
        temporary.replace(folder)
    except OSError:
        if not folder.is_dir():
            raise  # else another process was first
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_part(folder: Path, shard: int) -> list[IndexedGroup]:
    columns, first = {name: np.asarray(column) for name, column in load(folder).items()}, 0
    groups = []
    for one in json.loads((folder / "groups.json").read_text()):
        stop = first + one["samples"]
        own = {name: column[first:stop] for name, column in columns.items()}
        place = GroupPlace(shard, Extent(*one["extent"]))
        groups.append(IndexedGroup(place, one["rows"], bytes.fromhex(one["digest"]), one["sizes"], own))
        first = stop
    return groups


def joined(groups: list[IndexedGroup]) -> dict[str, Column]:
    kept = [group.columns for group in groups if group.samples]
    return {name: np.concatenate([one[name] for one in kept]) for name in kept[0]} if kept else {}
