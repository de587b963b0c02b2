"""Which engine has which request, and how each request counts there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from diptych_router.requests.fleet import EngineAccount
from diptych_router.requests.placing.tenant_places import TenantPlaces
from diptych_router.requests.record.records import Records
from diptych_router.requests.routed_request import MAX_LATE, RoutedRequest, Stage


class Charge(NamedTuple):
    """The work that a request adds to the accounts of engines, until it leaves."""

    tokens: int
    engine: EngineAccount
    planned: EngineAccount | None
    """The engine that is to take it over, if that is another one."""


@dataclass(slots=True)
class Placements:
    """Requests at engines, and the accounts of these engines and of tenants.

    A request is charged from `place` until `leave`. In between, its engine may end its part
    (`silence`), before the next engine takes over.
    """

    tenants: TenantPlaces
    records: Records
    by_core_id: dict[str, RoutedRequest] = field(default_factory=dict)
    """By the id under which an engine has it now."""
    charges: dict[str, Charge] = field(default_factory=dict)
    """By the request's own id."""

    def at(self, engine: str) -> list[RoutedRequest]:
        """Return the requests at this engine."""
        return [routed for routed in self.by_core_id.values() if routed.engine == engine]

    def late(self, now: float) -> list[RoutedRequest]:
        """Return the requests whose engines should have brought a token by now."""
        return [routed for routed in self.by_core_id.values() if routed.first_token_by <= now]

    def place(
        self,
        routed: RoutedRequest,
        engine: EngineAccount,
        stage: Stage,
        now: float,
        planned: EngineAccount | None = None,
    ) -> None:
        """Charge a request to an engine's account, and to that of the engine that
        takes over later."""
        self.leave(routed)
        routed.place(engine.key, stage)
        if routed.late < MAX_LATE:
            routed.first_token_by = now + routed.patience_s
        core_id = routed.core_id
        self.records.placed(routed.record, core_id, engine.key, engine.name, now)
        self.by_core_id[core_id] = routed
        tokens = routed.prompt_tokens + len(routed.generated)
        self.charges[routed.request_id] = Charge(tokens, engine, planned)
        self.tenants.take(routed.account)
        engine.charge(tokens)
        if planned is not None:
            planned.charge(tokens, planned=1)

    def silence(self, routed: RoutedRequest) -> None:
        """Record that its engine has sent its last output; later ones are ignored."""
        del self.by_core_id[routed.core_id]

    def leave(self, routed: RoutedRequest) -> None:
        """Record that it is at no engine any more."""
        charge = self.charges.pop(routed.request_id, None)
        if charge is not None:
            charge.engine.charge(-charge.tokens)
            if charge.planned is not None:
                charge.planned.charge(-charge.tokens, planned=-1)
            self.tenants.give_back(routed.account)
        self.by_core_id.pop(routed.core_id, None)
        routed.engine = ""
