"""`audit`: checks a receipt against data, a run's folder if there is one, and steps made again here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, FAILED, TrainingError, UserError
from isobatch.core.facts import Facts
from isobatch.core.measures import printable
from isobatch.core.number_ranges import Positive
from isobatch.core.plan import Plan
from isobatch.core.recipe import Recipe
from isobatch.core.terminal.status import doing
from isobatch.engine import consent
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.verification.proof import within
from isobatch.launch.forensics import signatures
from isobatch.launch.forensics.receipt import FILE, receipt_of
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import OtherDataError, TrustOptions, compare_source, locate_data
from isobatch.launch.local.verify_run import VerifyOptions, redo_first_steps, verify_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Content = dict[str, Any]
"""A receipt, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOptions(TrustOptions):
    """Flags of `audit`."""

    run: str | None = None
    """The run's folder, if it was handed over; by default the receipt's own where it lies in one."""
    steps: Positive = 3
    """Least number of steps to make again from each starting point."""
    processes: Positive = 1
    """World size to make them in."""
    data: str | None = None
    """Where the data lies here."""
    signers: str | None = None
    """ssh's allowed_signers: names of people, and their keys."""
    json: bool = False
    """One JSON object on standard output."""


@dataclass(slots=True)
class Finding:
    """What an audit found, a sentence each."""

    checked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """What was not checked."""


def audit(words: Sequence[str]) -> int:
    """Usage: audit RECEIPT [--run FOLDER] [--steps 3] [--processes N] [--data PATH] [--signers FILE] [--json]

    Exit 3 where something is not as the receipt says.
    """
    positional, flags = split_words(words)
    if len(positional) != 1:
        raise UserError(f"audit: give one receipt, as in: audit {FILE}")
    options = command_options(flags, AuditOptions, "audit")
    file = Path(positional[0]).expanduser()
    found = audit_receipt(file / FILE if file.is_dir() else file, options)
    if options.json:
        print(atomic_files.json_text({"holds": not found.problems, **dataclasses.asdict(found)}))
    else:
        lines = [f"  {problem}" for problem in found.problems]
        lines += [f"checked: {'; '.join(found.checked) or 'nothing'}"]
        lines += [f"not checked: {'; '.join(found.unknown)}"] if found.unknown else []
        print(printable("\n".join([*lines, f"{file}: {'does NOT hold' if found.problems else 'holds'}"])))
    return FAILED if found.problems else DONE


def audit_receipt(file: Path, options: AuditOptions) -> Finding:
    """Check a receipt. Raises UserError where it is none, or its data cannot be had."""
    content, found = read_receipt(file), Finding()
    _check_signature(file, options, found)
    _check_content(file, content, options, found)
    return found


def _check_content(file: Path, content: Content, options: AuditOptions, found: Finding) -> None:
    recipe = Recipe.from_dict(content["recipe"])
    if recipe.hash() != content["recipe_hash"]:
        found.problems.append(f"its recipe hashes to {recipe.hash()}, and it says {content['recipe_hash']}")
        return
    with _folder(file, content, options, found) as (run, handed_over):
        consent.require(recipe, run.folder, options.trust)
        doing("looking for the data")
        try:
            locate_data(run, recipe, options.data)
        except OtherDataError as error:
            found.problems.append(f"the data here is not the receipt's: {error.what}")
        if not found.problems:
            _check(run, handed_over, content, options, found)


def read_receipt(file: Path) -> Content:
    """A receipt. Raises UserError where the file is none."""
    from isobatch.engine.forensics.receipt import FORM, has_form

    if not file.is_file():
        raise UserError(f"{file}: there is no such file; `isobatch receipt RUN` writes one")
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{file}: is no JSON") from None
    if not isinstance(content, dict) or content.get("receipt") != FORM or not has_form(content):
        raise UserError(f"{file}: is no receipt that this version knows")
    return content


