"""`receipt`: a small file about a finished run, that somebody else can audit; and its signature."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, TrainingError, UserError
from isobatch.core.measures import format_bytes, printable
from isobatch.core.terminal.status import doing
from isobatch.launch.forensics import signatures
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import TrustOptions, locate_data, open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.runs.run_folder import RunFolder

FILE = "receipt.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptOptions(TrustOptions):
    """Flags of `receipt`."""

    sign: str | None = None
    """An ssh key, private or public with an agent: writes FILE.sig."""
    out: str | None = None
    """The file to write; by default receipt.json in the run's folder."""
    data: str | None = None
    """Where the data lies now, if it has moved."""
    json: bool = False
    """One JSON object on standard output."""


def receipt(words: Sequence[str]) -> int:
    """Usage: receipt RUN [--sign ~/.ssh/id_ed25519] [--out FILE] [--data PATH] [--json]

    The run's records are checked first: a receipt of a run that `verify --level records` refuses is not made.
    """
    positional, flags = split_words(words)
    if len(positional) != 1:
        raise UserError("receipt: give the folder of one run (`runs` lists them)")
    options = command_options(flags, ReceiptOptions, "receipt")
    run = open_run(positional[0], options.trust)
    locate_data(run, run.recipe, options.data)
    file = Path(options.out).expanduser() if options.out else run.folder / FILE
    content = receipt_of(run)
    text = atomic_files.json_text(content, ensure_ascii=False) + "\n"
    signed = signatures.sign(text, Path(options.sign).expanduser()) if options.sign else None
    atomic_files.write_text(file, text)
    signature = signatures.signature_of(file)
    if signed is None:
        signature.unlink(missing_ok=True)
    else:
        atomic_files.write_text(signature, signed)
    said = {"receipt": str(file), "signature": str(signature) if signed else None}
    if options.json:
        print(atomic_files.json_text(said))
    else:
        print(printable("\n".join(_lines(content, file, signature if signed else None))))
    return DONE


def receipt_of(run: RunFolder) -> dict[str, Any]:
    """The receipt of a run. Raises TrainingError where its records are wrong, or it is not done."""
    from isobatch.engine.forensics.receipt import make_receipt
    from isobatch.engine.verification.audit import audit_records, recipe_problems

    doing("checking the records")
    problems = recipe_problems(run)
    audit = None if problems else audit_records(run)
    if problems or audit is None or audit.problems or audit.log is None:
        found = [*problems, *(audit.problems if audit else [])]
        raise TrainingError(f"{run.folder} is not what its recipe says: {found[0]}")
    made: dict[str, Any] = json.loads(atomic_files.json_text(make_receipt(run, audit.log)))
    return made


def _lines(content: dict[str, Any], file: Path, signature: Path | None) -> list[str]:
    steps = sum(content["phases"].values())
    lines = [
        f"{file}: {format_bytes(file.stat().st_size)}, recipe {content['recipe_hash']}, {steps:,} steps,"
        f" figures of {len(content['steps']):,} of them, {len(content['checkpoints'])} checkpoints"
    ]
    lines += [f"{signature}: its signature"] if signature else []
    return [*lines, f"whoever has the data checks it with: isobatch audit {file}"]
