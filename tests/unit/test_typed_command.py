"""Hints name the command in the form that the user typed."""

import pytest

from isobatch.core.package import TYPED_VARIABLE, typed_command


@pytest.mark.parametrize(("typed", "shown"), [(None, "isobatch"), ("python -m launch", "python -m launch")])
def test_a_hint_names_the_command_that_was_typed(typed, shown, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv(TYPED_VARIABLE, raising=False)
    if typed:
        monkeypatch.setenv(TYPED_VARIABLE, typed)
    assert typed_command("resume", "runs/a") == f"{shown} resume runs/a"
