"""`forget`: a run without certain rows, from the last checkpoint before the first step that saw one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import check_fields
from isobatch.core.measures import printable
from isobatch.core.terminal.status import doing
from isobatch.engine import consent
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import FolderTakenError, RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.launch_run import launch_run
from isobatch.launch.local.run_setup import (
    TrustOptions,
    is_prepared,
    locate_data,
    plan_with_remarks,
    store_plan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.forensics.forgotten_run import Forgetting
    from isobatch.engine.forensics.run_order import RunOrder

MOST_ROWS = 100_000
"""Most rows that a recipe names; more are data to prepare anew."""
WAYS = ("sample", "samples", "text")
CLAIM = """\
no batch of {folder} held {rows}, and the weights that it began with had not seen it.
Not made anew: what the preparation took from all data (as a tokenizer that was trained on it), and weights of
another run or model that this one began with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetOptions(TrustOptions):
    """Flags of `forget`."""

    sample: str | None = None
    """Rows of the training data as it was prepared, the first is 0: 5,7,20-29."""
    samples: str | None = None
    """A file with such numbers, separated by lines, blanks or commas."""
    text: str | None = None
    """All rows that hold this text, as `seen --text` finds them."""
    name: str | None = None
    """Name of the new run; by default the run's, with -forgot behind it."""
    data: str | None = None
    """Where the data lies now, if it has moved."""
    dry_run: bool = False
    """Only say what would be trained anew."""
    quiet: bool = False
    """Print results and errors only."""
    json: bool = False
    """One JSON object on standard output, and nothing else."""

    def __post_init__(self) -> None:
        check_fields(self)
        given = [f"--{name}" for name in WAYS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "which rows"
            raise UserError(f"forget: {found}: give one of --sample, --samples or --text")
        RunOptions(name=self.name)  # which refuses what is no name


def forget(words: Sequence[str]) -> int:
    """Usage: forget RUN --sample 5,7,20-29 | --samples FILE | --text "..." [--name NAME] [--dry-run] [--json]

    Trains a new run, whose recipe leaves the rows out of every batch, from the run's last checkpoint before
    it saw the first of them. Rows are numbered as `seen` shows them.
    """
    positional, flags = split_words(words)
    if len(positional) != 1:
        raise UserError("forget: give the folder of one run, as in: forget RUN --sample 1204")
    options = command_options(flags, ForgetOptions, "forget")
    run = RunFolder.open(positional[0])
    consent.require(run.recipe, run.folder, options.trust, run.options().sends())
    return forget_rows(run, options)


def forget_rows(run: RunFolder, options: ForgetOptions) -> int:
    """What `forget` does; its exit code. Raises UserError."""
    from isobatch.engine.forensics.forgotten_run import plan_forgetting
    from isobatch.engine.forensics.run_order import open_order

    quiet = options.quiet or options.json
    run.refuse_if_training()
    if _folder(run, options).exists():
        raise _taken(run, options)
    locate_data(run, run.recipe, options.data)
    order = open_order(run, is_prepared(run))
    rows = _rows(order, options)
    found = plan_forgetting(run, order, rows)
    said: dict[str, Any] = {"run": str(run.folder), "rows": len(rows)}
    if found is None:
        return _say(said, f"no step of {run.folder} holds {_any_of(rows)}: nothing is trained anew", options)
    said |= _facts(found)
    if not options.json and (options.dry_run or not quiet):
        print(printable(_sentence(run, found, rows)))
    if options.dry_run:
        return _say(said, "", options)
    fresh = _begin(run, order, found, options)
    with fresh.lock("launch"):
        asked = workload_of(fresh.recipe).plan_options(fresh.recipe.preset, {})
        store_plan(fresh, plan_with_remarks(fresh.recipe, fresh.facts, asked, quiet))
        verdict = launch_run(fresh, fresh.options())
    said |= {"forgot": str(fresh.folder), "status": fresh.status()}
    claim = CLAIM.format(folder=fresh.folder, rows=_any_of(rows)) if verdict.code == DONE else ""
    _say(said, claim, options)
    return verdict.code


def _begin(run: RunFolder, order: RunOrder, found: Forgetting, options: ForgetOptions) -> RunFolder:
    """The new run's folder, with what the run did before it saw a row."""
    import dataclasses

    from isobatch.engine.forensics.forgotten_run import begin_forgotten_run

    doing("copying what was before")
    quiet = options.quiet or options.json
    run_options = dataclasses.replace(run.options(), quiet=quiet or run.options().quiet)
    try:
        fresh = RunFolder.create(_folder(run, options), found.recipe, order.facts, run_options)
    except FolderTakenError:
        raise _taken(run, options) from None
    consent.remember(fresh.recipe, run_options.sends())  # what it brings and names is the run's own
    begin_forgotten_run(run, fresh, found)
    return fresh


def _folder(run: RunFolder, options: ForgetOptions) -> Path:
    """The new run's, beside the run's."""
    return run.folder.resolve().with_name(options.name or f"{run.folder.resolve().name}-forgot")


def _taken(run: RunFolder, options: ForgetOptions) -> UserError:
    return UserError(f"{_folder(run, options)} is there already: choose another --name")


def _rows(order: RunOrder, options: ForgetOptions) -> list[int]:
    """The rows asked for, ascending. Raises UserError."""
    if options.text is not None:
        from isobatch.engine.forensics.seen_rows import training_rows_with

        rows = training_rows_with(order, options.text)
        if not rows:
            raise UserError("--text: no training row holds it (`seen --text` looks in every split)")
    elif options.samples is not None:
        path = Path(options.samples).expanduser()
        try:
            rows = _numbers(path.read_text(encoding="utf-8"), f"--samples {path}")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--samples {path}: cannot be read: {error}") from None
    else:
        rows = _numbers(options.sample or "", f"--sample {options.sample}")
    if len(rows) > MOST_ROWS:
        raise UserError(f"{len(rows):,} rows are more than {MOST_ROWS:,}: leave them out of the data")
    return rows


def _numbers(text: str, where: str) -> list[int]:
    """Numbers and ranges of them, ascending. Raises UserError where there is none, or another word."""
    found: set[int] = set()
    for word in text.replace(",", " ").split():
        first, dash, last = word.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise UserError(f"{where}: {word[:40]!r} is no row: give numbers, as in 5,7,20-29")
        stop = int(last or first) + 1
        if stop - int(first) > MOST_ROWS:
            raise UserError(
                f"{where}: {word} are more than {MOST_ROWS:,} rows: begin a run on data without them"
            )
        found.update(range(int(first), stop))
    if not found:
        raise UserError(f"{where}: names no row")
    return sorted(found)


def _facts(found: Forgetting) -> dict[str, Any]:
    return {
        "first_step": {"phase": found.first.phase, "step": found.first.step},
        "goes_on_from": found.saved.name if found.saved else None,
        "steps": found.done,
        "steps_made_again": found.retrained,
    }


def _sentence(run: RunFolder, found: Forgetting, rows: Sequence[int]) -> str:
    first, share = found.first, 100 * found.retrained / max(1, found.done)
    start = f"from {found.saved.name}" if found.saved else "from the beginning: no checkpoint is older"
    return (
        f"step {first.step} of {first.phase} is the first of {run.folder} that holds {_any_of(rows)}:"
        f" {found.retrained:,} of {found.done:,} steps ({share:.0f} %) are made again, {start}"
    )


def _any_of(rows: Sequence[int]) -> str:
    return f"one of the {len(rows):,} rows" if len(rows) > 1 else f"row {rows[0]:,}"


def _say(said: dict[str, Any], text: str, options: ForgetOptions) -> int:
    if options.json:
        print(atomic_files.json_text(said))
    elif text:
        print(printable(text))
    return DONE
