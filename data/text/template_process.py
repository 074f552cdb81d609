"""The process that renders chat templates: a template may be anybody's, so time, memory and text are limited.

It is started by its path, with the seconds that one text may take, and reads a JSON object a line: `values`,
`stops`, and `template` where it is another than before. It answers with the fields of `Rendered`, or `error`.
An alarm ends it. Templates are rendered by transformers itself.
"""

import datetime
import functools
import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

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


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with together."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def answer(render: Render, template: str, values: Mapping[str, Any], stops: Sequence[int]) -> dict[str, Any]:
    """The fields of `Rendered`, or `error`: a line."""
    try:
        text, spans = render(template, values)
        prompts = []
        for stop in stops:
            asked = {"messages": values["messages"][:stop], "add_generation_prompt": True}
            prompt, _ = render(template, {**values, **asked})
            same = len(prompt) if text.startswith(prompt) else _common(text, prompt)
            prompts.append((same, prompt[same:]))
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 30} GiB of memory"}
    except Exception as error:
        return {"error": str(error).partition("\n")[0][:500] or type(error).__name__}
    if len(text) > CHARACTERS:
        return {"error": f"it writes {len(text):,} characters, and may write {CHARACTERS:,}"}
    return {"text": text, "spans": spans, "prompts": prompts}


def serve(seconds: float) -> None:
    """Answer every line of standard input, until its end."""
    render, template = transformers_renderer(), ""
    with open("/proc/self/statm") as memory:  # noqa: PTH123 - what the libraries have reserved is no template's
        reserved = int(memory.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (reserved + MEMORY_BYTES,) * 2)

    def in_time(template: str, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its default action is the end of the process
        return render(template, values)

    for line in sys.stdin:
        asked = json.loads(line)
        template = asked.get("template", template)
        found = json.dumps(answer(in_time, template, asked["values"], asked["stops"]))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(found + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(float(sys.argv[1]))
