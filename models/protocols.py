"""What some workloads can do beside training: a task has the methods, and commands ask for the protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from isobatch.core.facts import Facts
from isobatch.models.base import Batch

Batches = Callable[..., "Iterable[Batch]"]
"""All samples of the held-out split, once per call, on the host; `batches("train")`: those of training."""
ReportRow = dict[str, Any]


@runtime_checkable
class Exports(Protocol):
    """`isobatch export`: a finished model in other forms."""

    @property
    def exports(self) -> tuple[str, ...]:
        """The forms there are."""

    def export_as(
        self, kind: str, final: Path, folder: Path, facts: Facts, batches: Batches
    ) -> Mapping[str, Any]:
        """Write one of `exports` into an empty folder, and hold it against the trained model.

        Returns figures of the comparison over `batches`. Raises ExportError where it answers otherwise.
        """


@runtime_checkable
class Generates(Protocol):
    """`isobatch generate`, `chat`, `predict` and `serve`: a language model."""

    def writer(self, final: Path, bits: int | None = None) -> Callable[[Any, Any], Any]:
        """The model in `final`, read once: (prompt, Sampling) -> the `TextStream` behind it (both of
        models/causal_lm/generation.py).

        A prompt is a text, or a list of (text, whether it is an answer) in order. `bits` of its matrices (16,
        8 or 4); by default those of training.
        """


@runtime_checkable
class OpensItemLists(Protocol):
    """`isobatch recommend`, `predict` and `serve` of a recommender."""

    def open_lists(self, final: Path, by: str = "best") -> Any:
        """`Recommendations` (models/recommendation/recommendations.py) whose errors are UserErrors.

        Lists are by the `best` on the validation data, the model in `final`, or a baseline kept beside it.
        """

    def live_flags(self, run: str, metrics: Mapping[str, Any], steps: str) -> str:
        """Of the run that learns from all data: where the trained network ranks the lists the recipe alone,
        anew for as many steps as were best, else the run, whose baselines keep their settings.
        """

    def lists_by(self, metrics: Mapping[str, Any]) -> str:
        """The baseline that ranks better than the model that was trained, by a run's metrics; else empty."""


@runtime_checkable
class KeepsBaselines(Protocol):
    """`isobatch evaluate` of a model beside which final/ keeps baselines, or what answers go by."""

    def kept_metrics(self, model: Any, final: Path, batches: Batches, facts: Any) -> Mapping[str, Any]:
        """Metrics of the baselines, and how the model stands to them; of `model` only what they need. `facts`
        of the run where simple models are to be fitted, too, else None.
        """


Predictor = Callable[[Sequence[Any]], list[dict[str, Any]]]
"""Samples -> named values for each, in order. An answer does not depend on the other samples."""


@runtime_checkable
class Predicts(Protocol):
    """`isobatch predict` and `serve`: a model that answers texts."""

    forms: ClassVar[tuple[str, ...]]
    """The forms in which it may run, first the trained one."""

    def open_predictor(self, final: Path, exports: Path, form: str) -> Predictor:
        """The model, read once, in one of `forms`. Raises UserError where that was not written."""


@runtime_checkable
class ScoresAnswers(Protocol):
    """`isobatch predict` of a reward model: samples are prompts with answers, as rows of tokens."""

    def open_scorer(self, final: Path, facts: Facts) -> Predictor:
        """The model, read once: (tokens,) int arrays -> what it says of each."""


@runtime_checkable
class PredictsBatches(Protocol):
    """`isobatch predict` of a task of your own. Its Data reads the rows (`Data.read_rows`)."""

    def predict(self, model: Any, batch: Batch) -> Mapping[str, Any]:
        """Name -> tensor (B, ...) of what the model says of each sample. Called in evaluation mode."""


@runtime_checkable
class EncodesLatents(Protocol):
    """`isobatch vae`."""

    def open_codec(self, final: Path) -> Any:
        """`SequenceCodec` (models/sequence_vae/generation.py): the model in `final`, read once."""


@runtime_checkable
class Reports(Protocol):
    """`isobatch report`: figures of their own, and models that are measured and compared."""

    def report(self) -> TaskReport:
        """The part of the report that only this family of tasks can make."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure: `draw` gets so many matplotlib axes; width and height are in inches."""

    title: str
    """Of the section; empty for none."""
    draw: Callable[..., None]
    width: float
    height: float
    columns: int = 1


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of text with a title, and a note of what its figures are."""

    title: str
    note: str
    head: list[str]
    rows: list[list[str]]


class TaskReport:
    """What the tasks of one family add to the report of a run. Tasks of one family return one class."""

    curves: ClassVar[tuple[str, ...]] = ()
    """Figures of metrics.jsonl that are drawn over the steps beside the loss."""
    reported: ClassVar[tuple[str, ...]] = ()
    """Fields of metrics.jsonl that only some steps have: `run_drawings` gets those steps' rows."""

    def run_drawings(self, run: Mapping[str, Any]) -> list[Drawing]:
        """Figures of one run: its name, task, metrics, curves, and the rows with fields of `reported`."""
        return []
