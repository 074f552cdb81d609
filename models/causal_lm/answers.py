"""Answers to held-out prompts, written greedily while a model trains, and their worth: `--answers 50`.

A prompt is the tokens of a prepared conversation up to one of its answers, as the model was taught it. Each
is answered by itself, token by token with a KV cache: nothing depends on other prompts or on processes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import refuse
from isobatch.models import saving
from isobatch.models.causal_lm import generation

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.models.base import Batch

EXACT_MATCH, VALID_TOOL_CALLS = "exact_match", "valid_tool_calls"
TOKENS_MORE = 32
"""An answer has at most as many tokens as its reference, and so many more."""
CONTROL_TOKEN = re.compile(r"<\|[^|<>]*\|>|\[TOOL_CALLS\]")
"""What stands around a call in the text of a model: `<|python_tag|>` and its like."""
NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
"""A tool in a prompt, as templates write it."""


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A held-out sample up to one of its answers."""

    sample: int
    """Its number in the split."""
    ids: list[int]
    """Tokens of the prompt."""
    reference: list[int]
    """Tokens of the answer in the data, without the one that ends it."""
    end: int
    """The token that ends it: of a call some templates have their own."""


def check(count: int, facts: Facts) -> None:
    """Raise UserError where the data has no held-out conversations of which answers can be told."""
    if facts.extra.get("assumed"):
        return
    wrong = {
        "no one chat template": not facts.extra.get("template"),
        "no valid or test split": not {"valid", "test"} & facts.samples.keys(),
        "prompts that are learnt too": not facts.extra.get("response_only", True),
    }
    said = f"--answers {count}: asks prompts of held-out conversations, and the data has"
    refuse({f"{said} {why}: leave it out": is_so for why, is_so in wrong.items()})


def held_out_prompts(rows: Iterable[Batch], count: int, facts: Facts) -> list[HeldOutPrompt]:
    """The first `count` prompts among batches of samples: `tokens` and `learn` (B, T), of pairs (B, 2, T).

    A sample gives one, of those of its answers that have an end; which one depends on the prompts before it,
    so that first and later answers of conversations are asked for alike.
    """
    found, template = list[HeldOutPrompt](), facts.extra["template"]
    named = {saving.load_tokenizer(facts).token_to_id(name) for name in template.get("ends") or ()}
    ends = {template["end_id"], *named} - {None}  # the tokens that may end an answer
    for batch in rows:
        for row, sample in enumerate(batch["index"].tolist()):
            if "label" in batch and not batch["label"][row]:
                continue  # an answer that was judged bad is no reference
            tokens, learn = (batch[name][row].numpy() for name in ("tokens", "learn"))
            if tokens.ndim == 2:  # the chosen answer comes first
                tokens, learn = tokens[0], learn[0]
            if len(found) < count and (spans := list(_answers(tokens, learn, ends))):
                start, stop = spans[len(found) % len(spans)]
                ids = tokens.tolist()
                found.append(HeldOutPrompt(sample, ids[:start], ids[start : stop - 1], ids[stop - 1]))
        if len(found) == count:
            break
    return found


def _answers(tokens: np.ndarray, learn: np.ndarray, ends: set[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of each answer that follows a prompt and ends as one does: how one that was cut ends
    nobody knows, and running text in a mixture is no answer.
    """
    borders = np.flatnonzero(np.diff(learn.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    return ((a, b) for a, b in borders.tolist() if a > 1 and int(tokens[b - 1]) in ends)


def answer(model: nn.Module, prompt: HeldOutPrompt, facts: Facts) -> dict[str, Any]:
    """What the model writes, as text beside its prompt and the reference; and how it stands to that.

    `exact_match`: the same text, but for white space around it. `valid_tool_calls`, where the reference calls
    tools: whether the answer does, as JSON, by names that the prompt has.
    """
    most = min(len(prompt.reference) + TOKENS_MORE, generation.context_of(model) - len(prompt.ids))
    greedy = generation.Sampling(temperature=0.0, stop_token_id=facts.extra["template"]["end_id"])
    ids = generation.generate_ids(model, prompt.ids, most, greedy)
    written = list(itertools.takewhile(lambda token: token != prompt.end, ids))
    tokenizer = saving.load_tokenizer(facts)
    asked, reference, said = (
        tokenizer.decode(ids, skip_special_tokens=False) for ids in (prompt.ids, prompt.reference, written)
    )
    row: dict[str, Any] = {"sample": prompt.sample, "prompt": asked, "reference": reference, "answer": said}
    row[EXACT_MATCH] = said.strip() == reference.strip()
    if wanted := called_tools(reference):
        known, called = {*NAME.findall(asked), *wanted}, called_tools(said)
        row[VALID_TOOL_CALLS] = bool(called) and known.issuperset(called)
    return row


def figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The share of answers that are exact, and of those that call tools rightly where the references do."""
    judged = {name: [row[name] for row in rows if name in row] for name in (EXACT_MATCH, VALID_TOOL_CALLS)}
    return {name: sum(values) / len(values) for name, values in judged.items() if values}


def called_tools(text: str) -> list[str]:
    """The names of the tools that an answer calls, in order; none where it calls none or not as JSON.

    `<tool_call>{...}</tool_call>`, any number of them behind any text; or the whole answer is JSON: an object
    or a list of such, with `name`, and `arguments` or `parameters`.
    """
    text = CONTROL_TOKEN.sub("", text.rpartition("</think>")[2]).strip()
    pieces = [piece.partition("</tool_call>") for piece in text.split("<tool_call>")[1:]]
    if any(not closed for _, closed, _ in pieces):
        return []
    try:
        calls = [json.loads(call) for call, *_ in pieces] or json.loads(text)
    except (ValueError, RecursionError):
        return []
    tools = [_tool(call) for call in (calls if isinstance(calls, list) else [calls])]
    return [] if None in tools else [str(tool) for tool in tools]


def _tool(call: Any) -> str | None:
    """The name of the tool in a call, which OpenAI's API writes in an envelope; None where it is no call."""
    match call.get("function", call) if isinstance(call, dict) else call:
        case {"name": str(name), "arguments": dict()} | {"name": str(name), "parameters": dict()}:
            return name
    return None
