"""`diff`: where two runs part: recipe, samples, step, module, and a sentence that says so."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isobatch.core.errors import DONE, FAILED, IsobatchError, UserError
from isobatch.core.plan import INVARIANCES, Plan
from isobatch.core.recipe import TASK_CODE, differing
from isobatch.core.terminal import doing, print_answer, rendered, table
from isobatch.data.base import MEASURES, Data
from isobatch.engine import consent
from isobatch.engine.forensics import compare_runs
from isobatch.engine.forensics.compare_runs import EXACT_FLOOR, LogDifference
from isobatch.engine.optimization.left_out import left_out_steps
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.train.figures import differences, step_rows
from isobatch.engine.verification.run_order import RunOrder
from isobatch.engine.verification.tolerance import TOLERANCE, rounding_tolerance
from isobatch.engine.verification.windows import Window, window_to
from isobatch.launch.control.runs import differing_plans
from isobatch.launch.local.arguments import read_command
from isobatch.launch.local.options import AnswerOptions
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.launch.local.redo_steps import plan_to_redo
from isobatch.launch.local.run_setup import locate_data
from isobatch.launch.report.tables import in_words

if TYPE_CHECKING:
    from isobatch.core.facts import Facts
    from isobatch.engine.forensics.observed_step import ObservedStep
    from isobatch.engine.verification.replay import Replay

AT_A_TIME = 1024
"""Rows of data."""
MOST_NAMED = 10
"""Samples and rows."""
NAMES = ("A", "B")
ORDERING = ("seed", "batch_size", "data", "train_fraction", "group_by_length", "mix")
"""Recipe fields that decide which samples a step has."""
NUMERIC = ("precision", "attention", "compile", "device", "pack")
"""Plan fields that may change results beyond the order of sums."""
SAME_WEIGHTS = 1e-5
"""Relative difference of all weights by rounding, at the beginning of a run."""
TWO_VERSIONS = (
    "the task's file was another version in A than in B, and only one can be there: `replay` the step of each"
    " with its version put back, or train each from a file of its own"
)
Runs = tuple[RunFolder, RunFolder]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffOptions(AnswerOptions):
    """Flags of `diff`."""

    level: Literal["step", "module", "sample"] = "module"
    """step: from the logs alone; module: also redo the step where they part, on both sides; sample: say too
    which samples carry the difference."""


def diff(words: Sequence[str]) -> int:
    """Usage: diff RUN RUN [--level step|module|sample] [--json]: where two runs part, and why.

    Exit code 0 where only the order of float sums differs, 3 at a true difference.
    """
    positional, options = read_command(words, DiffOptions, "diff")
    if len(positional) != 2:
        raise UserError("diff: give two runs, as in: diff runs/a runs/b (`compare` takes more)")
    one, other = map(RunFolder.open, positional)
    found = diff_runs(one, other, options.level, options.trust)
    print_answer(found, "\n".join(lines_of(found)), options.json)
    return DONE if found["equal"] else FAILED


def diff_runs(one: RunFolder, other: RunFolder, level: str = "module", trust: bool = False) -> dict[str, Any]:
    """The answer of --json. What the logs say is said without the runs' code, which `trust` lets run.

    Raises UserError where a run logged no step.
    """
    doing("comparing the logs")
    runs = one, other
    logs = [list(step_rows(run.metrics)) for run in runs]
    if empty := [run for run, log in zip(runs, logs, strict=True) if not log]:
        raise UserError(f"{empty[0].folder}: no step is logged, so there is nothing to compare")
    # The tighter of both plans: a run in bf16 parts from one in fp32, and two in bf16 may differ by what it
    # rounds.
    tighter = min((run.plan.invariance for run in runs), key=INVARIANCES.index)
    floor = {"exact": EXACT_FLOOR, "rounding": max(rounding_tolerance(run.plan.rounding) for run in runs)}
    of_step = floor.get(tighter, TOLERANCE[tighter])
    parted = compare_runs.compare_logs(logs[0], logs[1], of_step, TOLERANCE[tighter])
    versions = [{k: v for k, v in run.environment().items() if k != "packages"} for run in runs]
    found: dict[str, Any] = {
        "runs": [str(run.folder) for run in runs],
        "recipe": differing([run.recipe.to_compare() for run in runs]),
        "plan": differing_plans(runs),
        "versions": differing(versions) if all(versions) else {},
        "data_differs": one.facts.fingerprint != other.facts.fingerprint,
        "log": dataclasses.asdict(parted),
    }
    in_samples = parted.kind == "samples" or found["data_differs"]
    part = "samples" if in_samples else "step"
    if in_samples or (level != "step" and parted.kind in ("jump", "drift")):
        try:
            if found["recipe"].keys() & {"task", TASK_CODE} == {TASK_CODE}:
                raise UserError(TWO_VERSIONS)
            for run in runs:
                consent.require(run.recipe, run.folder, trust)
                locate_data(run, None)
            found[part] = parted_samples(runs, parted) if in_samples else parted_step(runs, parted, level)
        except IsobatchError as error:  # code or data is not at hand, or the step cannot be redone
            found[part] = {"why_not": " ".join(str(error).split())}
    found["verdict"], found["equal"] = verdict_of(found)
    return found


def parted_samples(runs: Runs, parted: LogDifference) -> dict[str, Any]:
    """`rows` that either has; `step` and what either alone took there, where the orders differ; what
    `changed_rows` says, where the data does.
    """
    orders = [RunOrder.of(run.recipe, run.facts) for run in runs]
    found: dict[str, Any] = {"rows": [len(order.source) for order in orders]}
    if parted.kind == "samples":
        found |= _first_other_batch(runs, orders, parted)
    if runs[0].facts.fingerprint != runs[1].facts.fingerprint:
        doing("comparing the data")
        one, other = ((order.data, run.facts) for order, run in zip(orders, runs, strict=True))
        found |= changed_rows(one, other)
    return found


def _first_other_batch(runs: Runs, orders: list[RunOrder], parted: LogDifference) -> dict[str, Any]:
    """By the recipes: the first of the steps in question whose samples differ."""
    left_out = [left_out_steps(run).get(parted.phase, frozenset()) for run in runs]
    for step in range(parted.previous + 1, parted.step + 1):
        if (step in left_out[0]) != (step in left_out[1]):
            return {"step": step, "left_out_by": 0 if step in left_out[0] else 1}
        one, other = (order.sampler.batch(step - 1) for order in orders)
        if not np.array_equal(one, other):
            own = [np.setdiff1d(a, b)[:MOST_NAMED].tolist() for a, b in ((one, other), (other, one))]
            return {"step": step, "only": own, "other_order": not any(own)}
    return {"step": None}


def changed_rows(one: tuple[Data, Facts], other: tuple[Data, Facts]) -> dict[str, Any]:
    """`changed`: the first numbers of training rows whose content differs, and `changed_rows` how many do, of
    those that both have.

    `tokenizers_differ`: as one that was trained on the data may after a changed word. Then all tokens do, and
    rows are compared by their texts.
    """
    by_text = len({_tokenizer(facts) for _, facts in (one, other)}) > 1
    width = max(facts.longest for _, facts in (one, other))
    rows = zip(*(_contents(*side, width, by_text) for side in (one, other)), strict=False)
    changed = [row for row, (a, b) in enumerate(rows) if a != b]
    return {"changed": changed[:MOST_NAMED], "changed_rows": len(changed), "tokenizers_differ": by_text}


def _tokenizer(facts: Facts) -> bytes:
    """Empty where the data has none."""
    name = facts.extra.get("tokenizer")
    file = Path(facts.folder) / str(name)
    return file.read_bytes() if name and file.is_file() else b""


def _contents(data: Data, facts: Facts, width: int, by_text: bool) -> Iterator[bytes]:
    """What each training row holds, padded to `width`: equal where the rows are."""
    source = data.open(Path(facts.folder), "train")
    for start in range(0, len(source), AT_A_TIME):
        rows = np.arange(start, min(start + AT_A_TIME, len(source)))
        batch = source.fetch(rows, width)
        if by_text:
            yield from (text.encode() for text in data.describe_rows(facts, batch))
        else:  # but for the column that `fetch` adds, the number of the row
            columns = [np.ascontiguousarray(batch[name]) for name in sorted(batch) if name != MEASURES[0]]
            yield from (b"".join(column[at].tobytes() for column in columns) for at in range(len(rows)))


def parted_step(runs: Runs, parted: LogDifference, level: str) -> dict[str, Any]:
    """What differs in the step: `module`, `weights`, and what either run logged that its recipe does not give
    here. Raises UserError where no kept checkpoint leads to it.

    Each side is redone from its own weights, and the second also from the first one's: then what still
    differs comes from its data, its code or its arithmetic alone.
    """
    micro_batch = min(run.plan.micro_batch_samples for run in runs)
    plans = [plan_to_redo(run, micro_batch) for run in runs]
    if parted.step - parted.previous > 1:
        parted = _within_the_gap(runs, plans, parted)
    doing(f"redoing step {parted.step} of {parted.phase} of both")
    one, other = (_observed(run, run, plan, parted) for run, plan in zip(runs, plans, strict=True))
    same_start = difference = compare_runs.compare_steps(one, other)
    if difference.weights > 0:
        doing("redoing the second from the weights of the first")
        same_start = compare_runs.compare_steps(one, _observed(*runs, plans[1], parted))
    module = same_start.module
    return {
        "step": parted.step,
        "redone_from": [seen.window.checkpoint for seen in (one, other)],
        "unexplained": [compare_runs.not_reproduced(seen) for seen in (one, other)],
        "weights": {"difference": difference.weights, "parameter": difference.parameter},
        "module": module and {n: v for n, v in module.items() if n != "samples" or level == "sample"},
    }


def _within_the_gap(runs: Runs, plans: list[Plan], parted: LogDifference) -> LogDifference:
    """With the first step that differs when redone, where a run logged only some of its steps."""
    found = []
    for run, plan in zip(runs, plans, strict=True):
        doing(f"redoing steps {parted.previous + 1} to {parted.step} of {run.folder.name}")
        with _replay_to(run, run, plan, parted.phase, parted.previous + 1) as (replay, window):
            longer = dataclasses.replace(window, count=parted.step - window.start)
            found.append(replay.figures(longer)[parted.previous - window.start :])
    for step, pair in enumerate(zip(*found, strict=True), parted.previous + 1):
        if any(d > most for d, most in zip(differences(*pair), EXACT_FLOOR, strict=True)):
            return dataclasses.replace(parted, step=step)
    return parted


def _observed(weights: RunFolder, recipe: RunFolder, plan: Plan, parted: LogDifference) -> ObservedStep:
    """The step by the recipe of one run, from the kept weights of another."""
    from isobatch.engine.forensics.observed_step import observe_step

    with _replay_to(weights, recipe, plan, parted.phase, parted.step) as (replay, window):
        return observe_step(replay, window, alone=False)


@contextlib.contextmanager
def _replay_to(
    weights: RunFolder, recipe: RunFolder, plan: Plan, phase: str, step: int
) -> Iterator[tuple[Replay, Window]]:
    """What redoes a step by the recipe of one run, and the steps that lead to it from the kept weights of
    another.
    """
    from isobatch.engine.verification.replay import Replay

    with preserve_process_state():  # accelerate keeps one precision for the whole process
        replay = Replay(weights, plan, recipe.recipe)
        yield replay, window_to(weights, replay.builder.phases, phase, step)


def lines_of(found: dict[str, Any]) -> list[str]:
    """The runs, what their recipes, plans and versions differ in, what was found, and the verdict."""
    lines = [f"{name}: {place}" for name, place in zip(NAMES, found["runs"], strict=True)]
    differs = {**found["recipe"], **found["plan"], **found["versions"]}  # both of these have the precision
    rows = [[in_words(name), *map(_text, values)] for name, values in differs.items()]
    lines += ["", table([["what differs", *NAMES], *rows])] if rows else []
    why_not = found.get("step", {}).get("why_not")
    lines += ["", f"the step was not redone: {why_not}"] if why_not else []
    return [*lines, "", found["verdict"]]


def _text(value: Any) -> str:
    if isinstance(value, str) and Path(value).is_absolute():
        return "/".join(Path(value).parts[-2:])
    return "" if value is None else str(value)


def verdict_of(found: dict[str, Any]) -> tuple[str, bool]:
    """The verdict, and whether the runs are equal but for the order of float sums."""
    log, samples, step = found["log"], found.get("samples", {}), found.get("step", {})
    unexplained = [
        (name, *pair)
        for name, figures in zip(NAMES, step.get("unexplained", ((), ())), strict=True)
        for pair in dict(figures).values()
    ]
    as_before = "weights" in step and not step["weights"]["difference"] > SAME_WEIGHTS
    grew = log["kind"] == "drift" and as_before and not (step["module"] or unexplained)
    is_equal = not found["data_differs"] and (log["kind"] == "equal" or grew)
    # What of recipes, plans and versions may be the cause.
    plan = {name: values for name, values in found["plan"].items() if name in NUMERIC}
    named = {**found["recipe"], **plan, **found["versions"]}.items()
    one, other = samples.get("rows", (0, 0))
    text = rendered(
        __file__,
        "verdict",
        **{"log": log, "samples": samples, "step": step, "names": NAMES, "same_weights": SAME_WEIGHTS},
        **{"data_differs": found["data_differs"], "is_equal": is_equal},
        unexplained=next(iter(unexplained), None),
        reasons=[in_words(name) for name in ORDERING if name in found["recipe"]],
        causes="; ".join(
            f"{in_words(n)} is {_text(a) or 'not set'} in A and {_text(b) or 'not set'} in B"
            for n, (a, b) in named
        ),
        row_counts=f" (A has {one:,} rows, B {other:,})" if one != other else "",
        place=lambda step: f"step {step:,}" + f" of {log['phase']}" * (log["phase"] != "train"),
        numbers=lambda rows: ", ".join(f"{row:,}" for row in rows),
    )
    return text, is_equal
