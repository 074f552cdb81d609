"""`verify`: checks a run's records and redoes logged steps, or all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, FAILED, UserError
from isobatch.launch.local.arguments import command_options, split_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.runs.run_folder import RunFolder


def verify(words: Sequence[str]) -> int:
    """Usage: verify RUN [--level records|steps|full] [--steps 3] [--processes N] [--strategy S]
    [--micro-batch M] [--data PATH] [--json]

    Exit 3 on a difference, and where the level's proof is not complete.
    """
    from isobatch.engine import consent
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.audit import recipe_problems
    from isobatch.launch.local.verify_run import VerifyOptions, verify_run

    positional, flags = split_words(words)
    if len(positional) != 1:
        raise UserError("verify: give the folder of one run (`runs` lists them)")
    options = command_options(flags, VerifyOptions, "verify")
    run = RunFolder.open(positional[0])
    if not recipe_problems(run):  # else nothing of it is executed
        consent.require(run.recipe, run.folder, options.trust)
    report = verify_run(run, options)
    print(atomic_files.json_text(report) if options.json else _format_report(report, run))
    return DONE if report["verified"] else FAILED


def _format_report(report: dict[str, Any], run: RunFolder) -> str:
    lines = [
        f"  {r['phase']} {r['step']:>6} from {r['start']}: loss {r['loss']:.6f}, logged"
        f" {r['logged_loss']:.6f}, difference {r['loss_difference']:.1e}; gradient norm"
        f" {r['norm_difference']:.1e}"
        for r in report["steps"]
    ]
    if lines:
        cut = f"{report['world_size']} process(es), micro-batches of {report['micro_batch_samples']}"
        lines.insert(0, f"redone on {cut}:")
    lines += [f"  {problem}" for problem in (*report["problems"], *report["unproven"])]
    verdict = "NOT what its recipe says" if report["problems"] else "not proven"
    if report["verified"]:
        verdict = f"verified ({run.plan.invariance})" if run.has_plan else "verified"
        verdict = "the records agree" if report["level"] == "records" else verdict
        verdict += f"; taken on trust: {'; '.join(report['trusted'])}" if report["trusted"] else ""
    return "\n".join([*lines, f"checked: {report['coverage']}", f"{report['run']}: {verdict}"])
