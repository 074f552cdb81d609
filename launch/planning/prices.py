"""Prices of machines: `--price 2.10/h`, or a file that names a price for each machine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.launch.planning.machines import parse_machine

if TYPE_CHECKING:
    from isobatch.engine.machine.hardware import Hardware

PRICE = r"(\d+(?:\.\d+)?)(?:/h)?"
MEANING = (
    "a price is for an hour of one GPU (of the machine, where it has none); a file's price for an hour of the"
    " machine it names; GPUs that stay idle are paid too"
)
"""What a price means, as users read it beside a cost."""


MachineKey = tuple[int, int, str]
"""(nodes, GPUs of a node, their name or the machine in words): what two spellings of a machine share."""


def machine_key(hardware: Hardware, nodes: int | None = None, gpus: int | None = None) -> MachineKey:
    """The key of a machine, or of one with other counts of nodes and of GPUs in each."""
    name = (hardware.gpu.card or hardware.gpu.name) if hardware.gpus else hardware.describe()
    return nodes or hardware.nodes, len(hardware.gpus) if gpus is None else gpus, name


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices by the hour, in whatever currency the user thinks in."""

    per_gpu: float | None = None
    """Of one GPU, or of a machine without any."""
    per_machine: Mapping[MachineKey, float] = field(default_factory=dict)

    def per_hour(self, hardware: Hardware) -> float | None:
        """The price of all of a machine for an hour; None where it has none.

        The price of the machine itself comes before that of one of its nodes, and that before one GPU's.
        """
        if self.per_gpu is not None:
            return self.per_gpu * hardware.devices
        parts = [
            (machine_key(hardware), 1),
            (machine_key(hardware, nodes=1), hardware.nodes),
            (machine_key(hardware, nodes=1, gpus=min(1, len(hardware.gpus))), hardware.devices),
        ]
        return next((self.per_machine[key] * count for key, count in parts if key in self.per_machine), None)


def parse_prices(text: str | None) -> Prices | None:
    """The prices that --price gives: 2.10/h, or a YAML or JSON file {machine: price}. Raises UserError."""
    if text is None:
        return None
    if match := re.fullmatch(PRICE, text.strip().lower()):
        return Prices(per_gpu=_positive(float(match[1]), f"--price {text}"))
    path = Path(text).expanduser()
    if not path.is_file():
        raise UserError(f"--price {text}: is neither a price such as 2.10/h nor a file of prices")
    return Prices(
        per_machine={
            machine_key(parse_machine(str(name), f"--price {path}:")): _price(name, value, path)
            for name, value in _read(path).items()
        }
    )


def _read(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        found = None
    if not isinstance(found, dict) or not found:
        raise UserError(f"--price {path}: holds no lines such as 8xh100: 23.92")
    return found


def _price(name: object, value: object, path: Path) -> float:
    match = re.fullmatch(PRICE, str(value).strip().lower())
    if match is None:
        raise UserError(f"--price {path}: {name}: {value} is no price an hour such as 2.10")
    return _positive(float(match[1]), f"--price {path}: {name}")


def _positive(price: float, where: str) -> float:
    if not math.isfinite(price) or price <= 0:
        raise UserError(f"{where}: a price must be above 0")
    return price
