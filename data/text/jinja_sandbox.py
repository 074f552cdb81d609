"""Rendering of chat templates: Jinja with the functions that transformers provides, in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jinja2 import nodes
    from jinja2.parser import Parser

TODAY = datetime.date(2024, 7, 26)
"""The date that templates see: prepared data must not depend on the day it was made."""


class ChatTemplateError(ValueError):
    """A template that cannot be parsed, or that raises. The message is one line."""


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text of a template with these variables. Raises ChatTemplateError."""
    import jinja2

    try:
        return _compile(template)(**values)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ChatTemplateError(str(error).partition("\n")[0] or type(error).__name__) from None


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Callable[..., str]:
    """The compiled template. It runs in a sandbox, because templates of the hub are untrusted code."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": TODAY.strftime}
    return environment.from_string(template).render


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


@functools.cache
def _generation_tag() -> Any:
    """A Jinja extension that ignores the tag {% generation %}, with which some templates mark answers."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
