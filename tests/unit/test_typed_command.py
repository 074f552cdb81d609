"""Hints name the program in the form the user typed."""

import pytest

from isobatch.core.package import TYPED_VARIABLE, as_typed


@pytest.mark.parametrize(("typed", "shown"), [("", "isobatch"), ("python -m launch", "python -m launch")])
def test_a_command_in_a_hint_is_the_one_that_was_typed(
    typed: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TYPED_VARIABLE, raising=False)
    if typed:
        monkeypatch.setenv(TYPED_VARIABLE, typed)
    text = "isobatch: stopped; isobatch cancel runs/a --now, then isobatch resume /x/isobatch resume"
    expected = f"isobatch: stopped; {shown} cancel runs/a --now, then {shown} resume /x/isobatch resume"
    assert as_typed(text) == expected
