"""Jinja as chat templates are written for: what transformers gives them, in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

TODAY = datetime.date(2024, 7, 26)
"""The day in every template that tells it: prepared data must not depend on when it was made."""


class Refused(ValueError):
    """A template that cannot be read, or that raises: one line."""


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text of a template."""
    import jinja2

    try:
        return _compiled(template)(**values)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise Refused(str(error).partition("\n")[0] or type(error).__name__) from None


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Callable[..., str]:
    """Templates of the hub are anyone's code: they see plain values and reach nothing else."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": TODAY.strftime}
    return environment.from_string(template).render


def _to_json(value: Any, **how: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **how})


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


@functools.cache
def _generation_tag() -> Any:
    """The tag with which some templates mark answers; it changes no text."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
