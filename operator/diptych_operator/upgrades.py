"""What an upgrade of the operator may do by itself: its turns, one service after the other.

Deployment and Service of the routers say what the pods were last rendered for (`Rendered`). If the
user asks for the same and this operator renders pods otherwise, they stay as they are until it is
their turn.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum
from typing import Final, NamedTuple, Self
from zoneinfo import ZoneInfo

from diptych_operator.api.base import ServiceKey, digest
from diptych_operator.api.names import UPGRADE_ANNOTATION
from diptych_operator.api.service import InferenceService
from diptych_operator.kube.workloads import as_deployments
from diptych_operator.render import KeySets, fixed_counts, render_revision, render_shared
from diptych_operator.render.once import Renderings
from diptych_protocol.router_settings import Serving

EXAMPLE: Final = "Sat,Sun 01:00-05:00 Europe/Berlin"
DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY = f"(?:{'|'.join(DAYS)})"
_SOME = f"{_DAY}(?:-{_DAY})?"
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
PATTERN: Final = f"^({_SOME}(?:,{_SOME})*) ({_TIME})-({_TIME}|24:00) ([A-Za-z0-9_+/-]+)$"
"""The chart's schema has it too."""


@dataclass(frozen=True, slots=True)
class RolloutWindow:
    days: frozenset[int]
    """On which it begins; Monday is 0."""
    begin: timedelta
    """Since midnight, by the clocks of the zone."""
    end: timedelta
    """The same; more than a day if it is on the next one."""
    zone: ZoneInfo

    @classmethod
    def read(cls, text: str) -> Self:
        """Raises `argparse.ArgumentTypeError`."""
        found = re.fullmatch(PATTERN, text)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not like {EXAMPLE!r}")
        days, *times, name = found.groups()
        try:
            zone = ZoneInfo(name)
        except (KeyError, OSError, ValueError) as exc:  # OSError: a folder of zones
            raise argparse.ArgumentTypeError(
                f"{text!r}: there is no time zone {name}; write one like that of {EXAMPLE!r}"
            ) from exc
        begin, end = (timedelta(hours=int(each[:2]), minutes=int(each[3:])) for each in times)
        following = timedelta(days=end <= begin)
        return cls(frozenset(_days(days)), begin, end + following, zone)

    def near(self, now: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Begin and end of the windows from yesterday's on, for two weeks.

        A time that a clock shows twice is the first of both; one that it leaves out is as much
        later as the clock was put forward.
        """
        midnight = datetime.combine(now.astimezone(self.zone), time(), self.zone)
        for days in range(-1, 15):
            day = midnight + timedelta(days)  # by the clocks, as what is added below
            if day.weekday() in self.days:
                yield (day + self.begin).astimezone(UTC), (day + self.end).astimezone(UTC)


def _days(text: str) -> Iterator[int]:
    for some in text.split(","):
        first, last = (DAYS.index(day) for day in (some[:3], some[-3:]))
        yield from (day % 7 for day in range(first, first + (last - first) % 7 + 1))


def opens(windows: Sequence[RolloutWindow], now: datetime) -> datetime | None:
    """Return when the next window begins; None within one, and if there are none."""
    spans = [span for window in windows for span in window.near(now)]
    ahead = [begin for begin, end in spans if max(begin, now) < end]
    return None if any(begin <= now for begin in ahead) else min(ahead, default=None)


MOST_UPGRADES: Final = 1
"""Services that roll at once because of an upgrade of the operator, unless told otherwise."""
NEXT: Final = 10
"""So many services of those that wait look often whether it is their turn."""


class Rendered(NamedTuple):
    """What the pods of a service were rendered for; an annotation."""

    intent: str
    """What the user asked for: the generation of the spec, the keys, and the word to upgrade."""
    revision: str
    pods: str
    """A digest of the pod templates."""
    under_way: bool = False
    """The operator took this change by itself, and the service has not settled since."""

    @classmethod
    def read(cls, text: str) -> Self | None:
        match text.split():
            case [intent, revision, pods, *rest]:
                return cls(intent, revision, pods, bool(rest))
        return None

    def __str__(self) -> str:
        return " ".join((*self[:3], *(["upgrading"] if self.under_way else [])))


def rendering(
    renderings: Renderings, service: InferenceService, revision: str, keys: KeySets
) -> Rendered:
    """Return what this operator makes of a service. Raises `SpecError`, as `render`."""
    # Which older keys routers hold besides is the cluster's state, and nobody's wish.
    held = KeySets(keys.current)

    def make() -> Rendered:
        objects = [
            *render_shared(service, renderings.cluster, held, Serving()),
            *render_revision(service, renderings.cluster, revision, held, fixed_counts(service)),
        ]
        templates = {
            each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["template"]
            for obj in objects
            for each in as_deployments(obj)
        }
        meta = service.metadata
        word = meta.annotations.get(UPGRADE_ANNOTATION, "")
        intent = digest([meta.generation, keys.current, word])
        return Rendered(intent, revision, digest(templates))

    return renderings.once(service, (revision, held), make)


class Standing(StrEnum):
    """Where a service is."""

    Settled = "Settled"
    """Nothing waits, or what happens was asked for by the user."""
    Waits = "Waits"
    """This operator would render its pods otherwise."""
    Rolls = "Rolls"
    """It takes such a change."""
    Unjudged = "Unjudged"
    """The same, but its canary only waits for requests: others need not wait with it."""
    Failed = "Failed"
    """It took one and does not get on."""


@dataclass(frozen=True, slots=True)
class Place:
    """A service among all."""

    standing: Standing = Standing.Settled
    pods: int = 0
    calm: bool = False
    """Its last pass changed no Deployment, and so saw all that was changed before."""
    opens: datetime | None = None
    """When the window begins that it waited for last; None: it waited for other services."""


def queue(places: Mapping[ServiceKey, Place]) -> list[ServiceKey]:
    """Return the services that wait, the smallest first."""
    waiting = (key for key, place in places.items() if place.standing is Standing.Waits)
    return sorted(waiting, key=lambda key: (places[key].pods, key))


def turns(places: Mapping[ServiceKey, Place], most: int) -> list[ServiceKey]:
    """Return the services that may begin now; none after one that failed, until it is mended."""
    standings = [place.standing for place in places.values()]
    if Standing.Failed in standings:
        return []
    return queue(places)[: max(0, most - standings.count(Standing.Rolls))]


class Upgrades:
    """Gives turns. What it knows comes from the passes of this process."""

    def __init__(self, most: int = MOST_UPGRADES, windows: Sequence[RolloutWindow] = ()) -> None:
        """`most`: services that may roll at once; with 0, and outside of `windows`, all wait."""
        self._most = most
        self._windows = windows
        self.places: dict[ServiceKey, Place] = {}

    def waiting(self) -> list[ServiceKey]:
        return queue(self.places)

    def take(
        self, key: ServiceKey, pods: int, known: Collection[ServiceKey], now: datetime
    ) -> bool:
        """Whether a service may take what waits, now. A yes counts at once.

        `known`: all services. Before each has been looked at, another one may be rolling.
        """
        before = self.places.get(key, Place())
        if before.standing is Standing.Rolls:
            return True  # the watch does not show yet what was begun
        closed_until = opens(self._windows, now)
        self.places[key] = Place(Standing.Waits, pods, opens=closed_until)
        most = self._most if closed_until is None else 0
        if not self.places.keys() >= set(known) or key not in turns(self.places, most):
            return False
        self.places[key] = Place(Standing.Rolls, pods)
        return True

    def ended(self, key: ServiceKey, *, at_rest: bool) -> bool:
        """Whether a service that rolled is `at_rest`, and not only seems so."""
        return at_rest and self.places.get(key, Place()).calm
