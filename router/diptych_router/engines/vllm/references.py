"""References to KV that vLLM's prefill engines keep for decode engines. Pure; time is passed in.

    kept ──take──▶ taken ──its time is over──▶ gone
      │              └──nothing reads it──▶ unread ──release──▶ gone
      └──release──▶ gone

vLLM's NixlConnector reads whatever the blocks of a reference hold by then. So each reference is
used once, and early enough that the blocks are certainly still those of its prompt. What the
prefill engine said stays here: the rest of the router passes a ticket on in its place.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from diptych_protocol import DiptychError

MARGIN: Final = 1 / 3
"""This part of a lease must be left when the decode engine is asked. From the moment on at which it
has scheduled the request, it renews the lease itself."""
REMEMBERED: Final = 2.0
"""For so many leases' times it is known who has read whose blocks."""
TICKET: Final = "reference"


class UnusableReferenceError(DiptychError):
    """A reference must not be used; says why."""


@dataclass(slots=True)
class _Kept:
    prefill: str
    """Address of the engine that keeps the blocks."""
    params: dict[str, Any]
    """What it said: `kv_transfer_params`."""
    kept_at: float
    used: bool = False
    """It was sent to a decode engine, which is the only time."""
    decode: str = ""
    """Address of the engine that may be reading them; empty: nobody is."""


class References:
    """All references of one router that may still matter."""

    def __init__(
        self, lease_seconds: float, random_bits: Callable[[int], int] = secrets.randbits
    ) -> None:
        """lease_seconds: how long engines keep blocks for somebody who says nothing."""
        self._lease_seconds = lease_seconds
        self._random_bits = random_bits
        self._kept: dict[str, _Kept] = {}
        """By their tickets, the oldest first."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, prefill: str, compat: str, params: dict[str, Any], now: float) -> dict[str, Any]:
        """A prefill engine has answered. Returns what stands for it as `kv_transfer_params`.

        compat: the fingerprint of the engines that can read its blocks.
        """
        self._forget(now)
        ticket = f"{self._random_bits(128):032x}"
        self._kept[ticket] = _Kept(prefill, params, now)
        return {TICKET: ticket, "remote_engine_id": prefill, "compat": compat}

    def take(self, lease: dict[str, Any], decode: str, now: float) -> dict[str, Any]:
        """What to send to the decode engine that is to read the blocks.

        Raises `UnusableReferenceError` if somebody has got it before, or its time is nearly over.
        """
        kept = self._kept.get(str(lease.get(TICKET)))
        if kept is None or kept.used:
            raise UnusableReferenceError("the reference to its KV was used before, or is too old")
        age = now - kept.kept_at
        if age > self._lease_seconds * (1 - MARGIN):
            raise UnusableReferenceError(
                f"the reference to its KV is {age:.1f} s old, and its blocks are kept for "
                f"{self._lease_seconds:g} s only"
            )
        kept.used, kept.decode = True, decode
        return kept.params

    def nothing_reads(self, lease: dict[str, Any]) -> None:
        """The decode engine has refused the request, or failed with it: it reads nothing now."""
        kept = self._kept.get(str(lease.get(TICKET)))
        if kept is not None:
            kept.decode = ""

    def release(
        self, lease: dict[str, Any], now: float, *, even_if_taken: bool
    ) -> dict[str, Any] | None:
        """Nobody wants these blocks. Returns what to tell whoever frees them; None: nothing, also
        if the lease is over.

        even_if_taken: also if a decode engine may be reading them.
        """
        kept = self._kept.get(str(lease.get(TICKET)))
        if kept is None or (kept.decode and not even_if_taken):
            return None
        if now - kept.kept_at >= self._lease_seconds:
            return None
        del self._kept[str(lease[TICKET])]
        return kept.params

    def readers(self, prefill: str, now: float) -> set[str]:
        """Addresses of the engines that were asked to read blocks of this one lately."""
        self._forget(now)
        return {kept.decode for kept in self._kept.values() if kept.prefill == prefill} - {""}

    def reads(self, decode: str, now: float) -> bool:
        """Whether this engine was asked to read blocks lately."""
        self._forget(now)
        return any(kept.decode == decode for kept in self._kept.values())

    def _forget(self, now: float) -> None:
        for ticket in list(self._old(now)):
            del self._kept[ticket]

    def _old(self, now: float) -> Iterator[str]:
        for ticket, kept in self._kept.items():
            if now - kept.kept_at <= REMEMBERED * self._lease_seconds:
                return
            yield ticket
