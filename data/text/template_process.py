"""The process that renders chat templates: a template may be anybody's, so time, memory and text are limited.

It is started by its path, with the seconds that one text may take, and reads JSON, a line with the
arguments of `texts` but the first, to which it answers with a line. An alarm ends it. Templates are rendered
by transformers itself.
"""

import bisect
import datetime
import functools
import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MEMORY_BYTES = 1 << 30
CHARACTERS = 1 << 24
"""Most of one text."""
TODAY = datetime.date(2024, 7, 26)
"""The date that templates see: prepared data must not depend on the day it was made."""


Render = Callable[[str, Mapping[str, Any]], tuple[str, list[Any]]]
"""(template, variables) -> (text, where each part begins and ends that the template marks as an answer's)."""
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@functools.lru_cache(maxsize=8)
def _own(template: str) -> Callable[..., str]:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template).render


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def render_own(template: str, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """A `Render` of isobatch's own templates, which mark nothing."""
    return _own(template)(**values), []


def transformers_renderer() -> Render:
    """A `Render` as `apply_chat_template` does it, but for the date."""
    from transformers.utils import chat_template_utils

    def render(template: str, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        compiled = chat_template_utils._compile_jinja_template(template)  # noqa: SLF001 - for its date
        compiled.environment.globals["strftime_now"] = TODAY.strftime
        asked = {"messages": [], **values}
        rendered: Any = chat_template_utils.render_jinja_template(
            [asked.pop("messages")],
            chat_template=template,
            return_assistant_tokens_mask=bool(MARK.search(template)),
            **asked,
        )
        (text,), spans = rendered
        return text, spans[0] if spans else []

    return render


def common(one: str, other: str) -> int:
    """How many characters two texts begin with together."""
    sizes = range(1, min(len(one), len(other)) + 1)
    return bisect.bisect_left(sizes, True, key=lambda size: not one.startswith(other[:size]))


def texts(render: Render, template: str, jobs: Sequence[Any]) -> list[Any]:
    """Of each job, variables and `wanted`: the fields of a `Rendered` for each wanted one, or an error."""
    return [_texts(render, template, values, wanted) for values, wanted in jobs]


def _texts(render: Render, template: str, values: Mapping[str, Any], wanted: Sequence[Any]) -> Any:
    found, first = [], ""
    try:
        for count, for_answer in wanted:
            said = {"messages": values["messages"][:count], "add_generation_prompt": for_answer}
            text, spans = render(template, {**values, **said})
            if len(text) > CHARACTERS:
                return f"it writes {len(text):,} characters, and may write {CHARACTERS:,}"
            same = common(first, text)
            found.append((same, text[same:], spans))
            first = first or text
    except MemoryError:
        return f"it needs more than {MEMORY_BYTES >> 30} GiB of memory"
    except Exception as error:
        return str(error).partition("\n")[0][:500] or type(error).__name__
    return found


def serve(seconds: float) -> None:
    """Answer every line of standard input, until its end."""
    render = transformers_renderer()
    with open("/proc/self/statm") as memory:  # noqa: PTH123 - what the libraries have reserved is no template's
        reserved = int(memory.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (reserved + MEMORY_BYTES,) * 2)

    def in_time(template: str, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its default action is the end of the process
        return render(template, values)

    for line in sys.stdin:
        found = json.dumps(texts(in_time, *json.loads(line)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(found + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(float(sys.argv[1]))
