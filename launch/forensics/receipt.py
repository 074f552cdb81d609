"""`receipt make`: a small file about a finished run; `receipt check`: what is true of one from somebody else.

A receipt is signed by ssh keys: `ssh-keygen -Y sign` and `-Y verify`, in the namespace `isobatch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, FAILED, NotHereError, TrainingError, UserError, nearest_file
from isobatch.core.facts import Facts
from isobatch.core.measures import format_bytes
from isobatch.core.number_ranges import Positive
from isobatch.core.plan import Plan
from isobatch.core.recipe import HOOK_CODE, Recipe
from isobatch.core.terminal import doing, print_answer, rendered
from isobatch.engine import consent
from isobatch.engine.forensics import receipt as receipts
from isobatch.engine.runs.run_folder import RunFolder, run_around, runs_named
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.verification.audit import audit_records
from isobatch.engine.verification.log_audit import WrongRecordError, check
from isobatch.engine.verification.proof import within
from isobatch.engine.verification.tolerance import TOLERANCE
from isobatch.launch.local import run_setup
from isobatch.launch.local.arguments import read_command
from isobatch.launch.local.options import DataOptions, RedoOptions
from isobatch.launch.local.verify_run import VerifyOptions, redo_first_steps, verify_run

FILE = "receipt.json"
NAMESPACE = "isobatch"
Content = dict[str, Any]
"""A receipt, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptOptions(DataOptions):
    """Flags of `receipt make`."""

    sign: str | None = None
    """An ssh key, private or public with an agent: writes FILE.sig."""
    out: str | None = None
    """The file to write; by default receipt.json in the run's folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOptions(RedoOptions):
    """Flags of `receipt check`."""

    run: str | None = None
    """The run's folder, if it was handed over; by default the receipt's own where it lies in one."""
    steps: Positive = 3
    """Least number of steps to make again from each starting point."""
    processes: Positive = 1
    """World size to make them in."""
    signers: str | None = None
    """ssh's allowed_signers: names of people, and their keys."""


@dataclass(slots=True)
class Finding:
    """What a check found, a sentence each."""

    checked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    """What may be as the receipt says, and was not shown to be."""
    unknown: list[str] = field(default_factory=list)
    """What was not checked."""


def receipt(words: Sequence[str]) -> int:
    """Usage: receipt make RUN [--sign ~/.ssh/id_ed25519] [--out FILE] [--data PATH] [--json]

    The run's records are checked first: a receipt of a run that `verify --level records` refuses is not made.
    """
    run, options = run_setup.open_single_run(words, "receipt", ReceiptOptions, finished=True)
    run_setup.locate_data(run, options.data)
    file = Path(options.out).expanduser() if options.out else run.folder / FILE
    content = receipt_of(run)
    text = atomic_files.json_text(content, ensure_ascii=False) + "\n"
    signed = sign(text, Path(options.sign).expanduser()) if options.sign else None
    atomic_files.write_text(file, text)
    signature = signature_of(file)
    if signed is None:
        signature.unlink(missing_ok=True)
    else:
        atomic_files.write_text(signature, signed)
    found = {"receipt": str(file), "signature": str(signature) if signed else None}
    shown = {"run": run, "size": format_bytes(len(text)), "allowed": TOLERANCE[run.plan.invariance][0]}
    places = [place for name, place in consent.places(run.recipe) if name in run_setup.BEGINNINGS]
    shown["begun"] = sorted({str(one) for at in places if (one := run_around(Path(at, "_")))})
    elsewhere = receipts.chosen_elsewhere(content)
    said = rendered(__file__, "receipt", content=content, elsewhere=elsewhere, **shown, **found)
    return print_answer(found, said, options.json)


def receipt_of(run: RunFolder) -> Content:
    """The receipt of a run. Raises TrainingError where its records are wrong, or it is not done."""
    doing("checking the records")
    problems, log = audit_records(run)
    if log is None:
        raise TrainingError(f"{run.folder} is not what its recipe says: {problems[0]}")
    return json.loads(atomic_files.json_text(receipts.make_receipt(run, log)))


