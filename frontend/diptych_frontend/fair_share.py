"""Who was served how much: a counter for each tenant, so that none is served at another's cost.

The idea and the rule of the lift are those of the virtual token counter (Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024): each tenant's counter grows with the tokens that it was
served, whoever waits with the least is next, and one who begins to wait is lifted to the least of
those who wait already, so that nobody saves up service while he wants none. Here he is lifted to
somewhat less than that: the credit lets who asks now and then have a prompt computed in one go,
instead of taking turns over it with those who always wait.

Pure bookkeeping, for engines and routers alike. A request without a tenant is of the tenant "".
"""

from __future__ import annotations

from dataclasses import dataclass

OUTPUT_WEIGHT = 2
"""What a generated token counts for, in tokens of a prompt."""
MAX_IDLE = 1024
"""Tenants without a request that are remembered; who is forgotten has the credit again."""


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's."""

    tenant: str = ""
    served: float = 0.0
    """Tokens served, in those of a prompt, and what lifts have added."""
    num_open: int = 0
    """Requests that have not ended."""


class FairShare:
    """The accounts of all tenants. Whoever serves a token adds to `Account.served` by himself."""

    def __init__(self, credit: float) -> None:
        """credit: by so many tokens one who begins to wait may be behind those who do."""
        self.credit = credit
        self._active: dict[str, Account] = {}
        """Those with open requests."""
        self._idle: dict[str, Account] = {}
        """The others; who has been without a request for longest comes first."""
        self._waiting: dict[str, Account] = {}
        self._left: Account | None = None
        """Who ceased to wait last."""
        self._level = 0.0
        """The least service of those who waited so far. It never falls."""

    def __len__(self) -> int:
        """Tenants with open requests."""
        return len(self._active)

    @property
    def several(self) -> bool:
        """There is somebody to be fair to."""
        return len(self._active) > 1

    def others_than(self, tenant: str) -> bool:
        """Somebody else has a request, too."""
        return len(self._active) > (tenant in self._active)

    def open(self, tenant: str) -> Account:
        """A request comes; the account that it is to be charged to. `close` it once."""
        account = self._active.get(tenant)
        if account is None:
            account = self._idle.pop(tenant, None) or Account(tenant)
            self._active[tenant] = account
        account.num_open += 1
        return account

    def num_open(self, tenant: str) -> int:
        """Requests of a tenant that have not ended."""
        account = self._active.get(tenant)
        return 0 if account is None else account.num_open

    def close(self, account: Account) -> None:
        """A request has ended."""
        account.num_open -= 1
        if account.num_open:
            return
        del self._active[account.tenant]
        self._idle[account.tenant] = account
        if len(self._idle) > MAX_IDLE:
            del self._idle[next(iter(self._idle))]

    def begin_to_wait(self, account: Account) -> None:
        """Lift a tenant of whom nothing has waited so far."""
        others = self._waiting.values() or ([self._left] if self._left is not None else [])
        if others:
            self._level = max(self._level, min(other.served for other in others))
        account.served = max(account.served, self._level - self.credit)
        self._waiting[account.tenant] = account

    def cease_to_wait(self, account: Account) -> None:
        """Nothing of a tenant waits any more."""
        del self._waiting[account.tenant]
        self._left = account
