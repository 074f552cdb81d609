"""Machines by name, for the flags that name several."""

from __future__ import annotations

from isobatch.core.errors import UserError
from isobatch.engine.machine import hardware
from isobatch.engine.machine.detect import detect

HERE = "here"
"""The name of the machine that this command runs on."""


def parse_machine(name: str, flag: str) -> hardware.Hardware:
    """The machine of a name as in --hardware, or `here`. Raises UserError, which begins with `flag`."""
    if name.strip().lower() == HERE:
        return detect()
    try:
        return hardware.parse_hardware(name)
    except UserError as error:
        raise UserError(str(error).replace("--hardware", flag, 1)) from None