def audit(words: Sequence[str]) -> int:
    """Usage: receipt check RECEIPT [--run FOLDER] [--base FOLDER] [--data PATH] [--steps 3] [--processes N]
    [--signers FILE] [--json]

    Exit 3 where something is not as the receipt says, or not shown to be.
    """
    positional, options = read_command(words, AuditOptions, "audit")
    if len(positional) != 1:
        raise UserError(f"receipt check: give one receipt, as in: receipt check {FILE}")
    file = runs_named(positional[0])[-1]
    found = audit_receipt(file / FILE if file.is_dir() else file, options)
    shown = dataclasses.asdict(found)
    text = rendered(__file__, "audit", file=file, **shown)
    holds = not found.problems + found.unproven
    print_answer({"holds": holds, **shown}, text, options.json)
    return DONE if holds else FAILED


def audit_receipt(file: Path, options: AuditOptions) -> Finding:
    """Check a receipt. Raises UserError where it is none, or its data cannot be had."""
    content, found = read_receipt(file), Finding()
    recipe, hashed = Recipe.from_dict(content["recipe"]), content["recipe_hash"]
    here = recipe if options.base is None else run_setup.recipe_here(recipe, options.base)
    try:
        _check_signature(file, options.signers, found)
        check(recipe.hash() == hashed, f"its recipe hashes to {recipe.hash()}, and it says {hashed}")
        with _folder(file, content, options) as (run, handed_over):
            run.here = here
            for one in (recipe, here):
                consent.require(one, run.folder, options.trust)
            doing("looking for the data")
            run_setup.locate_data(run, options.data)
            doing("comparing the samples of every step")
            receipts.check_order(content, here, run.facts)
            found.unknown += filter(None, [receipts.chosen_elsewhere(content)])
            steps = sum(content["phases"].values())
            found.checked.append(f"recipe and data, the samples of all {steps:,} steps")
            (_check_against_run if handed_over else _check_first_steps)(run, content, options, found)
    except NotHereError as error:
        raise UserError(f"{error}; where it has moved: receipt check {file} --base FOLDER") from None
    except run_setup.OtherDataError as error:
        found.problems.append(f"the data here is not the receipt's: {error.what}")
    except (WrongRecordError, TrainingError) as error:
        found.problems.append(str(error))
    return found


def read_receipt(file: Path) -> Content:
    """A receipt. Raises UserError where the file is none."""
    if not file.is_file():
        raise UserError(f"{file}: there is no such file; `isobatch receipt make RUN` writes one")
    with contextlib.suppress(ValueError, RecursionError):
        content: Content = atomic_files.parse_json(file.read_text(encoding="utf-8"))
        if receipts.has_form(content):
            return content
    raise UserError(f"{file}: is no receipt that this version knows")


@contextlib.contextmanager
def _folder(file: Path, content: Content, options: AuditOptions) -> Iterator[tuple[RunFolder, bool]]:
    """(the run's folder, whether it was handed over); else one made of the receipt, for as long as needed."""
    beside = file.resolve().parent
    if options.run is not None or (beside / "recipe.json").is_file():
        run = RunFolder.open(options.run or beside)
        is_it = run.identity == content["run"]
        check(is_it, f"{run.folder} is another run, {run.identity}: not {content['run']}")
        yield run, True
        return
    with tempfile.TemporaryDirectory() as temporary:
        recipe, facts = Recipe.from_dict(content["recipe"]), Facts.from_dict(content["facts"])
        run = RunFolder.create(Path(temporary) / "audited", recipe, facts, RunOptions(quiet=True))
        run.write_plan(Plan.from_dict(content["plan"]))
        try:
            yield run, False
        except UserError as error:
            said = str(error).replace(f"verify {run.folder} --level records", f"receipt check {file}")
            error.args = (said.replace(str(run.folder), str(file)),)
            raise


