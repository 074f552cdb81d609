"""The result of a check: ok, warning or broken, in a sentence, with what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `doctor`."""

    name: str
    state: Literal["ok", "warning", "broken"]
    """warning: it works, and slower or less safely than it could. broken: something does not work."""
    text: str
    remedy: str = ""
    """The command, or the change, that mends it; empty where all is well."""


def ok(name: str, text: str) -> Check:
    return Check(name, "ok", text)


def warning(name: str, text: str, remedy: str) -> Check:
    return Check(name, "warning", text, remedy)


def broken(name: str, text: str, remedy: str) -> Check:
    return Check(name, "broken", text, remedy)


def ok_if(is_well: bool, name: str, text: str, remedy: str) -> Check:
    """The line, with the remedy and as a warning unless all is well."""
    return ok(name, text) if is_well else warning(name, text, remedy)
