"""What is learnt of chats, token by token, against transformers' masks: published templates, files of rows.

Templates without marks get them from the fixture. A difference that is meant has its reason in REASONS, and
is worked out here; nothing else may differ. Other tests say what messages a row has, and where those go for
which a template has no place.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from isobatch.core.recipe import Recipe
from isobatch.data import chat_formats, readers, tokenizers
from isobatch.data.text import chat_templates
from isobatch.data.text.dataset import Text, TextOptions
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.data.text.chat_templates import ChatTemplate

DATA = ROOT.parent / "shared" / "data"
TEMPLATES, FILES = DATA / "chat_templates", sorted((DATA / "chats").glob("*.json*"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FILES, reason="no published templates here")]
MARKS = json.loads((ROOT / "tests" / "fixtures" / "chat_marks.json").read_text("utf-8"))
"""Of each template: its tokenizer's end token, the published text that has or gets marks, and parts of that
text with what stands in their place, by hand: an assistant's between « and »."""
ROWS = 12
"""At even distances, of each file."""
REASONS = {
    "prompt": "an answer begins where its generation prompt ends, as when the model is asked: its header,"
    " <think> or white space, and earlier answers, are as the prompt has them",
    "closed": "where a prompt opens a thought that the template leaves out, it is written and closed",
    "close": "where a template ends answers with nothing, the tokenizer's end token follows and is learnt",
    "piece": "tokens do not reach across the ends of an answer, as a model's that is asked cannot",
    "turns": "an answer that history writes otherwise, as without its thought, ends a sample of its own",
}
DAY = "{% macro strftime_now(f) %}{{ '2024-07-26' if f == '%Y-%m-%d' else '26 Jul 2024' }}{% endmacro %}"
"""What templates are told of today, so that data is the same tomorrow."""
CONTROL = re.compile(r"<[|｜][^<>|｜]+[|｜]>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>")