def _check_against_run(run: RunFolder, content: Content, options: AuditOptions, found: Finding) -> None:
    """With the run's folder: it says the same, and is verified."""
    other = receipt_of(run)
    exports, there = content.pop("exports", {}), run.exports()  # forms are exported, or left away, later too
    parts = sorted(name for name in content if content[name] != other[name])
    parts += [name for name in exports if exports[name] != there.get(name, exports[name])]
    check(not parts, f"{run.folder} says otherwise: {', '.join(parts)}")
    found.unknown += [f"{name}/, which is not here" for name in exports if name not in there]
    found.unknown += [f"{name}/, which the receipt does not name" for name in there if name not in exports]
    found.checked.append(f"{run.folder} is the run")
    asked = VerifyOptions(steps=options.steps, processes=options.processes, data=options.data)
    report = verify_run(run, asked)
    found.problems += report["problems"]
    found.unproven += report["unproven"]
    found.unknown += [f"taken on trust: {what}" for what in report["trusted"]]
    found.checked.append(report["coverage"])


def _check_first_steps(run: RunFolder, content: Content, options: AuditOptions, found: Finding) -> None:
    """Without checkpoints only the steps from the beginning can be made again."""
    found.unknown += [said for part in run_setup.compare_source(run, options.data) for said in part]
    steps = content["phases"]
    decided = [{**row, "last": min(row["last"], steps[row["of"]])} for row in content["left_out"]]
    for path, rows in ((run.metrics, receipts.log_rows(content)), (run.decisions, decided)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found.unknown.append("later steps, the weights and the metrics: --run FOLDER, with its checkpoints")
    if HOOK_CODE in run.recipe.options:
        found.unknown.append("the first steps: a hook changes what is learnt")
        return
    doing("redoing the first steps")
    trained = np.flatnonzero(~receipts.left_out_of(content, next(iter(content["phases"]))))[1:]
    proof = redo_first_steps(run, trained.tolist(), options.steps, options.processes)
    found.problems += proof.problems if proof.steps or not trained.size else ["no step could be made again"]
    found.unproven += proof.unproven
    if proof.steps and not found.problems + found.unproven:
        made = f"{len(proof.steps)} steps from the beginning made again: {within(proof.largest)}"
        allowed = f"where {proof.allowed:.0e} is allowed ({run.plan.invariance}, {run.plan.precision})"
        found.checked.append(f"{made}, {allowed}")


def signature_of(file: Path) -> Path:
    """Where the signature of a file lies."""
    return file.with_name(f"{file.name}.sig")


def sign(text: str, key: Path) -> str:
    """A signature by a private key, or a public one whose private key an agent holds. Raises UserError."""
    done = _ssh_keygen("-Y", "sign", "-f", str(key), "-n", NAMESPACE, text=text)
    if done.returncode or not done.stdout:
        raise UserError(f"--sign {key}: {_last_line(done)}")
    return done.stdout


def _check_signature(file: Path, signers: str | None, found: Finding) -> None:
    """Who signed a receipt; it takes `signers`, ssh's allowed_signers."""
    signature = signature_of(file)
    if signers is None:
        found.unknown.append("who made it: --signers FILE, with its signature, says so")
        return
    check(signature.is_file(), f"it is not signed: there is no {signature.name}")
    known = Path(signers).expanduser()
    if not known.is_file():
        raise UserError(f"--signers {signers}: there is no such file{nearest_file(signers)}")
    if (start := known.read_text(errors="replace").lstrip()).startswith(("ssh-", "ecdsa-", "sk-")):
        line = f"write a name before it, as in: anna@bank.example {start[:24]}..."
        raise UserError(f"--signers {signers}: is a public key, and no line of allowed_signers: {line}")
    names = _ssh_keygen("-Y", "find-principals", "-s", str(signature), "-f", str(known)).stdout.split()
    check(bool(names), f"the signature: its key is none of those in {known}")
    words = ("-f", str(known), "-I", names[0], "-n", NAMESPACE, "-s", str(signature))
    done = _ssh_keygen("-Y", "verify", *words, text=file.read_text(encoding="utf-8"))
    check(not done.returncode, f"the signature: {_last_line(done)}")
    found.checked.append(f"signed by {names[0]}")


def _ssh_keygen(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    if shutil.which("ssh-keygen") is None:
        raise UserError("there is no ssh-keygen here: install OpenSSH's client (8.2 or newer)")
    return subprocess.run(["ssh-keygen", *words], input=text, capture_output=True, text=True, check=False)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"ssh-keygen ended with {done.returncode}"
