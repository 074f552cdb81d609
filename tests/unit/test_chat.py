"""Tests of launch/commands/chat.py: questions and commands of a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from isobatch.launch.commands.chat import Conversation

if TYPE_CHECKING:
    from collections.abc import Iterator


class Template:
    """The prompt is the messages themselves."""

    def prompt_segments(self, messages: list[dict[str, str]]) -> Any:
        return [dict(message) for message in messages]


@pytest.fixture
def talk() -> tuple[Conversation, list[Any]]:
    asked: list[Any] = []

    def write(prompt: Any) -> Iterator[str]:
        asked.append(prompt)
        yield from ("an ", "answer")

    return Conversation(Template(), write, "be kind"), asked  # type: ignore[arg-type]


def test_an_answer_is_part_of_the_next_question(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    conversation, asked = talk
    conversation.say("one?")
    conversation.say("two?")
    assert capsys.readouterr().out == "an answer\nan answer\n"
    assert [message["content"] for message in asked[1]] == ["be kind", "one?", "an answer", "two?"]


def test_without_history_each_question_is_asked_alone(talk: Any) -> None:
    conversation, asked = talk
    conversation.keeps_history = False
    conversation.say("one?")
    conversation.say("two?")
    assert [message["content"] for message in asked[1]] == ["be kind", "two?"]


def test_reset_forgets_all_but_what_was_told_first(talk: Any) -> None:
    conversation, asked = talk
    conversation.say("one?")
    conversation.say("/reset")
    conversation.say("two?")
    assert [message["content"] for message in asked[1]] == ["be kind", "two?"]


@pytest.mark.parametrize(("line", "told"), [("/system be brief", ["be brief"]), ("/system", [])])
def test_system_tells_something_else_and_begins_anew(talk: Any, line: str, told: list[str]) -> None:
    conversation, asked = talk
    conversation.say("one?")
    conversation.say(line)
    conversation.say("two?")
    assert [message["content"] for message in asked[1]] == [*told, "two?"]


def test_help_and_what_is_no_command(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    conversation, asked = talk
    conversation.say("/help")
    assert "/system TEXT" in capsys.readouterr().err
    conversation.say("/rest")
    assert "/rest is no command (did you mean /reset?)" in capsys.readouterr().err
    conversation.say("/etc/hosts holds what?")
    assert len(asked) == 1
