"""Every file, test and link that the documents name exists."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import sys
import tomllib
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import yaml

from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DECISIONS = ROOT / "docs" / "decisions"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
RUN_FOLDERS = (
    "checkpoints",
    "exports",
    "chosen",
    "final",
    "plots",
    "report",
    "report-alone",
    "runs",
    "slurm",
)
"""Folders that a run writes: documents name files in them, and the repository has none."""
CODE_FOLDERS = "benchmarks configs core data docs engine examples launch models tests"
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
PLACEHOLDER = re.compile(r"[A-Z]+\.py")
"""A file that the reader is to make, as in models/NAME.py."""


def problems(text: str, folder: Path = ROOT) -> list[str]:
    """What a Markdown text names between backticks, or links to, and is not there.

    A path is relative to the repository's root; `file.py::name` and `file.py::Class.name` name a definition.
    """
    fences, prose = re.findall(r"```.*?```", text, re.S), re.sub(r"```.*?```", "", text, flags=re.S)
    shown = [word for span in re.findall(r"`([^`]+)`", prose) for word in _paths(span)]
    # Commands and pictures hold the reader's own paths too.
    shown += [
        word for fence in fences for word in _paths(fence) if word.split("/")[0] in CODE_FOLDERS.split()
    ]
    linked = re.findall(r"\]\((?!\w+:|#)([^)#]+)", prose)
    return [*(w for w in shown if not _exists(w)), *(link for link in linked if not (folder / link).exists())]


def _paths(text: str) -> Iterator[str]:
    """Words with a slash, or that end in .md, and are no option, address or pattern of another kind."""
    for word in text.split():
        word = word.strip("()[],;:'\"").removesuffix(".")
        path = word.partition("::")[0]
        if ("/" in path or path.endswith(".md")) and PATH.fullmatch(path):
            yield word


def _exists(word: str) -> bool:
    path, _, name = word.partition("::")
    if path.split("/")[0] in RUN_FOLDERS or PLACEHOLDER.fullmatch(path.rpartition("/")[2]):
        return True
    if "*" in path:
        return any(ROOT.glob(path))
    file = ROOT / path
    return file.exists() and (not name or name.partition("[")[0] in _definitions(file))


@functools.cache
def _definitions(file: Path) -> set[str]:
    """Names that a Python file defines: `name`, and `Class.name` of what stands in a class."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    return {*_names(module), *(f"{c.name}.{name}" for c in classes for name in _names(c))}


def _names(parent: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in parent.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_document_names_exists(document: Path) -> None:
    assert problems(document.read_text(encoding="utf-8"), document.parent) == []


def test_every_decision_is_listed() -> None:
    records = sorted(p.name for p in DECISIONS.glob("[0-9]*.md"))
    listed = re.findall(r"\]\((\d[^)]*)\)", (DECISIONS / "README.md").read_text(encoding="utf-8"))
    assert listed == records
    assert [name[:4] for name in records] == [f"{n:04}" for n in range(1, len(records) + 1)]


def test_every_place_names_the_same_version() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    places = {"CITATION.cff": r"^version: (\S+)", "CHANGELOG.md": r"^## (\d\S+)"}
    found = {
        name: re.findall(pattern, (ROOT / name).read_text(), re.M)[0] for name, pattern in places.items()
    }
    assert set(found.values()) == {wanted}


def test_the_entry_to_cite_is_that_of_the_citation_file() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    entry = (ROOT / "docs" / "papers.md").read_text().partition("```bibtex")[2]
    named = {name: value.strip("{}") for name, value in re.findall(r"(\w+) = \{(.*)\},", entry)}
    wanted = {name: str(cited[name]) for name in ("title", "version", "license")}
    assert named == {**wanted, "date": str(cited["date-released"]), "author": cited["authors"][0]["name"]}


def test_the_sites_pages_of_tasks_hold_every_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook without mkdocs, which has an environment of its own."""
    monkeypatch.setitem(sys.modules, "mkdocs.structure.files", SimpleNamespace(File=None))
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    found = hooks["described"]("classifier")
    page = hooks["task_page"]("classifier", found)
    assert all(f"\n| `{row['flag']}` |" in page for flags in found["flags"].values() for row in flags)
    assert "auto&#124;cpu&#124;cuda" in page


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`nowhere/registry.py` and `NOTES.md`", ["nowhere/registry.py", "NOTES.md"]),
        ("`engine/strategies/*.txt`", ["engine/strategies/*.txt"]),
        ("`tests/unit/test_docs.py::test_nothing`", ["tests/unit/test_docs.py::test_nothing"]),
        ("`engine/registry.py::LoadedWorkload.make`, `engine/registry.py::TASKS`", []),
        ("`engine/registry.py::LoadedWorkload.mend`", ["engine/registry.py::LoadedWorkload.mend"]),
        ("`accelerate launch launch/trian.py --task T`", ["launch/trian.py"]),
        ("`final/model.safetensors`, `plan.json`, `models/NAME.py`, `~/.cache/isobatch`, `on|off`", []),
        ("```\nlaunch/train.py --data texts/\nlaunch/trian.py\n```", ["launch/trian.py"]),
        ("[one](README.md), [two](NOTES.md), [three](https://example.org/NOTES.md)", ["NOTES.md"]),
    ],
)
def test_what_is_missing_is_seen(text: str, missing: list[str]) -> None:
    assert problems(text) == missing
