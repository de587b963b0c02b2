"""Counts how many requests of each tenant are at the engines, and limits them."""

from __future__ import annotations

from collections import defaultdict

from diptych_frontend.fair_share import Account, FairShare

MAX_PLACED = 256
"""Limit on the requests that one tenant may have at the engines, for each engine that decodes,
while other tenants have requests too. It is a few times what an engine computes at once, and a
fraction of what an engine lets wait."""
CREDIT = 4096
"""Number of tokens by which a tenant that comes back may be behind the tenants that wait."""


class TenantPlaces:
    """Counts the requests of one router that are at the engines, by tenant."""

    def __init__(self) -> None:
        self.accounts = FairShare(CREDIT)
        self.num_engines = 1
        """Engines that decode."""
        self._num_placed = defaultdict[str, int](int)
        """Number of requests at the engines, by tenant; only tenants that have some are listed."""

    def take(self, account: Account) -> None:
        """Count one more request of a tenant at the engines."""
        self._num_placed[account.tenant] += 1

    def give_back(self, account: Account) -> None:
        """Count one request of a tenant less at the engines."""
        self._num_placed[account.tenant] -= 1
        if not self._num_placed[account.tenant]:
            del self._num_placed[account.tenant]

    def is_crowded(self, tenant: str) -> bool:
        """Whether a tenant has too many requests at the engines while another tenant has requests
        here."""
        if self._num_placed.get(tenant, 0) < MAX_PLACED * max(1, self.num_engines):
            return False
        return self.accounts.others_than(tenant)

    def crowded(self) -> set[str]:
        """All tenants that are crowded: see `is_crowded`."""
        return {tenant for tenant in self._num_placed if self.is_crowded(tenant)}
