"""Several answers to one prompt: one begins first, and the others reuse its KV.

If all began at once, the prompt would be computed and transferred once for each answer. So the
others begin when the first one decodes. Then prefill has cached all of the prompt but its last
block, and so has decode. The others use the same engines if these may still get requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from diptych_router.choosing.policy import Decision
from diptych_router.requests.routed_request import RoutedRequest


@dataclass(slots=True)
class Siblings:
    """Tracks which requests wait for which one. Whatever happens to the first one, the others
    continue."""

    followers: dict[str, tuple[RoutedRequest, list[RoutedRequest]]] = field(default_factory=dict)
    """By the id of who goes ahead: itself, and who waits for it."""

    def wait(self, routed: RoutedRequest, leader: RoutedRequest | None) -> bool:
        """Let a request wait for another answer to its prompt; False if that is not necessary."""
        if leader is None or leader.has_decoded:
            return False
        self.followers.setdefault(leader.request_id, (leader, []))[1].append(routed)
        return True

    def take_ready(
        self, requests: Mapping[str, RoutedRequest]
    ) -> list[tuple[RoutedRequest, RoutedRequest]]:
        """Return the requests that need not wait any longer, each with the first one, of all open
        requests."""
        ready = []
        for name, (leader, followers) in list(self.followers.items()):
            open_still = requests.get(name) is leader
            if not open_still or leader.has_decoded or leader.record.num_attempts > 1:
                del self.followers[name]
                ready += [(f, leader) for f in followers if requests.get(f.request_id) is f]
        return ready


def same_way(leader: RoutedRequest, is_open: Callable[[str], bool]) -> Decision | None:
    """Return the engines of the first one, if they may still get requests."""
    prefill, decode = leader.prefill_engine, leader.decode_engine
    if not decode or not is_open(decode) or (prefill and not is_open(prefill)):
        return None
    return Decision(prefill or None, decode, "as another answer to its prompt")
