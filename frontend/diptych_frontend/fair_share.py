"""Counts the tokens that each tenant was served, so that none is served at another's cost.

The idea and the rule of the lift are those of the virtual token counter (Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024). Each tenant's counter grows with the tokens that it was
served, and the waiting tenant with the lowest counter is next. A tenant who begins to wait is
lifted to the lowest counter of those who already wait, so that nobody saves up service. Here the
tenant is lifted to somewhat less than that. This credit lets an occasional request have its prompt
computed at once, instead of in turns with tenants who always wait.

Engines and routers use it. It performs no I/O. A request without a tenant belongs to the tenant "".
"""

from __future__ import annotations

from dataclasses import dataclass

OUTPUT_WEIGHT = 2
"""The cost of a generated token, in tokens of a prompt; and that of a wrong guess, which took as
much as the token that it is not."""
MAX_IDLE = 1024
"""The number of idle tenants that are remembered. A forgotten tenant gets the credit again."""


@dataclass(slots=True, eq=False)
class Account:
    """The account of one tenant."""

    tenant: str = ""
    served: float = 0.0
    """Tokens served, in prompt tokens, plus what lifts have added."""
    num_open: int = 0
    """Requests that have not ended."""


class FairShare:
    """The accounts of all tenants. The code that serves a token adds to `Account.served`."""

    def __init__(self, credit: float) -> None:
        """credit: how many tokens a tenant may be behind the others when it begins to wait."""
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
        """The number of tenants with open requests."""
        return len(self._active)

    @property
    def several(self) -> bool:
        """Whether more than one tenant has requests."""
        return len(self._active) > 1

    def others_than(self, tenant: str) -> bool:
        """Whether another tenant has a request."""
        return len(self._active) > (tenant in self._active)

    def open(self, tenant: str) -> Account:
        """Count a new request, and return the account to charge. `close` it once."""
        account = self._active.get(tenant)
        if account is None:
            account = self._idle.pop(tenant, None) or Account(tenant)
            self._active[tenant] = account
        account.num_open += 1
        return account

    def num_open(self, tenant: str) -> int:
        """The number of open requests of a tenant."""
        account = self._active.get(tenant)
        return 0 if account is None else account.num_open

    def close(self, account: Account) -> None:
        """Count the end of a request."""
        account.num_open -= 1
        if account.num_open:
            return
        del self._active[account.tenant]
        self._idle[account.tenant] = account
        if len(self._idle) > MAX_IDLE:
            del self._idle[next(iter(self._idle))]

    def begin_to_wait(self, account: Account) -> None:
        """Lift a tenant who begins to wait."""
        others = self._waiting.values() or ([self._left] if self._left is not None else [])
        if others:
            self._level = max(self._level, min(other.served for other in others))
        account.served = max(account.served, self._level - self.credit)
        self._waiting[account.tenant] = account

    def cease_to_wait(self, account: Account) -> None:
        """Record that nothing of a tenant waits any more."""
        del self._waiting[account.tenant]
        self._left = account
