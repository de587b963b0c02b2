"""What a router knows of the engines: its accounts."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from diptych_router.policies.least_loaded import POLICY
from diptych_router.policy import EngineView, Role, Snapshot, successor

FINGERPRINT = "same"


@dataclass(slots=True)
class Accounts:
    """What one router has open at each engine, as `RequestTable` counts it: the tokens that are
    known, while an engine has the request or is planned to take it over."""

    views: dict[Role, list[EngineView]]
    _places: dict[str, tuple[Role, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._places = {
            view.key: (role, place)
            for role, views in self.views.items()
            for place, view in enumerate(views)
        }

    @classmethod
    def of(cls, keys: dict[Role, list[str]], seed: int) -> Accounts:
        """Every router knows the engines in an order of its own, and takes the first of equals."""
        views: dict[Role, list[EngineView]] = {}
        for role, names in keys.items():
            order = Random(seed).sample(names, len(names))
            views[role] = [EngineView(name, FINGERPRINT, 0) for name in order]
        return cls(views)

    def charge(self, key: str, tokens: int) -> None:
        """More tokens are open at an engine, or fewer."""
        role, place = self._places[key]
        view = self.views[role][place]
        self.views[role][place] = EngineView(key, FINGERPRINT, view.load + tokens, view.usable)

    def lose(self, key: str) -> None:
        """This engine gets nothing more."""
        role, place = self._places[key]
        self.views[role][place] = EngineView(key, FINGERPRINT, 0, usable=False)

    def usable(self, key: str) -> bool:
        role, place = self._places[key]
        return self.views[role][place].usable

    @property
    def fleet(self) -> Snapshot:
        """Both pools, as this router sees them now."""
        return Snapshot(self.views["prefill"], self.views["decode"])

    def successor(self) -> str | None:
        """Who takes over when the planned decode engine is lost."""
        view = successor(POLICY, self.views["decode"], FINGERPRINT)
        return view.key if view is not None else None
