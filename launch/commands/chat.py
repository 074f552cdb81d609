"""`chat`: a conversation with a trained language model, by lines."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.core import number_ranges
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import nearest_hint
from isobatch.core.measures import printable
from isobatch.core.terminal.status import doing
from isobatch.launch.commands.generate import (
    SamplingOptions,
    open_language_model,
    print_pieces,
    sampling,
    system_messages,
    user_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from isobatch.data.text.chat_templates import ChatSegment, ChatTemplate
    from isobatch.launch.commands.generate import LanguageModel

HELP, RESET, SYSTEM, QUIT = "/help", "/reset", "/system", "/quit"
SINGLE_QUESTIONS = f"it was trained on single questions: {RESET}, or --history off, forgets those before"
COMMANDS = {
    HELP: "these lines",
    RESET: "forget all before",
    f"{SYSTEM} TEXT": "tell the model something first, and begin anew",
    QUIT: "end (as the end of input does)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions(SamplingOptions):
    """Flags of `chat`."""

    tokens: number_ranges.Positive = 256
    """Most tokens of an answer."""
    system: str | None = None
    """What the model is told before the first question."""
    history: bool = True
    """Give the model all that was said; off asks each question alone, as /reset before each does."""


def chat(words: Sequence[str]) -> int:
    """Usage: chat RUN [--system "..."] [--tokens 256] [--temperature 0.8] [--top-k 50] [--top-p 0.9]
    [--seed 0] [--load-bits 16|8|4] [--history off]: a line is a question; /help lists what else can be typed.
    RUN may be the folder of a model of transformers, or of an adapter of peft.
    """
    model, options = open_language_model(words, "chat", ChatOptions)
    template = model.template
    if template is None:
        raise UserError(
            f"chat: {model.name} was not trained on conversations (instruction and output, or messages): use"
            " generate"
        )
    doing("loading the model")
    write_text = model.writer(options.load_bits)
    talk = Conversation(
        template,
        lambda prompt: write_text(prompt, sampling(options, template)),
        options.system,
        options.history,
    )
    if sys.stdin.isatty():
        print(_banner(model), file=sys.stderr)
    if options.history and model.turns == 1:
        print(SINGLE_QUESTIONS, file=sys.stderr)
    for line in _input_lines():
        if line in (QUIT, "exit", "quit"):
            break
        talk.say(line)
    return DONE


def _banner(model: LanguageModel) -> str:
    return printable(f"{model.name} ({model.origin}); {HELP} lists commands, {QUIT} ends")


class Conversation:
    """The messages so far. `write_text`: a prompt -> the pieces of its answer."""

    def __init__(
        self,
        template: ChatTemplate,
        write_text: Callable[[list[ChatSegment]], Iterable[str]],
        system: str | None = None,
        keeps_history: bool = True,
    ) -> None:
        self.template, self.write_text, self.system = template, write_text, system
        self.keeps_history = keeps_history
        self.messages = system_messages(system)

    def say(self, line: str) -> None:
        """A question, which is answered on standard output, or a command."""
        command, _, rest = line.partition(" ")
        if command == HELP:
            width = max(map(len, COMMANDS))
            print("\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()), file=sys.stderr)
        elif command == RESET:
            self.messages = system_messages(self.system)
        elif command == SYSTEM:
            self.system = rest.strip() or None
            self.messages = system_messages(self.system)
        elif command.startswith("/") and command[1:].isalpha():
            known = [name.partition(" ")[0] for name in COMMANDS]
            print(printable(f"{command} is no command{nearest_hint(command, known)}"), file=sys.stderr)
        else:
            self._ask(line)

    def _ask(self, line: str) -> None:
        if not self.keeps_history:
            self.messages = system_messages(self.system)
        self.messages.append(user_message(line))
        doing("answering")
        try:
            answer = print_pieces(self.write_text(self.template.prompt_segments(self.messages)))
        except KeyboardInterrupt:  # ends this answer, not the chat
            self.messages.pop()
            print()
            return
        self.messages.append({"role": "assistant", "content": answer})


def _input_lines() -> Iterator[str]:
    """Lines of standard input without empty ones, with a prompt on a terminal."""
    interactive = sys.stdin.isatty()
    while True:
        doing()
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
