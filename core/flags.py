"""Command-line flags from dataclasses: a field is a flag, the string under it its help, its type its check.

No flag is declared twice: `Recipe`, a task's `Options`, `PlanOptions` and `RunOptions` are read here to
parse, to validate and to describe. Nothing heavy is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from isobatch.core.errors import UserError, explain_errors

T = typing.TypeVar("T")


DIGITS = r"\d+(?:_\d+)*(?:\.\d+)?(?:[eE]\+?\d\d?)?"
"""A number that is perhaps whole, as people write it: 1000, 1_000, 1e3, 1.5e3."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A period: `200` optimizer steps, `5%` of the run, `0.1ep` of an epoch, or `10m` of wall-clock time."""

    value: float
    unit: Literal["steps", "percent", "epochs", "minutes"]
    """`percent`: of the optimizer steps of the phase, which is the run where that has one phase."""

    @classmethod
    def parse(cls, text: str) -> Interval:
        """The interval that `text` writes. Raises ValueError."""
        match = re.fullmatch(rf"({DIGITS})(ep|m|%|)", text.strip())
        value, unit = float(match[1] if match else "nan"), _UNITS[match[2] if match else ""]
        if math.isnan(value) or (unit == "steps" and value % 1):
            raise ValueError(
                "is not an interval such as 200 (whole steps), 5% (of the run), 0.1ep (of an epoch) or"
                " 10m (minutes)"
            )
        if unit == "percent" and value > 100:
            raise ValueError("is more than the whole run: give at most 100%")
        return cls(value, unit)

    def steps(self, steps_per_epoch: int, phase_steps: int) -> int:
        """The interval in optimizer steps, of which the phase has `phase_steps`; a share gives at least 1.

        A time has none: asking for it is a bug.
        """
        assert self.unit != "minutes", "a wall-clock interval has no length in steps"
        shares = {"percent": self.value / 100 * phase_steps, "epochs": self.value * steps_per_epoch}
        return max(1, round(shares.get(self.unit, self.value))) if self.value else 0

    def __str__(self) -> str:
        # Every digit and no exponent: the text goes into recipe.json, is hashed and is read again.
        digits = f"{Decimal(repr(self.value)):f}".removesuffix(".0")
        return digits + {unit: mark for mark, unit in _UNITS.items()}[self.unit]


_UNITS: dict[str, Any] = {"": "steps", "%": "percent", "ep": "epochs", "m": "minutes"}
"""What stands behind an interval's number -> its unit."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks an Annotated str whose choices are the keys of a table, read each time they are needed."""

    table: Iterable[str]
    before: tuple[str, ...] = ()
    """Choices listed before those of the table."""

    @property
    def choices(self) -> tuple[str, ...]:
        return (*self.before, *self.table)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """For a task, or a kind of data, without flags of its own."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A dataclass field as a command-line flag."""

    name: str
    kind: Any
    default: Any
    help: str

    @property
    def spelling(self) -> str:
        """As typed: `--batch-size`."""
        return spelling(self.name)


def spelling(name: str) -> str:
    """A flag as it is typed: `--batch-size`; of one letter, as other tools have them, `-n`."""
    return ("--" if name[1:] else "-") + name.replace("_", "-")


def _flags_of(options: type) -> dict[str, Flag]:
    hints, helps = typing.get_type_hints(options, include_extras=True), _field_docs(options)
    return {
        name: Flag(name, hints[field.name], _default(field), helps.get(field.name, ""))
        for field in dataclasses.fields(options)
        if not field.metadata.get("derived") and (name := field.name.rstrip("_"))  # no field is called `from`
    }


