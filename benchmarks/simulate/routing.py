"""The router's part: its accounts, and the product's own choice of engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.simulate.workload import Request

from diptych_router.policy import Decision, EngineView, Role, choose, heir

FINGERPRINT = "same"
OVERLOAD_FACTOR = 2.0
SPREAD = 0x9E3779B1
"""Odd, and far from everything: neighbours among prefixes are none among engines."""


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

    def heir(self) -> str | None:
        """Who takes over when the planned decode engine is lost."""
        view = heir(self.views["decode"], FINGERPRINT)
        return view.key if view is not None else None


Policy = Callable[[Request, Sequence[EngineView], Sequence[EngineView]], Decision | None]


def product(
    _: Request, prefill: Sequence[EngineView], decode: Sequence[EngineView]
) -> Decision | None:
    """What the project's router does."""
    return choose(prefill, decode)


def affine(
    request: Request, prefill: Sequence[EngineView], decode: Sequence[EngineView]
) -> Decision | None:
    """What it does not do (yet): prompts with a common prefix go to the same prefill engine, while
    that has at most twice the average open and the prompt itself; others as ever.
    """
    if request.prefix < 0 or not prefill:
        return choose(prefill, decode)
    key = f"prefill-{request.prefix * SPREAD % len(prefill)}"
    home = next(view for view in prefill if view.key == key)
    average = sum(view.load for view in prefill) / len(prefill)
    if not home.usable or home.load > OVERLOAD_FACTOR * average + request.prompt:
        return choose(prefill, decode)
    return choose([home], decode)


POLICIES: dict[str, Policy] = {"product": product, "affine": affine}
