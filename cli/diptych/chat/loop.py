"""The loop of a chat: reads lines and prints answers until the end of input."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from rich.console import Console

from diptych.answer_stream import AnswerError
from diptych.chat.conversation import Conversation
from diptych.chat.slash import QuitChat, SlashError, obey, order_in
from diptych.watching import harmless


def converse(conversation: Conversation, console: Console) -> bool:
    """Talk with a person at a terminal, or answer each line of a pipe; False if one of these was
    refused or lost. If it is not both read and seen on a terminal, only answers go to `console`;
    all else goes to standard error."""
    by_hand = sys.stdin.isatty() and console.is_terminal
    aside = console if by_hand else Console(stderr=True)
    if by_hand:
        from diptych.chat.prompt import line_editor

        hints = "Ctrl-D ends, Ctrl-C stops an answer, Alt-Enter begins a new line, /help."
        read = line_editor()
    else:
        hints = "Ctrl-D ends, Ctrl-C cuts an answer short, /reset starts afresh."
        read = _plain_reader(aside)
    if sys.stdin.isatty():
        aside.print(hints, style="dim")
    is_well = True
    while True:
        try:
            line = read()
        except (EOFError, KeyboardInterrupt):
            aside.print()
            return is_well
        try:
            _take(conversation, line, console, aside)
        except QuitChat:
            return is_well
        except (SlashError, AnswerError) as exc:
            is_well = by_hand
            said = f"error: {harmless(str(exc))}"
            aside.print(said, style="red", markup=False, highlight=False)


def _plain_reader(aside: Console) -> Callable[[], str]:
    return lambda: aside.input("[bold]you>[/] " if sys.stdin.isatty() else "")


def _take(conversation: Conversation, line: str, console: Console, aside: Console) -> None:
    """One line: a command, a message or nothing. Raises `SlashError`, `QuitChat` and
    `AnswerError`."""
    line = line.strip()
    by_hand = aside is console
    order = order_in(line, by_hand=by_hand)
    if order is not None:
        told = obey(order, conversation)
        if by_hand or order.name != "/reset":
            aside.print(told, style="dim", markup=False, highlight=False)
    elif line:
        _turn(conversation, line, console, aside)


def _turn(conversation: Conversation, line: str, console: Console, aside: Console) -> None:
    try:
        asyncio.run(conversation.say(line, printer(console)))
    except KeyboardInterrupt:
        aside.print(" (cut short)", style="dim")
    else:
        console.print()


def printer(console: Console) -> Callable[[str], None]:
    """Print pieces of text at once; as they are, except what orders a terminal about."""

    def show(text: str) -> None:
        console.file.write(harmless(text) if console.is_terminal else text)  # rich changes tabs
        console.file.flush()

    return show
