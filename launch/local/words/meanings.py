"""What a word of another tool is here, by the form of its value: our flags, nothing, or a refusal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import PurePath
from typing import NamedTuple

from isobatch.core.flags import BareValue


class Form(NamedTuple):
    """A form of values: a pattern for the whole text in lower case, and what messages call it."""

    pattern: str
    name: str


ON, OFF = Form("true|on|yes|1", "on"), Form("false|off|no|0", "off")
SHARE = Form(r"0\.\d+|1\.0+", "a share such as 0.1")
WHOLE = Form(r"\d+", "a whole number")
ZERO = Form(r"0|0\.0+", "0")
ANY = Form("(?s).*", "a value")
NEVER = "9999ep"
"""An --eval-every beyond the end of any run: it evaluates at its end alone."""

NO_PATIENCE_ENDS = "9999"
"""A --patience beyond the evaluations of any run: it keeps the best checkpoint and never stops."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a word is here where its value has a form."""

    form: Form
    flags: Mapping[str, str] | None = field(default_factory=dict)
    """Our flags and their values, in which {} stands for the word's own, {%} for it as a share in percent,
    {parent} and {last} for the parts of a path; None: it is refused."""
    remark: str | None = ""
    """Why it has no effect, what to use in its place, or what to know; None: nothing is said."""
    yields: bool = False
    """Whether it gives way to a flag of ours that the user gave as well."""

    def flags_for(self, value: str) -> dict[str, str]:
        """Our flags and their values for this value of the word."""
        return {name: _filled(template, value) for name, template in (self.flags or {}).items()}

    def line(self, name: str, value: str) -> str:
        """What the user reads who wrote the word; empty where nothing is said."""
        if self.remark is None or self.flags_for(value) == {name: value}:
            return ""
        ours = " ".join(f"{spelling(k)} {v}" for k, v in self.flags_for(value).items())
        if not ours:
            return f"{as_written(name, value)} has no effect: {self.remark}"
        return f"{as_written(name, value)} is {ours}" + (f": {self.remark}" if self.remark else "")


def to(form: Form | str = ANY, remark: str | None = "", **flags: str) -> Meaning:
    return Meaning(_form(form), flags, remark)


def unless_given(form: Form | str, remark: str | None, **flags: str) -> Meaning:
    """As `to`, where the user does not set these flags himself."""
    return Meaning(_form(form), flags, remark, yields=True)


def no_effect(remark: str, form: Form | str = ANY) -> Meaning:
    return Meaning(_form(form), {}, remark)


def refused(remark: str, form: Form | str = ANY) -> Meaning:
    return Meaning(_form(form), None, remark)


def switch(remark: str | None = "", **flags: str) -> tuple[Meaning, Meaning]:
    """These flags where the word is on, and nothing where it is off."""
    return to(ON, remark, **flags), to(OFF, None)


def _form(form: Form | str) -> Form:
    return form if isinstance(form, Form) else Form(form, form.replace("|", " or "))


def _filled(template: str, value: str) -> str:
    """The template with the value in place of {} or {%}; a list as Python writes it becomes a,b."""
    if template == "{%}":
        return f"{(Decimal(value) * 100).normalize():f}%"
    if template in ("{parent}", "{last}"):
        path = PurePath(value)
        return path.name if template == "{last}" else str(path.parent)
    if items := re.fullmatch(r"[\[(](.*)[\])]", value):
        value = ",".join(word.strip(" '\"") for word in items[1].split(",") if word.strip())
    return value if template == "{}" else template.replace("{}", value)


def as_written(name: str, value: str) -> str:
    return spelling(name) if isinstance(value, BareValue) else f"{spelling(name)} {value}"


def spelling(name: str) -> str:
    """A flag as it is typed: `--batch-size`."""
    return "--" + name.replace("_", "-")
