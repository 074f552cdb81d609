"""Which targets `plan --compare` names: machines, modes, or a task's own schemes of training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.launch.local.arguments import parse_request
from isobatch.launch.planning.comparison import compare, format_comparison
from isobatch.launch.planning.machines import HERE, parse_machine
from isobatch.launch.planning.targets import PlanCommandOptions, print_notes, target_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.machine.hardware import Hardware
    from isobatch.launch.local.arguments import Request
    from isobatch.launch.planning.estimate import Target
    from isobatch.launch.planning.prices import Prices

MODES = ("full", "fast")


def compare_targets(
    words: Sequence[str],
    request: Request,
    options: PlanCommandOptions,
    prices: Prices | None,
    deadline: float | None,
) -> int:
    """Print the machines or modes of --compare side by side. Raises UserError where none of them fits."""
    flag = f"--compare {options.compare}"
    names = [name.strip() for name in str(options.compare).split(",")]
    if "" in names or len(set(names)) < len(names):
        raise UserError(f"{flag}: give names of machines, each once, as in rtx4080-laptop,8xh100,here")
    if not set(names) & set(MODES):
        tables = {"machine": _machines(request, options, names)}
    elif set(names) <= set(MODES):
        tables = _modes(words, request, options, names)
    else:
        raise UserError(f"{flag}: {_why_neither(names)}")
    results = {column: compare(flag, targets, prices, deadline) for column, targets in tables.items()}
    if "scheme" in results:
        results["scheme"] = results["scheme"].ranked()
    if options.json:
        answer = {f"{column}s": found.to_dict() for column, found in results.items()}
        print(atomic_files.json_text(answer, ensure_ascii=False))
    else:
        print("\n\n".join(format_comparison(found, column) for column, found in results.items()))
    return 0


def _why_neither(names: Sequence[str]) -> str:
    """Why names, some of them of modes, cannot be compared."""
    for name in (name for name in names if name not in MODES):
        if hint := nearest_hint(name, MODES):
            return f"{name} is no mode{hint}"
    return f"compare machines or modes ({', '.join(MODES)}), not both at once"


def _machines(request: Request, options: PlanCommandOptions, names: Sequence[str]) -> list[Target]:
    if options.hardware:
        raise UserError(f"--hardware {options.hardware}: --compare names the machines; leave one of them out")
    machines = {name: parse_machine(name, "--compare") for name in names}
    first = target_of(request, options, machines[names[0]])
    return [replace(first, name=name, hardware=machine) for name, machine in machines.items()]


def _modes(
    words: Sequence[str], request: Request, options: PlanCommandOptions, modes: Sequence[str]
) -> dict[str, list[Target]]:
    """The recipe in each mode, and in the first of them the task's own schemes."""
    machine = parse_machine(options.hardware or HERE, "--hardware")
    variants = {mode: parse_request([*words, "--mode", mode], "plan", PlanCommandOptions) for mode in modes}
    for found in variants.values():
        print_notes(found, but=request.notes)
    targets = [target_of(found, options, machine, mode) for mode, found in variants.items()]
    return {"mode": targets} | _schemes([*words, "--mode", modes[0]], request, options, machine)


def _schemes(
    words: Sequence[str], request: Request, options: PlanCommandOptions, machine: Hardware
) -> dict[str, list[Target]]:
    """The task's own schemes of training, if it has any and the user chose none."""
    found = []
    for name, values in request.workload.task.schemes.items():
        flags = [word for field, value in values.items() for word in (f"--{field.replace('_', '-')}", value)]
        try:
            scheme = parse_request([*words, *flags], "plan", PlanCommandOptions)
        except UserError:  # the user chose a scheme
            return {}
        found.append(target_of(scheme, options, machine, name))
    return {"scheme": found} if found else {}
