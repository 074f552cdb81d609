"""Size: code lines (neither blank, nor comment, nor docstring) stay under the limits of .ci/code-lines."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = ROOT / ".ci" / "code-lines"
FOLDERS = {
    "product": ("core", "engine", "models", "data", "launch", "__init__.py", "__main__.py"),
    "tests": ("tests",),
    "benchmarks": ("benchmarks",),
}
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_and_words(file: Path) -> tuple[set[int], set[int]]:
    """Numbers of a file's lines of code, and of its lines of comments and docstrings."""
    bodies = [getattr(node, "body", None) for node in ast.walk(ast.parse(file.read_bytes()))]
    alone = [node for body in bodies if isinstance(body, list) for node in body if isinstance(node, ast.Expr)]
    texts = [n for n in alone if isinstance(n.value, ast.Constant) and isinstance(n.value.value, str)]
    words = {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    code: set[int] = set()
    with file.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            lines = range(token.start[0], token.end[0] + 1)
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                words |= set(lines)
            elif token.type not in NO_CODE:
                code |= set(lines) - words
    return code, words


def counted(kind: str) -> tuple[int, int]:
    """Code lines, and lines of comments and docstrings."""
    files = [
        f
        for place in FOLDERS[kind]
        for f in ((ROOT / place).rglob("*.py"), [ROOT / place])[place[-3:] == ".py"]
    ]
    found = [code_and_words(file) for file in files]
    return sum(len(code) for code, _ in found), sum(len(words) for _, words in found)


LIMITS = dict(line.split() for line in LIMIT.read_text().splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("kind", FOLDERS)
def test_nothing_grows_beyond_its_limit_and_the_product_stays_explained(kind: str) -> None:
    code, words = counted(kind)
    assert code <= int(LIMITS[kind]), f"{code} code lines: take some out, or say why {LIMIT} allows more"
    if kind == "product":
        assert words / (code + words) >= float(LIMITS["words"]), "comments and docstrings became fewer"
