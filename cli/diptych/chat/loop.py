"""The loop of a chat: reads lines and prints answers until the end of input."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from rich.console import Console

from diptych.chat.conversation import Conversation
from diptych.chat.slash import QuitChat, SlashError, obey, order_in
from diptych.chat.stream import ChatError


def converse(conversation: Conversation, console: Console) -> None:
    """Talk with a person at a terminal, or answer each line of a pipe."""
    by_hand = sys.stdin.isatty() and console.is_terminal
    if by_hand:
        from diptych.chat.prompt import line_editor

        hints = "Ctrl-D ends, Ctrl-C stops an answer, Alt-Enter begins a new line, /help."
        read = line_editor()
    else:
        hints = "Ctrl-D ends, Ctrl-C cuts an answer short, /reset starts afresh."
        read = _plain_reader(console)
    console.print(hints, style="dim")
    while True:
        try:
            line = read()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        try:
            _take(conversation, line, console, by_hand=by_hand)
        except QuitChat:
            return


def _plain_reader(console: Console) -> Callable[[], str]:
    return lambda: console.input("[bold]you>[/] ")


def _take(conversation: Conversation, line: str, console: Console, *, by_hand: bool) -> None:
    """One line: a command, a message or nothing."""
    line = line.strip()
    try:
        order = order_in(line, by_hand=by_hand)
        if order is not None:
            told = obey(order, conversation)
            if by_hand or order.name != "/reset":
                console.print(told, style="dim", markup=False, highlight=False)
        elif line:
            _turn(conversation, line, console)
    except SlashError as exc:
        console.print(f"error: {exc}", style="red", markup=False, highlight=False)


def _turn(conversation: Conversation, line: str, console: Console) -> None:
    try:
        asyncio.run(conversation.say(line, printer(console)))
    except ChatError as exc:
        console.print(f"error: {exc}", style="red", markup=False)
    except KeyboardInterrupt:
        console.print(" (cut short)", style="dim")
    else:
        console.print()


def printer(console: Console) -> Callable[[str], None]:
    """Print pieces of text at once, as they are."""

    def show(text: str) -> None:
        console.out(text, end="", highlight=False)
        console.file.flush()

    return show
