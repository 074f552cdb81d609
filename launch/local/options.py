"""Flags that several commands share, and those of `auto` and `resume`: light, as the help reads them."""

from __future__ import annotations

from dataclasses import dataclass

from isobatch.core.number_ranges import KeptOneIn, Positive, Trials


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustOptions:
    """The flag of all commands that use a run."""

    trust: bool = False
    """Of a run that was not trained here: execute its code, read the places that it names, and go on sending
    where it did. It is remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions(TrustOptions):
    """The flags of commands that use a run, and answer."""

    json: bool = False
    """One JSON object on standard output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions(AnswerOptions):
    """The flags of commands that read a run's data, and answer."""

    data: str | None = None
    """Where the data lies now, if it has moved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RedoOptions(DataOptions):
    """The flags of commands that redo steps of a run."""

    base: str | None = None
    """Where that lies now with which it begins (--teacher, --pruned, --model, --from): a run, its final/, or
    a folder that holds each by its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedOptions(AnswerOptions):
    """The flags of commands that show a plan."""

    assume_length: Positive | None = None
    """Plan for samples of this many tokens, where the data, or the model by its name, is not at hand."""
    assume_samples: Positive | None = None
    """With --assume-length: how many samples; by default the rows of --data that are here, else 10,000."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListingOptions:
    """The flag of commands that answer, and read no run's code."""

    json: bool = False
    """One JSON object on standard output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoOptions(AnswerOptions):
    """Flags of `auto` beside the recipe's, the plan's and the run's."""

    trials: Trials | None = None
    """Draws from flags with a range, such as --lr 1e-4..1e-2, a run for each: of its logarithm where it spans
    a decade. The same seed draws the same, and more trials begin with those of fewer."""
    halving: KeptOneIn | None = None
    """All settings of a sweep train the first part of their run, up to an evaluation, and the best one of so
    many goes on from its own checkpoint, until one is left."""
    dry_run: bool = False
    """Train nothing: show the plan, as `plan` does."""
    dump_config: bool = False
    """Train nothing: print all flags with their values, as a file for --config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOptions(AnswerOptions):
    """Flags of `resume` beside the plan's and the run's."""

    skip_step: str | None = None
    """Leave out these steps, from 1, and go back to the checkpoint before them: 1200-1203, or lora:1200-1203
    where there are several phases. The decision stands in the log, so that `verify` knows it."""
    decay: bool = False
    """Begin a run beside this one, RUN-decay-STEP or --name, that goes on from the newest checkpoint of the
    stable part of --schedule wsd or constant, and decays. Its recipe is of so many steps; RUN stays."""