@dataclass
class Row:
    """A conversation as a file has it, and as OpenAI's messages."""

    raw: dict[str, Any]
    messages: list[dict[str, Any]]
    values: dict[str, Any]

    @property
    def turns(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def thought(self, i: int) -> str:
        inside = self.messages[i]["content"].rpartition("</think>")[0].rpartition("<think>")[2]
        return str(self.messages[i].get("reasoning_content") or inside).strip()


def row_of(raw: dict[str, Any], template: ChatTemplate) -> Row:
    """A row of which the chosen answer, or any that is judged, is learnt."""
    given = {k: v for k, v in raw.items() if k not in ("label", "chosen", "rejected")}
    if "chosen" in raw:
        given["conversations"] = [*given["conversations"], raw["chosen"]]
    read = chat_formats.parse_messages(given, "row", chat_formats.detect_chat_format([*given]) or "")
    last = max(i for i, message in enumerate(read) if message["role"] == "assistant")
    return Row(given, template.placed(read[: last + 1]), chat_formats.template_values(given, "row"))


class Judge:
    """What transformers' renderer and tokenizer make of conversations, with the marks of one template."""

    def __init__(self, name: str) -> None:
        raw = Tokenizer(
            models.BPE.from_file(*(str(DATA / "gpt2-bpe" / n) for n in ("encoder.json", "vocab.bpe")))
        )
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        raw.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>")])
        self.plain, end = (TEMPLATES / f"{name}.jinja").read_text("utf-8"), MARKS[name]["end"]
        special = {"extra_special_tokens": sorted({*CONTROL.findall(self.plain)} - {end})}
        self.tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=raw, eos_token=end, bos_token="<s>", chat_template=self.plain, **special
        )
        self.marks = (TEMPLATES / f"{MARKS[name]['marked']}.jinja").read_text("utf-8")
        for old, new in MARKS[name]["marks"]:
            assert old in self.marks, (name, old)
            self.marks = self.marks.replace(old, new)
        self.marks = self.marks.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")

    def render(self, row: Row, upto: int, marked: bool = False, asks: bool = False) -> tuple[str, Any]:
        """The first messages, and places that are marked."""
        given = {**self.tokenizer.special_tokens_map, "return_assistant_tokens_mask": marked}
        given |= {"chat_template": DAY + (self.marks if marked else self.plain)}
        messages = row.messages[:upto]
        texts, places = render_jinja_template([messages], add_generation_prompt=asks, **row.values, **given)
        return texts[0], places[0] if marked else ()

    def takes(self, row: Row) -> bool:
        """Whether the template writes all of a row."""
        try:
            text, _ = self.render(row, len(row.messages))
            others = [replace(row, values={})] * bool(row.values)
            for n, message in enumerate(row.messages):
                said = message["content"].rpartition("</think>")[2].strip()
                if said not in text and json.dumps(said)[1:-1] not in text:
                    return False
                for call in message.get("tool_calls", ()):
                    renamed = {**call, "function": {**call["function"], "name": "another"}}
                    calls = [renamed if one is call else one for one in message["tool_calls"]]
                    changed = {**message, "tool_calls": calls}
                    others.append(replace(row, messages=[*row.messages[:n], changed, *row.messages[n + 1 :]]))
            return all(text != self.render(other, len(row.messages))[0] for other in others)
        except (TypeError, jinja2.TemplateError):
            return False

    def pieces(self, render: Any, row: Row, upto: int, asked: tuple[int, ...]) -> tuple[list[str], set[str]]:
        """The text of the first messages: no answer, an answer, and so on; and why it is not as marked."""
        (text, places), why = render(upto, True), set[str]()
        assert text == render(upto)[0], "marks change no text"
        turns = [i for i in row.turns if i < upto]
        asked = () if "endgeneration" in self.plain else asked
        (before, earlier), prompt = render(turns[-1], True), render(turns[-1], False, True)[0]
        if turns[-1] in asked and not text.startswith((before, prompt)):
            text, size = before + text[places[-1][0] :], places[-1][1] - places[-1][0]
            places, why = [*earlier, (len(before), len(before) + size)], why | {"prompt"}
        last, parts = 0, list[str]()
        for i, (start, stop) in zip(turns, places, strict=True):
            head, answer = text[:start], text[start:stop]
            if i in asked:
                head, answer, reasons = self.as_asked(render, row, i, head, answer)
                why |= reasons
            parts += [head[last:], answer]
            last = stop
        return parts, why

    def as_asked(self, render: Any, row: Row, i: int, head: str, answer: str) -> tuple[str, str, set[str]]:
        """An answer behind its generation prompt: the text before, the answer, and what that changes."""
        before, asked = render(i)[0], render(i, False, True)[0]
        prompt, why = asked[len(os.path.commonprefix([before, asked])) :], set[str]()  # noqa: RUF071
        if head != asked and head.startswith(asked) and not head[len(asked) :].strip():
            head, answer, why = asked, head[len(asked) :] + answer, {"prompt"}
        elif rest := prompt[next(n for n in range(len(prompt), -1, -1) if head.endswith(prompt[:n])) :]:
            same = os.path.commonprefix([rest, answer])  # noqa: RUF071
            same = same if same == rest else same[: same.rfind(">") + 1]
            head, answer, why = head + rest, answer[len(same) :], {"prompt"}
            if "<think>" in rest and "</think>" not in rest + answer:
                answer, why = f"{row.thought(i)}\n</think>\n\n{answer.lstrip()}", {"closed"}
            elif rest.rstrip().endswith("</think>") and same != rest:
                answer = answer.rpartition("</think>")[2].lstrip()
        if not answer.endswith(tuple(self.tokenizer.all_special_tokens)):
            answer, why = answer + self.tokenizer.eos_token, why | {"close"}
        return head, answer, why

    def taught(self, row: Row, pairs: list[Any], left: set[int]) -> tuple[set[int], set[str]]:
        """Which answers a sample teaches, and why it is not the whole conversation's ids and mask."""
        render = functools.cache(functools.partial(self.render, row))
        for upto in (i + 1 for i in reversed(row.turns)):
            answers = tuple(i for i in row.turns if i < upto)
            sizes = range(len(left & {*answers}), 0, -1)
            some = (one for n in sizes for one in itertools.combinations(sorted(left & {*answers}), n))
            for learnt, asked in itertools.product(some, (False, True)):
                parts, why = self.pieces(render, row, upto, answers if asked else learnt)
                end = 2 * answers.index(learnt[-1]) + 2
                parts, flags = parts[:end], [f for i in answers for f in (0, int(i in learnt))][:end]
                said = zip(learnt, (p for p, f in zip(parts, flags, strict=True) if f), strict=True)
                if any(row.thought(i) in render(i + 1)[0] and row.thought(i) not in text for i, text in said):
                    continue
                why |= {"turns"} if upto <= row.turns[-1] or len(learnt) < len(answers) else set()
                if pairs == self.as_transformers(parts, flags):
                    return {*learnt}, why
                if self.spells(pairs, parts, flags):
                    return {*learnt}, why | {"piece"}
        raise AssertionError(self.tokenizer.decode([i for i, flag in pairs if flag]), row)

    def as_transformers(self, parts: list[str], flags: list[int]) -> list[tuple[int, int]]:
        """(id, whether it is learnt) as apply_chat_template(return_assistant_tokens_mask=True) gives them."""
        whole, end = self.tokenizer("".join(parts), add_special_tokens=False), 0
        mask = [0] * len(whole["input_ids"])
        for part, flag in zip(parts, flags, strict=True):
            end += len(part)
            if flag:
                first, last = whole.char_to_token(end - len(part)), whole.char_to_token(end - 1)
                mask[first : last + 1] = [1] * (last + 1 - first)
        return list(zip(whole["input_ids"], mask, strict=True))

    def spells(self, pairs: list[Any], parts: list[str], flags: list[int]) -> bool:
        """Whether the parts are encoded one by one; those that are not learnt may be so together."""
        most = 1 if any(flags[:1]) else next((n for n, flag in enumerate(flags) if flag), len(parts))
        for n in range(1, most + 1):
            ids = self.tokenizer("".join(parts[:n]), add_special_tokens=False)["input_ids"]
            is_same = pairs[: len(ids)] == [(i, flags[0]) for i in ids]
            if is_same and self.spells(pairs[len(ids) :], parts[n:], flags[n:]):
                return True
        return not pairs and not parts


