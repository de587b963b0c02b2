"""The commands inside a chat: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from diptych.chat.conversation import Conversation
from diptych.chat.files import FileError, image_url, load, named, save

HELP: Final[Mapping[str, str]] = MappingProxyType({
    "/system [TEXT]": "set the system message, or show it; it holds from the next turn on",
    "/image PATH": "send an image with the next message, to a model that takes images",
    "/save FILE": "write the conversation to a new file, as JSON",
    "/load FILE": "go on with a saved conversation instead of this one",
    "/reset": "forget everything but the system message",
    "/help": "show this",
    "/quit": "end the chat, as Ctrl-D does",
})  # fmt: skip
NAMES: Final = tuple(usage.partition(" ")[0] for usage in HELP)


class Order(NamedTuple):
    """A line that is a command."""

    name: str
    argument: str


class SlashError(Exception):
    """A command that cannot be carried out. `str()` is one line for the user."""


class QuitChat(Exception):
    """The user wants to end the chat."""


def order_in(line: str, *, by_hand: bool) -> Order | None:
    """Parse a command; None if the line is a message.

    A person's line that begins with an unknown command is most likely a typing error, and raises
    `SlashError`, but a path such as /etc/hosts is a message. In a pipe, it is a message too.
    """
    name, _, argument = line.strip().partition(" ")
    if name in NAMES:
        return Order(name, argument.strip())
    if by_hand and name[:1] == "/" and name[1:].isalpha():
        raise SlashError(f"there is no command {name}; /help lists those that there are")
    return None


def obey(order: Order, conversation: Conversation) -> str:
    """Carry out a command and return the text to print. Raises `SlashError` and `QuitChat`."""
    name, argument = order
    if name in ("/image", "/save", "/load") and not argument:
        usage = next(usage for usage in HELP if usage.startswith(name))
        raise SlashError(f"{name} needs a file: {usage}")
    try:
        return _obey(name, argument, conversation)
    except FileError as exc:
        raise SlashError(str(exc)) from exc


def _obey(name: str, argument: str, conversation: Conversation) -> str:
    match name:
        case "/quit":
            raise QuitChat
        case "/reset":
            conversation.reset()
            return "forgotten"
        case "/system":
            if argument:
                conversation.system = argument
            return f"system: {conversation.system or '(none)'}"
        case "/image":
            conversation.images.append(image_url(file := named(argument)))
            return f"{file.name} goes with the next message"
        case "/save":
            save(file := named(argument), conversation.messages)
            return f"{len(conversation.messages)} messages are in {file}"
        case "/load":
            conversation.replace(load(named(argument)))
            return f"{len(conversation.messages)} messages"
        case _:
            return "\n".join(f"{usage:16} {meaning}" for usage, meaning in HELP.items())
