"""Tests of launch/commands/chat.py: questions and commands of a conversation."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import UserError
from isobatch.data import tokenizers
from isobatch.launch.commands.chat import chat, converse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Template:
    """The prompt is the messages themselves."""

    def prompt_segments(self, messages: list[dict[str, str]]) -> Any:
        return [dict(message) for message in messages]


def test_an_answer_is_part_of_the_next_question_until_a_reset(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def write(prompt: Any) -> Iterator[str]:
        asked.append([message["content"] for message in prompt])
        yield from ("an ", "answer")

    told = [{"role": "system", "content": "be kind"}]
    lines = ["one?", "two?", "/reset", "three?", "/exit", "four?"]
    converse(lines, Template(), write, told)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "an answer\n" * 3
    assert asked[1:] == [["be kind", "one?", "an answer", "two?"], ["be kind", "three?"]]


def test_the_model_of_a_plain_folder_is_opened_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = plain_folder(tmp_path / "plain", chat_template=TEMPLATE)
    monkeypatch.setattr("sys.stdin", io.StringIO("When?\n"))
    assert chat([str(folder), "--tokens", "3", "--temperature", "0"]) == 0
    answered = capsys.readouterr().out.splitlines()[-1]  # deepspeed, imported here, prints a line
    assert answered
    assert chat([str(folder), "When?", "--tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"{answered}\n"
    bare = plain_folder(tmp_path / "bare")
    with pytest.raises(UserError, match="give --prompt"):
        chat([str(bare)])
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    with pytest.raises(UserError, match="model writes no text"):
        chat([str(other)])


TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"


def plain_folder(folder: Path, chat_template: str | None = None) -> Path:
    """A small GPT-2 with a tokenizer of bytes, as transformers saves them."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = tokenizers.train_byte_level_bpe(["When? assistant: user: at nine"], 270)
    torch.manual_seed(0)
    size = {"n_layer": 1, "n_embd": 16, "n_head": 1, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=tokenizer.get_vocab_size(), **size)).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tokenizers.END_OF_TEXT)
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder
