"""Sessions between two pieces of their prompts."""

from __future__ import annotations

from diptych_engine.scheduling.request import Request


class IdleSessions:
    """Each keeps its blocks and its row until somebody lacks them; then its tokens are computed
    again when its next piece has come."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[str, Request] = {}
        """The longest idle first."""

    def add(self, session: Request) -> Request | None:
        """Returns the session that has waited longest, if they are too many now."""
        self._sessions[session.request_id] = session
        return next(iter(self._sessions.values())) if len(self) > self._limit else None

    def remove(self, session: Request) -> None:
        del self._sessions[session.request_id]

    def longest_idle(self) -> Request | None:
        """Of those that still hold blocks."""
        return next((s for s in self._sessions.values() if s.block_ids), None)

    @property
    def num_rows(self) -> int:
        """Rows of the batch that they hold."""
        return sum([bool(session.block_ids) for session in self._sessions.values()])

    def __len__(self) -> int:
        return len(self._sessions)
