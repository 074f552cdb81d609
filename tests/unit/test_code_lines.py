"""The product's size: code lines (neither blank, nor comment, nor docstring) stay under .ci/code-lines."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = ROOT / ".ci" / "code-lines"
PRODUCT = ("core", "engine", "models", "data", "launch")
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


def test_the_product_is_no_larger_than_its_limit_and_as_well_explained() -> None:
    files = [ROOT / "__init__.py", ROOT / "__main__.py"]
    files += [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    found = [code_and_words(file) for file in files]
    code, words = (sum(len(lines[kind]) for lines in found) for kind in (0, 1))
    most, share = LIMIT.read_text().split()
    assert code <= int(most), f"{code} code lines: take some out, or raise the limit in {LIMIT} and say why"
    assert words / (code + words) >= float(share), "comments and docstrings became fewer than the code"
