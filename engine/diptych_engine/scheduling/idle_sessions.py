"""Sessions between two pieces of their prompts."""

from __future__ import annotations

from diptych_engine.scheduling.request import Request


class IdleSessions:
    """Idle sessions. Each keeps its blocks and its row until other requests need them. Without its
    blocks, its tokens are computed again when the next piece of its prompt has come."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[str, Request] = {}
        """The sessions by request id, the longest idle first."""

    def add(self, session: Request) -> Request | None:
        """Add a session. Returns the one that has waited longest if there are too many now."""
        self._sessions[session.request_id] = session
        return next(iter(self._sessions.values())) if len(self) > self._limit else None

    def remove(self, session: Request) -> None:
        del self._sessions[session.request_id]

    def longest_idle(self) -> Request | None:
        """The longest idle of the sessions that still hold blocks; None: no session holds any."""
        return next((s for s in self._sessions.values() if s.block_ids), None)

    @property
    def num_rows(self) -> int:
        """Number of batch rows that these sessions hold."""
        return sum([bool(session.block_ids) for session in self._sessions.values()])

    def __len__(self) -> int:
        return len(self._sessions)
