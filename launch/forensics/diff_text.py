"""What `diff` says of two runs: a verdict sentence, and the lines above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isobatch.core.terminal import table
from isobatch.launch.report.tables import in_words

NAMES = ("A", "B")
ORDERING = ("seed", "batch_size", "data", "train_fraction", "group_by_length", "mix")
"""Recipe fields that decide which samples a step has."""
NUMERIC = ("precision", "attention", "compile", "device", "pack")
"""Plan fields that may change results beyond the order of sums."""
SAME_WEIGHTS = 1e-5
"""Relative difference of all weights by rounding, at the beginning of a run."""
Answer = dict[str, Any]
"""What --json prints, or a part of it."""


def lines_of(found: Answer) -> list[str]:
    """The runs, what their recipes, plans and versions differ in, what was found, and the verdict."""
    lines = [f"{name}: {place}" for name, place in zip(NAMES, found["runs"], strict=True)]
    differs = [item for part in ("recipe", "plan", "versions") for item in found[part].items()]
    rows = [[in_words(name), *map(_text, values)] for name, values in differs]
    lines += ["", table([["what differs", *NAMES], *rows])] if rows else []
    why_not = found.get("step", {}).get("why_not")
    lines += ["", f"the step was not redone: {why_not}"] if why_not else []
    return [*lines, "", found["verdict"]]


def _text(value: Any) -> str:
    if isinstance(value, str) and Path(value).is_absolute():
        return "/".join(Path(value).parts[-2:])
    return "" if value is None else str(value)


def verdict_of(found: Answer) -> tuple[str, bool]:
    """The verdict, and whether the runs are equal but for the order of float sums."""
    log, samples = found["log"], found.get("samples", {})
    kind, where, (one, other) = log["kind"], _place(log["step"], log["phase"]), log["values"]
    if kind == "apart":
        return "they logged no step in common: nothing can be said", False
    if kind == "samples":
        data = f"; {data_words(samples)}" if "changed" in samples else ""
        return _samples_verdict(found, samples, where) + data, False
    if found["data_differs"]:
        parts = f"; what they computed parts at {where}" if log["step"] else ""
        return data_words(samples) + parts, False
    if kind == "rate":
        rates = f"{one:.6g} and {other:.6g}"
        return f"both saw the same samples; the learning rate parts at {where}: {rates}", False
    if kind != "equal":
        return _step_verdict(found, found.get("step", {}), where)
    steps, most = f"{log['common_steps']:,} common steps", log["largest"]
    if not any(most.values()):
        return f"the same bit for bit in all {steps}, by loss and gradient norm", True
    return f"only the order of float sums differs: the loss by at most {most['loss']:.1g} over {steps}", True


def _place(step: int, phase: str) -> str:
    return f"step {step:,}" + (f" of {phase}" if phase != "train" else "")


def _samples_verdict(found: Answer, samples: Answer, where: str) -> str:
    reasons = [in_words(name) for name in ORDERING if name in found["recipe"]]
    why = f", because of another {' and '.join(reasons)}" if reasons else _row_counts(samples)
    if "why_not" in samples:
        return f"they saw other samples up to {where}{why} (which ones: {samples['why_not']})"
    if samples["step"] is None:
        wrong = "one log is not what its recipe says (`verify` says which)"
        return f"they saw other samples up to {where}, and their recipes give the same ones: {wrong}"
    first = f"they part at {_place(samples['step'], found['log']['phase'])}"
    if "left_out_by" in samples:
        return f"{first}, which {NAMES[samples['left_out_by']]} left out"
    if samples["other_order"]:
        return f"{first}: the same samples in another order{why}"
    pairs = zip(NAMES, samples["only"], strict=True)
    only = [f"{name} alone saw {_numbers(own)}" for name, own in pairs if own]
    return f"{first}: they saw other samples{why}; {'; '.join(only)}"


def _row_counts(samples: Answer) -> str:
    one, other = samples.get("rows", (0, 0))
    return f" (A has {one:,} rows, B {other:,})" if one != other else ""


def data_words(samples: Answer) -> str:
    """Which training rows of both are not the same."""
    if "why_not" in samples:
        return f"they were trained on other data (which rows: {samples['why_not']})"
    changed, more = _numbers(samples["changed"]), samples["changed_rows"] - len(samples["changed"])
    where = f"changed at sample {changed}" if changed else "of the training rows that both have is the same"
    what = "the data"
    if samples["tokenizers_differ"]:
        what = "the tokenizers differ, and with them all tokens; the text"
    return f"{what} {where}{f' and {more:,} more' if more else ''}{_row_counts(samples)}"


def _numbers(rows: list[int]) -> str:
    return ", ".join(f"{row:,}" for row in rows)


def _step_verdict(found: Answer, step: Answer, where: str) -> tuple[str, bool]:
    """Of runs that saw the same samples at the same rates, and computed something else."""
    log, (one, other) = found["log"], found["log"]["values"]
    if log["kind"] == "jump" and step.get("step", log["step"]) != log["step"]:
        where = f"{_place(step['step'], log['phase'])}, logged at {log['step']:,}"
    figure = "loss" if log["figure"] == "loss" else "gradient norm"
    begins = f"both saw the same samples; they part at {where} ({figure} {one:.6g} and {other:.6g})"
    if log["kind"] == "drift":
        begins = f"both saw the same samples; the {figure} grows apart gradually, beyond rounding at {where}"
    if not step or "why_not" in step:
        return begins, False
    if (module := step["module"]) is not None:
        way = " (its gradient)" if module["direction"] == "backward" else ""
        carriers = module.get("samples")
        share = (
            f"; {module['share']:.0%} of the samples carry it, most: {_numbers(carriers)}" if carriers else ""
        )
        return f"{begins} in {module['module']}{way}{_causes(found)}{share}", False
    for name, figures in zip(NAMES, step["unexplained"], strict=True):
        for logged, redone in figures.values():
            said = f"{name} logged {logged:.6g} there, its recipe gives {redone:.6g} from kept weights"
            why = "(another library or machine, changed code, a hardware fault)"
            return f"{begins}: {said}: what {name} did is not in its recipe {why}", False
    if step["weights"]["difference"] > SAME_WEIGHTS:
        return f"{begins}: their weights were others before, most in {step['weights']['parameter']}", False
    same = "redone from the same weights it is the same within rounding"
    if log["kind"] == "drift":
        apart = f"the {figure} grows apart by {abs(one - other):.1g} until {where}"
        return f"only the order of float sums differs: {apart}, and {same}", True
    return f"{begins}; {same} on both sides", False


def _causes(found: Answer) -> str:
    """What of recipes, plans and versions may be the cause."""
    plan = {name: values for name, values in found["plan"].items() if name in NUMERIC}
    named = {**found["recipe"], **plan, **found["versions"]}
    reasons = [
        f"{in_words(name)} is {_text(one) or 'not set'} in A and {_text(other) or 'not set'} in B"
        for name, (one, other) in named.items()
    ]
    return f", where {'; '.join(reasons)}" if reasons else ""
