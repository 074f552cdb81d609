"""The site's pages that do not lie in docs/: README.md is its first page, and examples are shown as text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parent
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
"""Page of the site -> the file at the root of the project."""
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
"""A link or a picture: its text and its target."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from the project's root, with their links as they are from docs/."""
    for page, source in PAGES.items():
        text = (DOCS.parent / source).read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:\./)?docs/", "](", text).replace("](CONTRIBUTING.md", "](contributing.md")
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
