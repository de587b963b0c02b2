"""The engine's process, as V0's client looked at it."""

from __future__ import annotations

from pathlib import Path

ZOMBIE = "zombie"


class EngineProcess:
    """The part of `psutil.Process` that matters here. It stands for the process that had this id
    when the object was made, and never for a later one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = _stat(pid)[1]

    def is_running(self) -> bool:
        """A zombie still is."""
        state, started = _stat(self.pid)
        return bool(state) and started == self._started

    def status(self) -> str:
        """`zombie` for a process that nobody has buried yet; otherwise the kernel's letter, or
        nothing if it is gone."""
        state, _ = _stat(self.pid)
        return ZOMBIE if state in ("Z", "X") else state

    @property
    def died(self) -> bool:
        return not self.is_running() or self.status() == ZOMBIE


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process and when it started; two empty texts if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "", ""
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], fields[19]