def _check_signature(file: Path, options: AuditOptions, found: Finding) -> None:
    if not signatures.signature_of(file).is_file():
        if options.signers:
            found.problems.append(f"it is not signed: there is no {signatures.signature_of(file).name}")
        else:
            found.unknown.append("who made it: it is not signed")
        return
    signers = Path(options.signers).expanduser() if options.signers else None
    if signers is not None and not signers.is_file():
        raise UserError(f"--signers {options.signers}: there is no such file")
    who, wrong = signatures.check(file, signers)
    if wrong:
        found.problems.append(f"the signature: {wrong}")
    elif signers is None:
        found.checked.append(f"signed with the key {who}")
        found.unknown.append("whose key that is: --signers FILE says it")
    else:
        found.checked.append(f"signed by {who}")


@contextlib.contextmanager
def _folder(
    file: Path, content: Content, options: AuditOptions, found: Finding
) -> Iterator[tuple[RunFolder, bool]]:
    """(the run's folder, whether it was handed over); else one made of the receipt, for as long as needed."""
    beside = file.resolve().parent
    if options.run is not None or (beside / "recipe.json").is_file():
        run = RunFolder.open(options.run or beside)
        if run.identity != content["run"]:
            found.problems.append(f"{run.folder} is another run, {run.identity}: not {content['run']}")
        yield run, True
        return
    with tempfile.TemporaryDirectory() as temporary:
        facts = Facts.from_dict(content["facts"])
        recipe = Recipe.from_dict(content["recipe"])
        run = RunFolder.create(Path(temporary) / "audited", recipe, facts, RunOptions(quiet=True))
        run.write_plan(Plan.from_dict(content["plan"]))
        yield run, False


def _check(
    run: RunFolder, handed_over: bool, content: Content, options: AuditOptions, found: Finding
) -> None:
    """Compare the receipt with data and folder, and make steps again."""
    from isobatch.engine.forensics.receipt import differing_parts, order_problems

    doing("comparing the samples of every step")
    recipe = Recipe.from_dict(content["recipe"])
    _, data = workload_of(recipe).make(recipe)
    wrong = list(order_problems(content, recipe, data.open(Path(run.facts.folder), "train")))
    found.problems += wrong
    if wrong:
        return
    found.checked.append(f"recipe and data, the samples of all {sum(content['phases'].values()):,} steps")
    if not handed_over:
        found.unknown += [said for part in compare_source(run, options.data) for said in part]
        _check_first_steps(run, content, options, found)
        return
    try:
        other = receipt_of(run)
    except TrainingError as error:
        found.problems.append(str(error))
        return
    if parts := differing_parts(content, other):
        found.problems.append(f"{run.folder} says otherwise: {', '.join(parts)}")
        return
    found.checked.append(f"{run.folder} is the run")
    asked = VerifyOptions(steps=options.steps, processes=options.processes)
    report = verify_run(run, asked)
    found.problems += report["problems"]
    found.unknown += report["unproven"] + [f"taken on trust: {what}" for what in report["trusted"]]
    found.checked.append(report["coverage"])


def _check_first_steps(run: RunFolder, content: Content, options: AuditOptions, found: Finding) -> None:
    """Without checkpoints only the steps from the beginning can be made again."""
    from isobatch.engine.forensics.receipt import left_out_of, log_rows

    steps = content["phases"]
    decided = [{**row, "last": min(row["last"], steps[row["of"]])} for row in content["left_out"]]
    for path, rows in ((run.metrics, log_rows(content)), (run.decisions, decided)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    trained = np.flatnonzero(~left_out_of(content, next(iter(steps))))[1:]
    doing("redoing the first steps")
    proof = redo_first_steps(run, trained.tolist(), options.steps, options.processes)
    found.problems += proof.problems
    if not proof.steps:
        found.problems.append("no step that it has figures of could be made again")
    elif not proof.problems:
        found.checked.append(
            f"{len(proof.steps)} steps from the beginning made again: {within(proof.largest)}, where"
            f" {proof.allowed:.0e} is allowed ({run.plan.invariance}, {run.plan.precision})"
        )
    found.unknown.append("later steps, the weights and the metrics: --run FOLDER, with its checkpoints")
