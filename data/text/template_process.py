"""The process that renders chat templates: a template may be anybody's, so time, memory and text are limited.

It is started by its path, with the seconds that one text may take, and reads a JSON object a line: `values`,
and `template` where it is another than before. It answers with `text` or `error`. An alarm ends it.
"""

import datetime
import functools
import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30
CHARACTERS = 1 << 24
"""Most of one text."""
TODAY = datetime.date(2024, 7, 26)
"""The date that templates see: prepared data must not depend on the day it was made."""


class Generation(Extension):
    """Ignores the tag {% generation %}, with which some templates mark answers."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def compiled(template: str) -> Callable[..., str]:
    """The function that renders a template. It runs in a sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": TODAY.strftime}
    return environment.from_string(template).render


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def answer(template: str, values: dict[str, Any]) -> dict[str, str]:
    """`text`, or `error`: a line."""
    try:
        text = compiled(template)(**values)
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 30} GiB of memory"}
    except Exception as error:
        return {"error": str(error).partition("\n")[0][:500] or type(error).__name__}
    if len(text) > CHARACTERS:
        return {"error": f"it writes {len(text):,} characters, and may write {CHARACTERS:,}"}
    return {"text": text}


def serve(seconds: float) -> None:
    """Answer every line of standard input, until its end."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    template = ""
    for line in sys.stdin:
        asked = json.loads(line)
        template = asked.get("template", template)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its default action is the end of the process
        found = json.dumps(answer(template, asked["values"]))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(found + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(float(sys.argv[1]))
