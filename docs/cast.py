"""Records a terminal in which an answer goes on after its engine was killed.

    make cast                          write docs/casts/kill.cast
    asciinema play docs/casts/kill.cast

A real shell runs a real service on this machine. Only the keys are pressed by this program. The
recording is in asciinema's format, version 2.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path

COLUMNS, ROWS = 100, 30
PROMPT = "\x1b[32m$\x1b[0m "
KEY_S = 0.04
"""Between two keys that are pressed."""
LONGEST_PAUSE_S = 2.0
"""A pause is shown for so long at most."""
HANG_UP_S = 0.5
"""After which a shell that did not end is told again."""
PATIENCE_S = 180.0
QUESTION = "Write a long story about a lighthouse keeper and the sea."
TOKENS, MIDDLE = 300, 300
"""The longest answer; and the characters after which its engine is killed."""
ROOT = Path(__file__).resolve().parents[1]
CAST = ROOT / "docs" / "casts" / "kill.cast"


class Terminal:
    """A shell in a terminal, and a recording of what it shows."""

    def __init__(self, folder: Path) -> None:
        self.events: list[tuple[float, str]] = []
        self._shown = ""
        """Since the last command began."""
        self._at, self._last = 0.0, time.monotonic()
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            ours = {
                "PS1": PROMPT,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "TERM": "xterm-256color",
                "XDG_RUNTIME_DIR": str(folder),
            }
            os.execvpe("bash", ["bash", "--norc", "--noprofile"], {**os.environ, **ours})
        ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.wait(lambda shown: shown.endswith(PROMPT))

    def type(self, command: str) -> str:
        """Type a command, and wait until it is over. Returns what it showed."""
        for key in command:
            os.write(self._terminal, key.encode())
            time.sleep(KEY_S)
            self._read(0.0)
        self._shown = ""
        os.write(self._terminal, b"\n")
        return self.wait(lambda shown: shown.endswith(PROMPT))

    def wait(self, is_over: Callable[[str], bool]) -> str:
        """Record until what has been shown since the last command is this."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_over(self._shown):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the terminal shows: {self._shown[-2000:]}")
            self._read(0.1)
        return self._shown

    def end(self) -> None:
        """Hang up, so that the shell and its jobs end.

        More than once: bash forgets a signal that arrives just before it waits for a key until a
        key is pressed. A closed terminal would end it as well, but not always its jobs.
        """
        deadline = time.monotonic() + PATIENCE_S
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                raise TimeoutError("the shell does not end")
            os.kill(self._pid, signal.SIGHUP)
            time.sleep(HANG_UP_S)
        os.close(self._terminal)

    def _read(self, seconds: float) -> None:
        while select.select([self._terminal], [], [], seconds)[0]:
            text = os.read(self._terminal, 65536).decode(errors="replace")
            now = time.monotonic()
            self._at += min(LONGEST_PAUSE_S, now - self._last)
            self._last = now
            self._shown += text
            self.events.append((self._at, text))
            seconds = 0.0


def main(out: Path, *options: str) -> None:
    """Record into a file. `diptych up` gets the options.

    Raises `TimeoutError` or `RuntimeError` if the recording does not show what is promised.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o700)
        shutil.copy(ROOT / "examples" / "smollm2.yaml", folder)
        terminal = Terminal(folder)
        try:
            play(terminal, folder, *options)
        finally:
            terminal.end()
    out.parent.mkdir(exist_ok=True)
    title = "An answer goes on after its engine was killed"
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": title}
    events = [[round(at, 3), "o", text] for at, text in terminal.events]
    out.write_text("".join(f"{json.dumps(line)}\n" for line in (header, *events)))


def play(terminal: Terminal, folder: Path, *options: str) -> None:
    """Start a service, kill the engine of an answer, and look at what became of both."""
    log = folder / "up.log"
    log.touch()  # a shell shows its prompt before its child in the background has opened the file
    up = shlex.join(["diptych", "up", "smollm2.yaml", "--plain", *options])
    terminal.type(f"{up} > up.log 2>&1 &")
    terminal.wait(lambda _: "Ctrl-C ends it" in log.read_text() or "Error: " in log.read_text())
    if "Error: " in log.read_text():
        raise RuntimeError(f"{up} says: {log.read_text()}")
    terminal.type("cat up.log")
    terminal.type("diptych status")
    victim = decode_engine(folder)
    half = f"[ $(wc -c < answer) -gt {MIDDLE} ]"
    terminal.type(f"touch answer; (until {half}; do sleep 0.05; done; kill -9 {victim}) &")
    question = f"--temperature 0 --max-tokens {TOKENS} --once '{QUESTION}'"
    terminal.type(f"diptych chat {question} | tee answer")
    came_again = re.compile(r"ready \(port \d+, restarts 1\)")
    terminal.wait(lambda _: came_again.search(log.read_text()) is not None)
    terminal.type("tail -n 4 up.log")
    after = terminal.type("diptych status")
    if decode_engine(folder) == victim or "error" in after:
        raise RuntimeError("the engine was not killed, or did not come again")
    terminal.type("kill %1; wait %1")


def decode_engine(folder: Path) -> int:
    """Its process."""
    for file in folder.glob("diptych-*/state.json"):
        pods = json.loads(file.read_bytes())["pods"]
        return next(int(pod["pid"]) for pod in pods if pod["role"] == "decode")
    raise RuntimeError("no service runs")


if __name__ == "__main__":
    file, *more = sys.argv[1:] or [str(CAST)]
    main(Path(file), *more)
