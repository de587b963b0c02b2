"""`diptych chat` at a terminal: a real one, as a person has it, and a real, small server."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waits import Deadline, wait_until

IN_A_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
from diptych.main import main
main()
"""
"""The program, to whose process group the terminal sends the signal of Ctrl-C. It takes it also if
the tests run in the background of a shell, which lets them ignore it."""
CTRL_C, CTRL_D, UP, ALT_ENTER, ENTER = b"\x03", b"\x04", b"\x1b[A", b"\x1b\r", b"\r"
PROMPT = "\x1b[?2004h"
"""What the program sends once when it begins to read: paste as one piece."""
ANSWERS_OF_TERMINALS = {b"\x1b[6n": b"\x1b[1;1R"}
"""What the program asks its terminal, and what a terminal says: here, where its cursor is."""


class Terminal:
    """A person in front of `diptych chat`."""

    def __init__(self, url: str, state: Path) -> None:
        self._keyboard, screen = os.openpty()
        environment = os.environ | {"XDG_STATE_HOME": str(state), "TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_A_TERMINAL, "chat", "--url", url],
            stdin=screen, stdout=screen, stderr=screen, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(screen)
        self._seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def see(self, words: str) -> None:
        """Wait until the words are on the screen, and look only at what comes after."""
        deadline = Deadline(f"the terminal shows {words!r}")
        while words.encode() not in self._seen:
            try:
                deadline.check()
            except BaseException as exc:
                exc.add_note(repr(self._seen))
                raise
            if select.select([self._keyboard], [], [], 0.2)[0]:
                new = os.read(self._keyboard, 4096)
                for question, answer in ANSWERS_OF_TERMINALS.items():
                    if question in new:
                        os.write(self._keyboard, answer)
                self._seen += new
        self._seen = self._seen.partition(words.encode())[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)


@pytest.fixture
def terminal(small_server: str, tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(small_server, tmp_path)
    yield found
    found.close()


def test_ctrl_c_stops_the_answer_and_not_the_chat(terminal: Terminal) -> None:
    terminal.see(PROMPT)
    terminal.type(b"endless" + ENTER)
    terminal.see("is Paris.")
    terminal.type(CTRL_C)
    terminal.see("cut short")
    terminal.see(PROMPT)
    terminal.type(b"half a line" + CTRL_C)
    terminal.see(PROMPT)
    terminal.type(b"count" + ENTER)
    terminal.see("1 messages")
    terminal.see(PROMPT)
    terminal.type(CTRL_D)
    wait_until(lambda: terminal.process.poll() is not None)
    assert terminal.process.returncode == 0


def test_lines_are_edited_remembered_and_joined(terminal: Terminal, tmp_path: Path) -> None:
    terminal.see(PROMPT)
    terminal.type(b"/help" + ENTER)
    terminal.see("/image PATH")
    terminal.see(PROMPT)
    terminal.type(b"/system first" + ALT_ENTER + b"second \\" + ENTER + b"third" + ENTER)
    terminal.see("system: first")
    terminal.see("second")
    terminal.see("third")
    terminal.see(PROMPT)
    terminal.type(b"count" + ENTER)
    terminal.see("2 messages")
    terminal.see(PROMPT)
    terminal.type(UP + ENTER)
    terminal.see("4 messages")
    terminal.see(PROMPT)
    terminal.type(b"/rest" + ENTER)
    terminal.see("there is no command /rest")
    terminal.see(PROMPT)
    terminal.type(b"/quit" + ENTER)
    wait_until(lambda: terminal.process.poll() is not None)
    assert terminal.process.returncode == 0
    history = (tmp_path / "diptych" / "chat_history").read_text()
    assert "+second \n" in history
    assert "+count\n" in history
