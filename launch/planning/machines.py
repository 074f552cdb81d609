"""Machines by name, and what they cost: `--price 2.10/h`, or a file that names a price for each machine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from isobatch.core.errors import UserError
from isobatch.engine.machine import hardware
from isobatch.engine.machine.detect import detect

HERE = "here"
"""The name of the machine that this command runs on."""
PRICE = r"(\d+(?:\.\d+)?)(?:/h)?"
MEANING = (
    "a price is for an hour of one GPU (of the machine, where it has none); a file's price for an hour of the"
    " machine it names; GPUs that stay idle are paid too"
)
"""What a price means, as users read it beside a cost."""
MachineKey = tuple[int, int, str]
"""(nodes, GPUs of a node, their name or the machine in words): what two spellings of a machine share."""


def parse_machine(name: str, flag: str) -> hardware.Hardware:
    """The machine of a name as in --hardware, or `here`. Raises UserError, which begins with `flag`."""
    if name.strip().lower() == HERE:
        return detect()
    try:
        return hardware.parse_hardware(name)
    except UserError as error:
        raise UserError(str(error).replace("--hardware", flag, 1)) from None


def machine_key(machine: hardware.Hardware, nodes: int | None = None, gpus: int | None = None) -> MachineKey:
    """The key of a machine, or of one with other counts of nodes and of GPUs in each."""
    name = (machine.gpu.card or machine.gpu.name) if machine.gpus else machine.describe()
    return nodes or machine.nodes, len(machine.gpus) if gpus is None else gpus, name


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices by the hour, in whatever currency the user thinks in."""

    per_gpu: float | None = None
    """Of one GPU, or of a machine without any."""
    per_machine: Mapping[MachineKey, float] = field(default_factory=dict)

    def per_hour(self, machine: hardware.Hardware) -> float | None:
        """The price of all of a machine for an hour; None where it has none.

        The price of the machine itself comes before that of one of its nodes, and that before one GPU's.
        """
        if self.per_gpu is not None:
            return self.per_gpu * machine.devices
        parts = {
            machine_key(machine, nodes=1, gpus=min(1, len(machine.gpus))): machine.devices,
            machine_key(machine, nodes=1): machine.nodes,
            machine_key(machine): 1,
        }
        known = [self.per_machine[key] * count for key, count in parts.items() if key in self.per_machine]
        return known[-1] if known else None


def parse_prices(text: str | None) -> Prices | None:
    """The prices that --price gives: 2.10/h, or a YAML or JSON file {machine: price}. Raises UserError."""
    if text is None:
        return None
    if re.fullmatch(PRICE, text.strip().lower()):
        return Prices(per_gpu=_price(text, f"--price {text}"))
    path = Path(text).expanduser()
    if not path.is_file():
        raise UserError(f"--price {text}: is neither a price such as 2.10/h nor a file of prices")
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        found = None
    if not isinstance(found, dict) or not found:
        raise UserError(f"--price {path}: holds no lines such as 8xh100: 23.92")
    machines = {str(name): parse_machine(str(name), f"--price {path}:") for name in found}
    prices = {str(name): _price(value, f"--price {path}: {name}") for name, value in found.items()}
    return Prices(per_machine={machine_key(machines[name]): price for name, price in prices.items()})


def _price(value: object, where: str) -> float:
    match = re.fullmatch(PRICE, str(value).strip().lower())
    if match is None:
        raise UserError(f"{where}: {value} is no price an hour such as 2.10")
    if not math.isfinite(price := float(match[1])) or price <= 0:
        raise UserError(f"{where}: a price must be above 0")
    return price