flags_of: Callable[[type], dict[str, Flag]] = functools.cache(_flags_of)
"""The flags of one dataclass, in order, not to be changed. Fields marked `derived` are none."""


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _field_docs(options: type) -> dict[str, str]:
    """The string literal under each field, from the class and the dataclasses it extends."""
    docs: dict[str, str] = {}
    for cls in reversed([c for c in options.__mro__ if dataclasses.is_dataclass(c)]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        except OSError:  # typed into an interactive session: there is no source to read
            continue
        assert isinstance(body, ast.ClassDef)
        for field, doc in zip(body.body, body.body[1:], strict=False):
            match field, doc:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                    docs[name] = " ".join(str(text).split())
    return docs


def describe_type(kind: Any) -> str:
    """A type as the help shows it: its choices, or a word such as `integer` with its range."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if choices := choices_of(kind):
        return "|".join(map(str, choices))
    if origin is typing.Annotated:
        return f"{describe_type(arguments[0])}, {arguments[1]}"
    if origin is tuple:
        return f"{describe_type(arguments[0])} (or several: a,b)"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(a) for a in arguments if a is not type(None))
    return {int: "integer", float: "number", str: "text", bool: "on|off", Interval: "interval"}.get(
        kind, str(kind)
    )


def choices_of(kind: Any) -> tuple[Any, ...]:
    """The values that a Literal or a OneOf allows; nothing for another type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated and isinstance(arguments[1], OneOf):
        return arguments[1].choices
    return arguments if origin is Literal else ()


class BareValue(str):
    """The "True" of a flag written without a value: a switch turned on, or a value forgotten."""


def is_switch(kind: Any) -> bool:
    """Whether a flag of this type may be written without a value."""
    if choices := choices_of(kind):
        return "on" in choices
    return kind is bool or any(map(is_switch, typing.get_args(kind)))


def convert(flag: Flag, value: Any) -> Any:
    """The typed value of a flag, from text or JSON. Raises UserError where it is not valid."""
    if isinstance(value, BareValue) and not is_switch(flag.kind):
        raise UserError(f"{flag.spelling}: needs a value")
    with explain_errors(f"{flag.spelling} {value}", ValueError, TypeError, OverflowError):
        return _convert(flag.kind, value)


def _convert(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value)
    if choices := choices_of(kind):
        return _convert_choice(choices, value)
    if origin is typing.Annotated:
        number = _convert(arguments[0], value)
        if not (allowed := arguments[1]).allows(number):
            is_percent = allowed.high <= 1 < number and allowed.allows(number / 100)
            raise ValueError(f"must be {allowed}" + f" ({number:g} % is {number / 100:g})" * is_percent)
        return number
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else str(value).split(",")
        return tuple(_convert(arguments[0], item) for item in items)
    if kind not in _SCALARS:
        known = "int, float, bool, str, Interval, Literal[...], tuple[int, ...] or one of them | None"
        raise TypeError(f"a field of type {kind} cannot be a flag: use {known}")
    return _SCALARS[kind](value)


def _convert_union(arguments: tuple[Any, ...], value: Any) -> Any:
    if value is None or _is_unset(arguments, value):
        return None
    problems = []
    for argument in arguments:
        if argument is not type(None):
            try:
                return _convert(argument, value)
            except ValueError as error:
                problems.append(str(error))
    raise ValueError("; ".join(dict.fromkeys(problems)))


def _is_unset(arguments: tuple[Any, ...], value: Any) -> bool:
    """Whether `none` leaves an optional number or text open. Among choices it is one of them, or no word."""
    if str(value).lower() != "none" or type(None) not in arguments:
        return False
    choices = [choices_of(argument) for argument in arguments if argument is not type(None)]
    return not all(choices) and not any("none" in some for some in choices)


def _convert_choice(choices: tuple[Any, ...], value: Any) -> Any:
    for choice in choices:
        if str(value).lower() == str(choice).lower():
            return choice
    # People also write `--compile` and `--no-compile` where a switch has more than two positions.
    switch = {"true": "on", "false": "off"}.get(str(value).lower())
    if switch in choices:
        return switch
    hint = nearest_hint(str(value), map(str, choices))
    raise ValueError(f"is not one of {', '.join(map(str, choices))}{hint}")


def _integer(value: Any) -> int:
    found = None if isinstance(value, bool) else re.fullmatch(rf"[+-]?{DIGITS}", str(value).strip())
    if found is None or (number := Decimal(found[0])) != int(number):
        raise ValueError("is not an integer")
    return int(f"{number:.0f}")


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(str(value).removesuffix("%")) / (100 if str(value).endswith("%") else 1)
    except ValueError:
        pointed = str(value).replace(",", ".") if re.fullmatch(r"[+-]?\d*,\d+", str(value)) else "0.001"
        point = f": decimals have a point, as in {pointed}" * ("," in str(value))
        raise ValueError(f"is not a number{point}") from None
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number


ON_WORDS = ("true", "on", "yes", "1")
SWITCH_WORDS = (*ON_WORDS, "false", "off", "no", "0")


def _switch(value: Any) -> bool:
    word = str(value).lower()
    if word not in SWITCH_WORDS:
        raise ValueError("is neither on nor off")
    return word in ON_WORDS


def _text(value: Any) -> str:
    if not str(value).strip():
        raise ValueError("is empty")
    return str(value)


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    int: _integer,
    float: _number,
    bool: _switch,
    str: _text,
    Interval: lambda value: value if isinstance(value, Interval) else Interval.parse(str(value)),
}


