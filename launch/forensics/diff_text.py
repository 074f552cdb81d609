"""What `diff` says of two runs: a verdict sentence, and the lines above it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.launch.report.tables import in_words, text_table

if TYPE_CHECKING:
    from isobatch.engine.checkpointing.weight_files import WeightsDifference

NAMES = ("A", "B")
ORDERING = ("seed", "batch_size", "data", "train_fraction", "group_by_length", "mix")
"""Recipe fields that decide which samples a step has."""
NUMERIC = ("precision", "attention", "compile", "device", "pack")
"""Plan fields that may change results beyond the order of sums."""
SAME_WEIGHTS = 1e-5
"""Relative difference of all weights by rounding, at the beginning of a run."""


def lines_of(found: dict[str, Any]) -> list[str]:
    """The runs, what their recipes, plans and versions differ in, what was found, and the verdict."""
    lines = [f"{name}: {place}" for name, place in zip(NAMES, found["runs"], strict=True)]
    if "weights" in found:
        return [*lines, "", *_largest_weights(found["weights"]), found["verdict"]]
    rows = [
        [in_words(name), *map(_text, values)]
        for part in ("recipe", "plan", "versions")
        for name, values in found[part].items()
    ]
    if rows:
        lines += ["", text_table([["what differs", *NAMES], *rows], 110)]
    return [*lines, "", *_details(found), found["verdict"]]


def _largest_weights(weights: dict[str, Any]) -> list[str]:
    rows = [[name, f"{difference:.2g}"] for name, difference in weights["largest"]]
    return [text_table([["differs most", "of its norm"], *rows], 110), ""] if rows else []


def weights_verdict(found: WeightsDifference) -> str:
    """The sentence on the weights of two places, one of which is no run."""
    if not found.tensors:
        return "they have no tensor in common: nothing can be said"
    of = f"of {found.tensors:,} tensors {found.same:,} are the same bit for bit"
    said = [f"{name} alone has {_some(own)}" for name, own in zip(NAMES, found.alone, strict=True) if own]
    said += [f"another shape have {_some(found.shapes)}"] if found.shapes else []
    if found.differs:
        said.append(f"they differ by {found.difference:.2g} of their norm, most in {found.largest[0][0]}")
    if said:
        return f"the weights are not the same: {'; '.join(said)}; {of}"
    if found.same == found.tensors:
        return f"the same bit for bit in all {found.tensors:,} tensors"
    return f"only rounding differs: by {found.difference:.1g} of the weights' norm; {of}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _text(value: Any) -> str:
    if isinstance(value, str) and Path(value).is_absolute():
        return "/".join(Path(value).parts[-2:])
    return "" if value is None else str(value)


def _details(found: dict[str, Any]) -> list[str]:
    log, lines = found["log"], []
    if log["largest"] and log["kind"] != "apart" and (log["previous"] or not log["step"]):
        until = f"before step {log['step']:,} of {log['phase']}" if log["step"] else "over all steps"
        lines.append(
            f"{until} the loss differs by at most {log['largest']['loss']:.1g}, the gradient norm by"
            f" {log['largest']['grad_norm']:.1g}"
        )
    step = found.get("step")
    if step and "why_not" not in step:
        lines.append(
            f"the step was redone from {step['redone_from'][0]} (A) and {step['redone_from'][1]} (B)"
        )
        weights = step["weights"]
        if weights["difference"]:
            lines.append(
                f"the weights before it differ by {weights['difference']:.1g} of their norm, most in"
                f" {weights['parameter']}"
            )
    elif step:
        lines.append(f"the step was not redone: {step['why_not']}")
    return lines


def verdict_of(found: dict[str, Any]) -> tuple[str, bool]:
    """The verdict, and whether the runs are equal but for the order of float sums."""
    log = found["log"]
    where = _place(log["step"], log["phase"])
    if log["kind"] == "apart":
        return "they logged no step in common: nothing can be said", False
    if log["kind"] == "samples":
        data = f"; {_data_words(found['samples'])}" if "changed" in found.get("samples", {}) else ""
        return _samples_verdict(found, where) + data, False
    if found["data_differs"]:
        return _data_verdict(found, where), False
    if log["kind"] == "rate":
        rates = "{:.6g} and {:.6g}".format(*log["values"])
        return f"both saw the same samples; the learning rate parts at {where}: {rates}", False
    if log["kind"] == "equal":
        return _equal_verdict(log), True
    return _step_verdict(found, where)


def _place(step: int, phase: str) -> str:
    return f"step {step:,}" + (f" of {phase}" if phase != "train" else "")


def _equal_verdict(log: dict[str, Any]) -> str:
    largest = log["largest"]
    if not any(largest.values()):
        return f"the same bit for bit in all {log['common_steps']:,} common steps, by loss and gradient norm"
    return (
        f"only the order of float sums differs: the loss by at most {largest['loss']:.1g} over"
        f" {log['common_steps']:,} common steps"
    )


def _samples_verdict(found: dict[str, Any], where: str) -> str:
    samples, log = found.get("samples", {}), found["log"]
    reasons = [in_words(name) for name in ORDERING if name in found["recipe"]]
    verb = "differ" if len(reasons) > 1 else "differs"
    why = f", because {' and '.join(reasons)} {verb}" if reasons else _row_counts(samples)
    if "why_not" in samples:
        return f"they saw other samples up to {where}{why} (which ones: {samples['why_not']})"
    if samples["step"] is None:
        return (
            f"they saw other samples up to {where}, and their recipes give the same ones: one log is not"
            " what its recipe says (`verify` says which)"
        )
    first = _place(samples["step"], log["phase"])
    if "left_out_by" in samples:
        return f"they part at {first}, which {NAMES[samples['left_out_by']]} left out"
    if samples["other_order"]:
        return f"they part at {first}: the same samples in another order{why}"
    only = [
        f"{name} alone saw {', '.join(f'{sample:,}' for sample in own)}"
        for name, own in zip(NAMES, samples["only"], strict=True)
        if own
    ]
    return f"they part at {first}: they saw other samples{why}; {'; '.join(only)}"


def _row_counts(samples: dict[str, Any]) -> str:
    one, other = samples.get("rows", (0, 0))
    return f" (A has {one:,} rows, B {other:,})" if one != other else ""


def _data_verdict(found: dict[str, Any], where: str) -> str:
    parts = f"; what they computed parts at {where}" if found["log"]["step"] else ""
    return _data_words(found.get("samples", {})) + parts


def _data_words(samples: dict[str, Any]) -> str:
    """Which training rows of both are not the same."""
    if "why_not" in samples:
        return f"they were trained on other data (which rows: {samples['why_not']})"
    tokens = "the tokenizers differ, and with them all tokens; " if samples["tokenizers_differ"] else ""
    what, counts = "text" if tokens else "data", _row_counts(samples)
    alone, changed = samples["alone"], samples["changed_rows"]
    if alone == [0, 0]:
        return f"{tokens}they were trained on the same rows in another order"
    if alone and (not changed or sum(alone) < changed):
        moved = ", and the other rows have other numbers" if changed else ""
        return f"{tokens}they were trained on other data{counts}: {_alone(samples)}{moved}"
    if not changed:
        return f"{tokens}the {what} of the training rows that both have is the same{counts}"
    more = changed - len(samples["changed"])
    named = _numbers(samples["changed"]) + (f" and {more:,} more" if more else "")
    return f"{tokens}the {what} changed at sample {named}{counts}"


def _alone(samples: dict[str, Any]) -> str:
    """The rows that one side has and the other has nowhere."""
    return ", ".join(
        f"{name} alone has {number:,} ({_numbers(rows)}{', ...' if number > len(rows) else ''})"
        for name, number, rows in zip(NAMES, samples["alone"], samples["alone_rows"], strict=True)
        if number
    )


def _numbers(rows: list[int]) -> str:
    return ", ".join(f"{row:,}" for row in rows)


def _step_verdict(found: dict[str, Any], where: str) -> tuple[str, bool]:
    """Of runs that saw the same samples at the same rates, and computed something else."""
    log, step = found["log"], found.get("step", {})
    if log["kind"] == "jump" and step.get("step", log["step"]) != log["step"]:
        where = f"{_place(step['step'], log['phase'])}, logged at {log['step']:,}"
    one, other = log["values"]
    figure = "loss" if log["figure"] == "loss" else "gradient norm"
    begins = f"both saw the same samples; they part at {where} ({figure} {one:.6g} and {other:.6g})"
    if log["kind"] == "drift":
        begins = f"both saw the same samples; the {figure} grows apart gradually, beyond rounding at {where}"
    if not step or "why_not" in step:
        return begins, False
    if (module := step["module"]) is not None:
        way = " (its gradient)" if module["direction"] == "backward" else ""
        return f"{begins} in {module['module']}{way}{_causes(found)}{_carriers(module)}", False
    if unexplained := _unexplained(step):
        return f"{begins}: {unexplained}", False
    if step["weights"]["difference"] > SAME_WEIGHTS:
        return f"{begins}: their weights were others before, most in {step['weights']['parameter']}", False
    if log["kind"] == "drift":
        return (
            f"only the order of float sums differs: the {figure} grows apart by {abs(one - other):.1g} until"
            f" {where}, and redone from the same weights the step is the same within rounding",
            True,
        )
    return f"{begins}; redone from the same weights it is the same within rounding on both sides", False


def _unexplained(step: dict[str, Any]) -> str:
    """What a run logged that its recipe does not give here; empty where both steps are as logged."""
    for name, figures in zip(NAMES, step["unexplained"], strict=True):
        for logged, redone in figures.values():
            return (
                f"{name} logged {logged:.6g} there, and from its kept weights its recipe gives"
                f" {redone:.6g} here: what {name} did is not in its recipe (another library or machine,"
                " changed code, a hardware fault)"
            )
    return ""


def _causes(found: dict[str, Any]) -> str:
    """What of recipes, plans and versions may be the cause."""
    named = {
        **found["recipe"],
        **{name: values for name, values in found["plan"].items() if name in NUMERIC},
        **found["versions"],
    }
    reasons = [
        f"{in_words(name)} is {_text(one) or 'not set'} in A and {_text(other) or 'not set'} in B"
        for name, (one, other) in named.items()
    ]
    return f", where {'; '.join(reasons)}" if reasons else ""


def _carriers(module: dict[str, Any]) -> str:
    if not module.get("samples"):
        return ""
    named = ", ".join(f"{sample:,}" for sample in module["samples"])
    return f"; {module['share']:.0%} of the samples carry it, most: {named}"
