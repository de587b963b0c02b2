"""The worker half's table: the requests of leases and loads, and the reports to vLLM.

vLLM ends a request's wait, or frees its blocks, when it reads the request's id in a report. An
unexpected id ends its core. So each grant and each fetch ends in exactly one report. A fetch from
several ranks of another engine is several loads for the hinge.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych_kv_transfer.tables.actions import LeaseEnded, LoadEnded


@dataclass(slots=True)
class Results:
    """The ids of requests whose transfers have ended."""

    sent: set[str] = field(default_factory=set)
    """Requests whose blocks are free: nobody reads them any more."""
    received: set[str] = field(default_factory=set)
    """Requests whose blocks nobody writes to any more, including those of failed loads."""
    failed: set[str] = field(default_factory=set)
    """Requests whose blocks contain nothing that may be used."""


@dataclass(slots=True)
class Fetched:
    """What a request waits for."""

    request_id: str
    loads: list[str]
    """The hinge's names of the loads that have not ended."""
    ok: bool = True


@dataclass(slots=True)
class Transfers:
    """All leases and loads of one engine that have not been reported yet."""

    _lent: dict[str, str | None] = field(default_factory=dict)
    """Lease -> the request that keeps its blocks; None while the lease is only promised."""
    _ended: set[str] = field(default_factory=set)
    """Promised leases that have ended already. Their requests do not know it yet."""
    _held: dict[str, list[str]] = field(default_factory=dict)
    """Load of a queueing request -> the hinge's names of its loads."""
    _fetched: dict[str, Fetched] = field(default_factory=dict)
    """The same of loads that have begun."""
    _loads: dict[str, str] = field(default_factory=dict)
    """The hinge's name of a load that has begun -> the load of which it is a part."""
    _results: Results = field(default_factory=Results)

    def promised(self, lease_id: str) -> None:
        self._lent[lease_id] = None

    def granted(self, lease_id: str, request_id: str) -> None:
        if lease_id in self._ended:
            self._ended.remove(lease_id)
            self._results.sent.add(request_id)
        else:
            self._lent[lease_id] = request_id

    def withdrawn(self, lease_id: str) -> None:
        self._lent.pop(lease_id, None)
        self._ended.discard(lease_id)

    def holding(self, load: str, names: list[str]) -> None:
        """Record that loads of the hinge, of these names, keep a load's leases alive."""
        self._held[load] = names

    def fetching(self, load: str, request_id: str, names: list[str]) -> None:
        """Record that a load begins, as loads of the hinge with these names."""
        self._held.pop(load, None)
        self._fetched[load] = Fetched(request_id, names)
        self._loads.update(dict.fromkeys(names, load))

    def cancelled(self, load: str) -> list[str]:
        """Record that a load is given up. Returns the hinge's names of the loads to cancel."""
        fetched = self._fetched.get(load)
        return self._held.pop(load, []) if fetched is None else list(fetched.loads)

    def refused(self, request_id: str) -> None:
        """Record that the load of a request is not even begun."""
        self._results.received.add(request_id)
        self._results.failed.add(request_id)

    def lease_ended(self, event: LeaseEnded) -> None:
        if event.lease_id not in self._lent:
            return
        request_id = self._lent.pop(event.lease_id)
        if request_id is None:
            self._ended.add(event.lease_id)
        else:
            self._results.sent.add(request_id)

    def load_ended(self, event: LoadEnded) -> Fetched | None:
        """Record the end of a load. Returns the fetch that it was a part of; None if that was
        reported before.

        If one part has failed, the others are of no use.
        """
        load = self._loads.pop(event.request_id, None)
        fetched = None if load is None else self._fetched.get(load)
        if load is None or fetched is None:
            return None
        fetched.loads.remove(event.request_id)
        fetched.ok = fetched.ok and event.ok
        if not fetched.loads:
            del self._fetched[load]
            self._results.received.add(fetched.request_id)
            if not fetched.ok:
                self._results.failed.add(fetched.request_id)
        return fetched

    def take_results(self) -> Results:
        """Return the transfers that have ended since the last call."""
        results, self._results = self._results, Results()
        return results