def known_options(options: Mapping[str, Any], kinds: Iterable[type]) -> dict[str, Any]:
    """The options, each converted to its type, a field of one of these dataclasses. Raises UserError."""
    known = {name: flag for kind in kinds for name, flag in flags_of(kind).items()}
    for name in options:
        if name not in known:
            raise UserError(f"{name}: there is no such option{nearest_hint(name, known)}")
    return {name: convert(known[name], value) for name, value in options.items()}


def nearest_hint(word: str, valid: Iterable[str]) -> str:
    """A hint naming the closest valid word; nothing where none is like it, as a wrong hint misleads."""
    found = nearest(word, valid)
    return f" (did you mean {found}?)" if found else ""


def nearest(word: str, valid: Iterable[str]) -> str:
    """The closest valid word: most letters in common, the same letters, or the word begins it; else empty.

    Another first letter makes a short word another word: grpo is no orpo.
    """
    known, low = list(valid), word.lower()
    alike = [name for name in known if len(word) > SHORT or name[:1] == word[:1]]
    close = difflib.get_close_matches(word, alike, n=1, cutoff=LIKE)
    begun = low if len(low.strip("-")) >= 3 else "\0"
    close += [n for n in known if sorted(n.lower()) == sorted(low) or n.lower().startswith(begun)]
    return close[0] if close else ""


SHORT = 4
"""Most letters of a word that may be another one altogether with its first letter changed."""
LIKE = 0.75
"""Share of letters in common, in order, from which on one word is taken for another misspelt."""


def to_json_value(value: Any) -> Any:
    """A JSON-ready form of an options value."""
    if isinstance(value, Interval):
        return str(value)
    return [to_json_value(v) for v in value] if isinstance(value, tuple) else value


def value_text(value: Any) -> str:
    """A value of a flag as it would be typed."""
    if isinstance(value, bool):
        return "on" if value else "off"
    value = to_json_value(value)
    if isinstance(value, list):
        return ",".join(map(value_text, value))
    return repr(value) if isinstance(value, float) else str(value)


def options_to_dict(options: Any) -> dict[str, Any]:
    """Field -> its value as JSON."""
    return {f.name: to_json_value(getattr(options, f.name)) for f in dataclasses.fields(options)}


def check_fields(options: Any, but_for: str = "") -> None:
    """Convert every field of a frozen options dataclass to its type, for its `__post_init__`.

    `but_for`: a field that is left as it is. Raises UserError where a value has the wrong type or is not in
    its range.
    """
    for name, flag in flags_of(type(options)).items():
        if name != but_for:
            object.__setattr__(options, name, convert(flag, getattr(options, name)))


def build_options(options: type[T], values: Mapping[str, Any]) -> T:
    """An options dataclass from text or JSON values, each checked.

    Raises UserError where a value is not valid, or a name unknown.
    """
    return options(**known_options(values, (options,)))
