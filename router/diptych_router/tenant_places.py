"""How many requests of which tenant are at the engines, and when those are too many. Pure."""

from __future__ import annotations

from collections import defaultdict

from diptych_frontend.fair_share import Account, FairShare

MAX_PLACED = 256
"""Requests that one tenant may have at the engines, for each that decodes, while others have some,
too: a few times what an engine computes at once, and a part of what it lets wait."""
CREDIT = 4096
"""Tokens by which a tenant that comes back may be behind those who wait."""


class TenantPlaces:
    """Of one router."""

    def __init__(self) -> None:
        self.accounts = FairShare(CREDIT)
        self.num_engines = 1
        """Engines that decode."""
        self._num_placed = defaultdict[str, int](int)
        """Requests at the engines, of those tenants that have some."""

    def take(self, account: Account) -> None:
        """One more request is at the engines."""
        self._num_placed[account.tenant] += 1

    def give_back(self, account: Account) -> None:
        """One is there no more."""
        self._num_placed[account.tenant] -= 1
        if not self._num_placed[account.tenant]:
            del self._num_placed[account.tenant]

    def is_crowded(self, tenant: str) -> bool:
        """A tenant has many requests there, and another one has some here, too."""
        if self._num_placed.get(tenant, 0) < MAX_PLACED * max(1, self.num_engines):
            return False
        return self.accounts.others_than(tenant)

    def crowded(self) -> set[str]:
        """All such tenants."""
        return {tenant for tenant in self._num_placed if self.is_crowded(tenant)}
