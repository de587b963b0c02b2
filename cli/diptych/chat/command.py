"""The command `diptych chat`."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from diptych.service_argument import Number, api_options


@click.command()
@click.option("--url", help="The API to talk to; left out, the newest service on this machine.")
@api_options
@click.option("--once", metavar="TEXT", help="Say TEXT, print the answer, and end.")
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@click.option("--temperature", type=Number(0, 2), default=None)
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True)
def chat(
    url: str | None,
    model: str | None,
    api_key: str | None,
    once: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int,
) -> None:
    """Talk to a running service; answers stream as they are made.

    Ctrl-C stops an answer, and the question is forgotten with it; Ctrl-D ends the chat. Alt-Enter,
    or a backslash before Enter, begins a new line. What you write is remembered for the arrow keys
    and Ctrl-R, in $XDG_STATE_HOME/diptych/chat_history, which only you can read. Lines of a pipe
    are answered one by one, without any of this; the exit code is 1 if one was not answered.

    \b
    Commands in a chat:
      /system [TEXT]   set the system message, or show it
      /image PATH      send an image with the next message, to a model that takes images
      /save FILE       write the conversation to a new file; /load FILE goes on with it
      /reset           forget everything but the system message
      /help, /quit

    \b
    Example:
      diptych chat
      diptych chat --once "What is the name of the capital of France?" --temperature 0
      diptych chat --url http://127.0.0.1:9000
    """
    from rich.console import Console

    from diptych.answer_stream import AnswerError
    from diptych.api_service import find_service
    from diptych.chat.conversation import Conversation
    from diptych.chat.loop import converse, printer
    from diptych.errors import RunError

    service = find_service(url, model, api_key)
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    conversation = Conversation(service, options, system)
    console = Console()
    if once is None:
        if not converse(conversation, console):
            raise click.exceptions.Exit(1)
        return
    try:
        asyncio.run(conversation.say(once, printer(console)))
    except AnswerError as exc:
        raise RunError(str(exc)) from exc
    console.print()
