"""Libraries that not every run needs, and the extra of this package that brings each."""

from __future__ import annotations

import importlib.util

from isobatch.core.errors import UserError
from isobatch.core.package import table_beside

_EXTRAS = table_beside(__file__, "extras")
EXTRAS = {library: extra for extra, libraries in _EXTRAS.items() for library in libraries.split()}
"""Library -> the extra of pyproject.toml with it."""


def has(library: str) -> bool:
    """Whether a library can be imported; it is not imported."""
    return importlib.util.find_spec(library) is not None


def need(library: str, what: str) -> None:
    """Raise UserError that names the extra where a library is missing; `what` is the flag that needs it."""
    if not has(library):
        raise UserError(lacking(library, what))


def lacking(library: str, what: str) -> str:
    """What is said where `what` needs a library that is missing."""
    package = f"'isobatch[{EXTRAS[library]}]'" if library in EXTRAS else library
    return f"{what} needs {library}: pip install {package}"
