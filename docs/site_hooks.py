"""The site's pages that do not lie in docs/: README.md is its first page, examples are shown as text.

Each task has a page with what `describe` says of it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parent
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
"""Page of the site -> the file at the root of the project."""
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
"""A link or a picture: its text and its target."""


@functools.cache
def tasks() -> dict[str, str]:
    """Page of the site -> the text of a task, or of the chain of tasks."""
    names = [*described(), "compress"]
    return {f"tasks/{name}.md": task_page(name, described(name)) for name in names}


def described(*words: str) -> Any:
    """What `describe` answers, by the Python of the project: the site's own has none of its libraries."""
    command = [os.environ.get("PROJECT_PYTHON", sys.executable), "-m", "launch", "describe", *words, "--json"]
    done = subprocess.run(command, cwd=DOCS.parent, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def task_page(name: str, found: dict[str, Any]) -> str:
    """Every flag of a task in tables, as Markdown."""
    lines = [f"# {name}", "", f"What `isobatch describe {name} --all` says.", ""]
    for title, flags in found["flags"].items():
        lines += [f"## {title}", "", "| flag | values | default | meaning |", "|---|---|---|---|"]
        for row in flags:
            default = "" if row["default"] is None else f"`{cell(row['default'])}`"
            lines.append(f"| `{row['flag']}` | {cell(row['type'])} | {default} | {cell(row['help'])} |")
        lines.append("")
    return "\n".join([*lines, *(f"- {cell(note)}" for note in found["notes"])])


def cell(value: Any) -> str:
    """As text of a table, in which no bar and nothing in brackets is lost."""
    return str(value).replace("|", "&#124;").replace("<", "&lt;").replace("\n", " ")


def on_config(config: Any) -> Any:
    """Name the pages of tasks among the others."""
    config.nav.append({"Flags of tasks": sorted(tasks())})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from the project's root, with their links as they are from docs/."""
    for page, source in PAGES.items():
        text = (DOCS.parent / source).read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:\./)?docs/", "](", text)
        for other, name in PAGES.items():
            text = text.replace(f"]({name}", f"]({other}")
        files.append(File.generated(config, page, content=text))
    for page, text in tasks().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Names of the project's files that are no pages, in place of links to them."""
    folder = (DOCS / page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        target = found[2].partition("#")[0]
        if not target or "://" in target or target in PAGES:
            return found[0]
        path = (folder / target).resolve()
        return found[0] if path.is_relative_to(DOCS) and path.exists() else f"`{found[1]}`"

    return LINK.sub(replaced, markdown)
