"""`diptych up` on a terminal: a live table that leaves the terminal as it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from waits import PATIENCE_S

from diptych.board.board import message_of

Service = dict[str, Any]
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
"""What hides and shows the cursor."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A terminal of 100 columns in which one command runs."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.shown = ""
        self._end, own = pty.openpty()
        fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "TERM": "xterm-256color"}
        for name in ("NO_COLOR", "COLUMNS", "LINES", "CI"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=own, stdout=own, stderr=own, env=environment, start_new_session=True
        )
        os.close(own)

    def read_until(self, is_over: Callable[[str], bool]) -> None:
        """Raises `AssertionError` if that does not come."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_over(self.shown):
            assert time.monotonic() < deadline, self.shown[-3000:]
            if not select.select([self._end], [], [], 0.1)[0]:
                continue
            try:
                self.shown += os.read(self._end, 65536).decode(errors="replace")
            except OSError:  # the command has closed the terminal, and ends
                self.process.wait(PATIENCE_S)
                assert is_over(self.shown), self.shown[-3000:]

    def go(self) -> None:
        """As when a user closes the window: who writes there gets an error from now on."""
        os.close(self._end)
        self._end = -1

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self._end >= 0:
            os.close(self._end)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("19:22:04 I [a-0] diptych_engine.execution.runner: loaded in 2 s", "loaded in 2 s"),
        ("19:22:04 I [a-0] __main__: a: b", "a: b"),
        ("(EngineCore pid=7) INFO 11-25 19:22:04 loader.py: x", None),
        ("", None),
    ],
)
def test_a_line_of_a_log_is_shown_without_its_head(line: str, message: str | None) -> None:
    assert message_of(line) == (line if message is None else message)


@pytest.mark.parametrize("plain", [False, True])
def test_a_terminal_gets_a_table_unless_it_asks_for_lines(
    tmp_path: Path,
    small_service: Callable[..., Service],
    service_file: Callable[[Service], Path],
    *,
    plain: bool,
) -> None:
    tmp_path.chmod(0o700)
    file, port = service_file(small_service()), free_port()
    command = [sys.executable, "-m", "diptych.main", "up", str(file), "--port", str(port)]
    terminal = Terminal(tmp_path, [*command, *(["--plain"] if plain else [])])
    try:
        terminal.read_until(lambda shown: "Ctrl-C ends it" in shown)
        assert f"127.0.0.1:{port}" in terminal.shown
        if not plain:
            terminal.read_until(lambda shown: len(re.findall(r"small-\w+-0.*ready", shown)) >= 3)
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until(lambda _: terminal.process.poll() is not None)
        terminal.read_until(lambda shown: plain or shown.count(SHOW) == shown.count(HIDE) > 0)
    finally:
        terminal.close()
    lines = [_CONTROL.sub("", line).rstrip() for line in terminal.shown.splitlines()]
    has_table = any(line.startswith("POD ") and line.endswith("TOKENS/S") for line in lines)
    assert has_table is not plain
    assert (HIDE in terminal.shown) is not plain
    if plain:
        assert any(re.fullmatch(r"small-decode-0: ready \(port \d+\)", line) for line in lines)
    else:
        rows = [line.split() for line in lines if line.startswith("small-")]
        assert [row[2] for row in rows[-3:]] == ["ended"] * 3


@pytest.mark.parametrize("option", ["--plain", None])
def test_a_service_whose_terminal_has_gone_can_be_ended(
    tmp_path: Path,
    small_service: Callable[..., Service],
    service_file: Callable[[Service], Path],
    option: str | None,
) -> None:
    tmp_path.chmod(0o700)
    command = [sys.executable, "-m", "diptych.main", "up", str(service_file(small_service()))]
    command += ["--port", str(free_port()), *filter(None, [option])]
    terminal = Terminal(tmp_path, command)
    try:
        terminal.read_until(lambda shown: "Ctrl-C ends it" in shown)
        terminal.go()
        terminal.process.send_signal(signal.SIGHUP)
        terminal.process.wait(PATIENCE_S)
        assert [*tmp_path.glob("diptych-*")] == [], "it ended in order"
    finally:
        terminal.close()