@pytest.mark.parametrize("name", MARKS)
def test_masks_are_those_of_transformers_or_differ_for_a_reason(name: str, tmp_path: Path) -> None:
    judge, found, folder = Judge(name), Counter[str](), tmp_path / "tokenizer"
    judge.tokenizer.save_pretrained(folder)
    opened = tokenizers.open_tokenizer(folder)
    special = tokenizers.special_token_ids(opened, folder)
    template = chat_templates.choose_template("auto", "plain", opened, special, folder)
    for file in FILES:
        raw = [dict(row) for _, row in readers.read_rows(readers.find_splits(file, None)["train"])]
        some = (row_of(one, template) for one in raw[:: max(1, len(raw) // ROWS)])
        if not (rows := [row for row in some if judge.takes(row)]):
            continue
        lines = [json.dumps(row.raw) + "\n" for row in rows]
        (data := tmp_path / file.stem).mkdir()
        (data / "train.jsonl").write_text("".join(lines))
        (data / "valid.jsonl").write_text(lines[0])
        recipe = Recipe(task="causal-lm", data=str(data), tokenizer=str(folder), max_length=99999)
        columns: Any = Text(recipe, TextOptions()).read()["train"]
        pairs = [*zip(columns["tokens"].values.tolist(), columns["learn"].values.tolist(), strict=True)]
        samples = deque(pairs[a:b] for a, b in itertools.pairwise(columns["tokens"].offsets))
        for row in rows:
            left, why = {*row.turns}, set[str]()
            while left:
                learnt, reasons = judge.taught(row, samples.popleft(), left)
                left, why = left - learnt, why | reasons
            found[" ".join(sorted(why))] += 1
        assert not samples
    assert found.total() > 5
    assert {*" ".join(found).split()} <= {*REASONS}
    if "endgeneration" in judge.plain:
        assert {*" ".join(found).split()} <= {"piece", "turns"}
