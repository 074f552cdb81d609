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
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.measures import printable
from isobatch.models import hub

if TYPE_CHECKING:
    from isobatch.core.facts import Facts
    from isobatch.core.recipe import Recipe

FILE = hub.CARD_FILE
WITH_THESE_WEIGHTS = "with the weights in this folder"
OPEN_WEIGHTS = """\
from safetensors.torch import load_file

weights = load_file("model.safetensors")
print({name: tuple(tensor.shape) for name, tensor in weights.items()})
"""
"""Usage of a model whose task says nothing better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """What a task says of its finished model."""

    title: str
    """What it is, as in `Text classifier`."""
    summary: str = ""
    """A sentence or two on what it does."""
    usage: str = OPEN_WEIGHTS
    """Lines that run in the model's folder."""
    language: str = "python"
    """Of the lines: python or sh."""
    remark: str = ""
    """What a user of the lines must know."""
    hub_fields: Mapping[str, str] = field(default_factory=dict)
    """For the card's front matter: library_name, pipeline_tag."""


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


def render(model: ModelDescription, recipe: Recipe, facts: Facts, measured: HeldOutFigures) -> str:
    """The text of the card."""
    base = _base_model(recipe)
    sections = {
        "Data": _data(recipe, facts),
        "Results": _results(facts, measured),
        "Training": _training(recipe, measured, base),
        "Licence": _licence(recipe, base),
    }
    return (
        _head(model, recipe) + "".join(f"\n\n## {title}\n\n{text}" for title, text in sections.items()) + "\n"
    )


def render_export(model: ModelDescription, recipe: Recipe, of_final: str, measured_on: str) -> str:
    """The card of another form of a model, from that of final/, whose figures it keeps; empty without one.

    `measured_on`: which weights those were measured with.
    """
    _, found, rest = of_final.partition("\n\n## Data\n")
    return _head(model, recipe) + found + rest.replace(WITH_THESE_WEIGHTS, measured_on) if found else ""


def _head(model: ModelDescription, recipe: Recipe) -> str:
    """The fields by which the Hub sorts models, what the model is, and how it is used."""
    import yaml

    base, fields = _base_model(recipe), dict(model.hub_fields)
    if base is not None and hub.is_id(base):
        fields["base_model"] = base
    if base is not None and (licence := licence_of(base, recipe.revision)):
        fields["license"] = licence
    parts = [
        f"---\n{yaml.safe_dump(fields)}---" if fields else "",
        f"# {_plain(model.title)}",
        _plain(model.summary),
        f"## Use\n\nIn this folder{f' ({model.remark})' if model.remark else ''}:",
        f"```{model.language}\n{model.usage.strip()}\n```",
    ]
    return "\n\n".join(filter(None, parts))


def _base_model(recipe: Recipe) -> str | None:
    """The model that training started from, a folder or a hub id; None for one trained from scratch."""
    name = recipe.model
    return name if name and (hub.is_id(name) or Path(name).expanduser().is_dir()) else None


def _short_name(place: str) -> str:
    """A hub id as it is; of a path the last folder, of a run's final/ the run: places are this machine's."""
    path = Path(place).expanduser()
    if not path.exists():
        return place
    return path.parent.name if path.name == "final" else path.name


def licence_of(model: str, revision: str | None) -> str | None:
    """The licence that the model card of a folder, or of a hub id in the cache, names; None where none."""
    import yaml
    from huggingface_hub import metadata_load

    licence = None
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        licence = (metadata_load(Path(hub.local_path_or_id(model, revision)) / FILE) or {}).get("license")
    return _plain(licence) if isinstance(licence, str) else None


def _data(recipe: Recipe, facts: Facts) -> str:
    sizes = ", ".join(f"{count:,} in {split}" for split, count in facts.samples.items())
    sizes = sizes.replace(" in ", " samples in ", 1)
    notes = "".join(f"\n- {_plain(note)}" for note in facts.extra.get("notes", []))
    named = f"{_plain(_short_name(recipe.data))}: {sizes} (fingerprint {facts.fingerprint})."
    return f"{named}\n{notes}" if notes else named


def _results(facts: Facts, measured: HeldOutFigures) -> str:
    splits = measured.metrics
    remark = f"\n\n{_plain(measured.remark)}" if measured.remark else ""
    if not splits:
        return f"Nothing was held out, so nothing was measured.{remark}"
    counts = " and ".join(f"all {facts.samples[split]:,} samples of {split}" for split in splits)
    chosen = f" They are the best of the run's evaluations by {measured.chosen_by} on valid, which makes that"
    chosen = f"{chosen} figure a little too good." if measured.chosen_by else ""
    names = dict.fromkeys(
        name
        for figures in splits.values()
        for name, value in figures.items()
        if _figure(value) and "latency" not in name
    )
    rows = [["", *splits], ["---"] * (len(splits) + 1)]
    rows += [[name, *(_figure(figures.get(name)) for figures in splits.values())] for name in names]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"Measured on {counts}, {WITH_THESE_WEIGHTS}.{chosen}\n\n{table}{remark}"


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


def _training(recipe: Recipe, measured: HeldOutFigures, base: str | None) -> str:
    preset = f" ({_plain(recipe.model)})" if recipe.model else ""
    start = f"from {_plain(_short_name(base))}" if base else f"from scratch{preset}"
    return (
        f"isobatch, task {_plain(Path(recipe.task).name)}, {start}: {measured.steps:,} steps of"
        f" {recipe.batch_size} samples, learning rate {recipe.lr:g}, seed {recipe.seed}, recipe"
        f" {recipe.hash()}. `isobatch verify RUN` checks the whole run."
    )


def _licence(recipe: Recipe, base: str | None) -> str:
    if base is None:
        return "The model was trained from scratch: no other model's licence applies. The data has its own."
    name, licence = _plain(_short_name(base)), licence_of(base, recipe.revision)
    said = f"says {licence}" if licence else "is not known here: see where it came from"
    return f"The licence of {name}, from which this was trained, {said}. The data has its own."


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    return re.sub(r"([\\|`<\[*#])", r"\\\1", " ".join(printable(text).split()))
