"""Tests of models/causal_lm/answers.py: which prompts are asked, and what an answer is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.models.causal_lm import answers

if TYPE_CHECKING:
    from collections.abc import Sequence

END = 9


def facts_of(**extra: Any) -> Facts:
    known = {"template": {"end_id": END}, "response_only": True, **extra}
    return Facts(fingerprint="", folder="", samples={"train": 4, "valid": 2}, lengths=(1,), extra=known)


def batch_of(*rows: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Rows of (token, whether it is learnt), padded with zeros."""
    width = max(map(len, rows))
    both = torch.tensor([[*row, *[(0, 0)] * (width - len(row))] for row in rows])
    return {"index": torch.arange(len(rows)) + 5, "tokens": both[..., 0], "learn": both[..., 1]}


TWO_TURNS = [(1, 0), (2, 0), (3, 1), (END, 1), (4, 0), (5, 1), (6, 1), (END, 1)]


def asked(found: Sequence[answers.HeldOutPrompt]) -> list[tuple[int, list[int], list[int]]]:
    return [(one.sample, one.ids, one.reference) for one in found]


def test_first_and_later_answers_are_asked_for_in_turn() -> None:
    found = answers.held_out_prompts([batch_of(TWO_TURNS, TWO_TURNS), batch_of(TWO_TURNS)], 2, facts_of())
    assert asked(found) == [(5, [1, 2], [3]), (6, [1, 2, 3, END, 4], [5, 6])]


def test_cut_answers_running_text_and_rows_without_answers_ask_nothing() -> None:
    cut = [(1, 0), (2, 0), (3, 1), (4, 1)]
    running = [(1, 0), (2, 1), (3, 1), (END, 1)]
    no_answer = [(1, 0), (END, 0)]
    whole = [(1, 0), (2, 0), (7, 1), (END, 1)]
    found = answers.held_out_prompts([batch_of(cut, running, no_answer, whole)], 9, facts_of())
    assert asked(found) == [(8, [1, 2], [7])]


def test_of_a_pair_the_chosen_answer_is_the_reference() -> None:
    chosen, rejected = [(1, 0), (2, 0), (7, 1), (END, 1)], [(1, 0), (2, 0), (8, 1), (END, 1)]
    rows = batch_of(chosen, rejected)
    pair = {"index": torch.tensor([3]), "tokens": rows["tokens"][None], "learn": rows["learn"][None]}
    assert asked(answers.held_out_prompts([pair], 1, facts_of())) == [(3, [1, 2], [7])]


@pytest.mark.parametrize(
    ("extra", "said"),
    [({"template": None}, "no one chat template"), ({"response_only": False}, "prompts that are learnt too")],
)
def test_data_that_has_no_answers_is_refused(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf"--answers 5: .*{said}"):
        answers.check(5, facts_of(**extra))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>', ["a"]),
        ('Let me see.\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
         '<tool_call>{"name": "b", "arguments": {}}</tool_call>', ["a", "b"]),
        ('<think>{"name": "c"}</think>\n{"name": "a", "arguments": {}}', ["a"]),
        ('<|python_tag|>{"name": "a", "parameters": {"x": [1]}}', ["a"]),
        ('[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]', ["a", "b"]),
        ('{"type": "function", "function": {"name": "a", "parameters": {}}}', ["a"]),
        ('<tool_call>{"name": "a", "arguments": {}}', []),
        ('<tool_call>{"name": "a", "arguments": {}</tool_call>', []),
        ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', []),
        ('<tool_call>{"arguments": {}}</tool_call>', []),
        ("[" * 100_000, []),
        ("12", []),
        ("[]", []),
        ("The name is a.", []),
        ("", []),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_forms_of_models(text: str, names: list[str]) -> None:
    assert answers.called_tools(text) == names


def test_figures_are_shares_and_calls_count_where_the_reference_calls() -> None:
    rows = [{"exact_match": True}, {"exact_match": False, "valid_tool_calls": True}]
    assert answers.figures(rows) == {"exact_match": 0.5, "valid_tool_calls": 1.0}
    assert answers.figures(rows[:1]) == {"exact_match": 1.0}
