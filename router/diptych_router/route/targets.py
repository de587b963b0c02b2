"""Which services are asked for a request, and in which order. It knows no sockets and no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from diptych_protocol.router_settings import RouteModel, RouteTarget

REST_S: Final = 5.0
"""How long a service that could not be reached is asked after all others."""


class Targets:
    """The services of one model, taken in turns by weight.

    Turns are smooth: every service saves its weight up, the richest is chosen and pays the sum. So
    of any run of requests as long as that sum, each service gets exactly its weight.
    """

    def __init__(self, model: RouteModel) -> None:
        self.name = model.names[0]
        self.all: Final = tuple(model.targets)
        self._saved = [0] * len(self.all)
        self._rests_until: dict[str, float] = {}

    def order(self, now: float) -> Sequence[RouteTarget]:
        """Return all services, the one whose turn it is first, those without a weight last."""
        for place, target in enumerate(self.all):
            self._saved[place] += target.weight
        richest = max(range(len(self.all)), key=self._saved.__getitem__)
        self._saved[richest] -= sum(target.weight for target in self.all)
        chosen = self.all[richest]
        return sorted(
            self.all,
            key=lambda each: (
                self._rests_until.get(each.url, now) > now, each is not chosen, not each.weight
            ),
        )  # fmt: skip

    def rest(self, target: RouteTarget, now: float) -> bool:
        """Take note that the service could not be reached; False if that was known."""
        is_news = self._rests_until.get(target.url, 0.0) <= now
        self._rests_until[target.url] = now + REST_S
        return is_news


def by_name(models: Sequence[RouteModel]) -> Mapping[str, Targets]:
    """Return the services of each model under each of its names."""
    found: dict[str, Targets] = {}
    for model in models:
        targets = Targets(model)
        found |= dict.fromkeys(model.names, targets)
    return found
