"""The prompt of a chat at a terminal: editing, several lines, a history, and completion."""

from __future__ import annotations

from collections.abc import Callable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import completion_is_selected
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from diptych.chat.files import history_path, prepare_history
from diptych.chat.slash import NAMES

CONTINUED = "...> "


def line_editor() -> Callable[[], str]:
    """Return a function that reads one message per call. It raises `EOFError` at Ctrl-D.

    Ctrl-C only empties the line.
    """
    session: PromptSession[str] = PromptSession(
        FormattedText([("bold", "you> ")]),
        multiline=True,
        prompt_continuation=CONTINUED,
        history=_history(),
        completer=WordCompleter(list(NAMES), sentence=True),
        complete_while_typing=False,
        key_bindings=_keys(),
    )

    def read() -> str:
        while True:
            try:
                return session.prompt()
            # It was perhaps meant for an answer that had just ended, and must not end the chat.
            except KeyboardInterrupt:
                continue

    return read


def _history() -> History:
    path = history_path()
    return FileHistory(str(path)) if prepare_history(path) else InMemoryHistory()


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter", filter=~completion_is_selected)
    def send(event: KeyPressEvent) -> None:
        """A backslash at the end of a line asks for another one, as in a shell."""
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys
