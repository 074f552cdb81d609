"""The README.md of final/: what the model is, how to use it, its data, its measured quality, its licence.

It holds what follows from the recipe, the facts and the weights alone, so that the same run writes the same
card on any machine.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from isobatch.core.facts import Facts
from isobatch.core.measures import printable
from isobatch.core.recipe import Recipe
from isobatch.core.terminal import rendered
from isobatch.models import hub

FILE = hub.CARD_FILE
WITH_THESE_WEIGHTS = "with the weights in this folder"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """What a task says of its finished model."""

    title: str
    """What it is, as in `Text classifier`."""
    summary: str = ""
    """A sentence or two on what it does."""
    usage: str = ""
    """Lines that run in the model's folder; by default they open its weights."""
    language: str = "python"
    """Of the lines: python or sh."""
    remark: str = ""
    """What a user of the lines must know."""
    hub_fields: Mapping[str, str] = field(default_factory=dict)
    """For the card's front matter: library_name, pipeline_tag."""


def usage_lines(task_file: str, **values: Any) -> str:
    """The lines of the template that lies beside a task's file, with these values."""
    return rendered(task_file, "usage", **values)


class HeldOutFigures(NamedTuple):
    """The held-out figures of the exported weights."""

    metrics: Mapping[str, Mapping[str, Any]]
    """Split -> name -> figure."""
    steps: int
    """Optimizer steps behind the weights, of all phases."""
    chosen_by: str
    """The metric of the valid split by which the checkpoint was chosen; empty where it is the last one."""
    remark: str = ""
    """What the task says of them."""


def render(
    model: ModelDescription,
    recipe: Recipe,
    facts: Facts,
    measured: HeldOutFigures,
    here: Recipe | None = None,
) -> str:
    """The text of the card. `here`: the recipe with the places where what it names has moved to."""
    splits = measured.metrics
    names = [n for found in splits.values() for n in found if _figure(found[n]) and "latency" not in n]
    rows = [[n, *(_figure(found.get(n)) for found in splits.values())] for n in dict.fromkeys(names)]
    sizes = ", ".join(f"{count:,} in {split}" for split, count in facts.samples.items())
    said = {"samples": sizes.replace(" in ", " samples in ", 1), "data": _short_name(recipe.data)}
    said["measured_on"] = " and ".join(f"all {facts.samples[split]:,} samples of {split}" for split in splits)
    return _card(model, recipe, here, of_final="", facts=facts, measured=measured, rows=rows, **said)


def render_export(model: ModelDescription, recipe: Recipe, of_final: str, measured_on: str) -> str:
    """The card of another form of a model, from that of final/, whose figures it keeps; empty without one.

    `measured_on`: which weights those were measured with.
    """
    _, found, rest = of_final.partition("\n\n## Data\n")
    return _card(model, recipe, of_final=rest.replace(WITH_THESE_WEIGHTS, measured_on)) if found else ""


def _card(model: ModelDescription, recipe: Recipe, here: Recipe | None = None, **values: Any) -> str:
    import yaml

    name, here, fields = recipe.model, here or recipe, dict[str, Any](model.hub_fields)
    # A folder or a hub id; None for a model trained from scratch.
    base = name if name and (hub.is_id(name) or Path(str(here.model)).expanduser().is_dir()) else None
    licence = licence_of(str(here.model), recipe.revision) if base else None
    fields |= {"base_model": base} if base and hub.is_id(base) else {}
    fields |= {"license": licence} if licence else {}
    fields |= {"datasets": [recipe.data]} if hub.is_id(recipe.data) and not Path(here.data).exists() else {}
    fields |= {"tags": ["isobatch", recipe.task.split("/")[-1]]} if fields else {}
    values |= {"model": model, "recipe": recipe, "licence": licence, "weights": WITH_THESE_WEIGHTS}
    values |= {"base": base and _short_name(base), "fields": yaml.safe_dump(fields) if fields else ""}
    text = rendered(__file__, "model_card.md", plain=_plain, **values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _short_name(place: str) -> str:
    """A hub id as it is; of a path the last folder, of a run's final/ the run: places are this machine's."""
    return hub.last_name(place) if Path(place).expanduser().exists() else place


def licence_of(model: str, revision: str | None) -> str | None:
    """The licence that the model card of a folder, or of a hub id in the cache, names; None where none."""
    import yaml
    from huggingface_hub import metadata_load

    licence = None
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        licence = (metadata_load(Path(hub.local_path_or_id(model, revision)) / FILE) or {}).get("license")
    return _plain(licence) if isinstance(licence, str) else None


def _figure(value: Any) -> str:
    """A number, a word or an interval as text; empty for longer lists and for what is missing."""
    match value:
        case [float(low), float(high)]:
            return f"{low:.4f} to {high:.4f}"
        case str():
            return _plain(value)
        case float():
            return f"{value:.4f}"
        case int():
            return f"{value:,}"
    return ""


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    return re.sub(r"([\\|`<\[*#])", r"\\\1", " ".join(printable(text).split()))
