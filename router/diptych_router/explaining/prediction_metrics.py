"""How well a router's predictions come true, as histograms: real seconds over predicted ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from diptych_router.policy import ROLES, Role

BOUNDS: Final = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class Ratios:
    """Counts of ratios, by the first of `BOUNDS` that is not below them."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def saw(self, ratio: float) -> None:
        self._counts[bisect_left(BOUNDS, ratio)] += 1
        self._sum += ratio

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        """As Prometheus wants it: each bucket has all that is not above its bound."""
        names = [*map(floatToGoString, BOUNDS), "+Inf"]
        family.add_metric(
            labels, list(zip(names, accumulate(self._counts), strict=True)), self._sum
        )


class PredictionMetrics(Collector):
    """Register it where the router's metrics are."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.first_token: dict[Role, Ratios] = {role: Ratios() for role in ROLES}
        """By the pool that computed the prompt."""
        self.hand_off = Ratios()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        first_token = HistogramMetricFamily(
            "diptych:first_token_real_over_predicted",
            "Seconds from the choice of engines to the first token, over what was predicted; by "
            "the pool that computed the prompt.",
            labels=("model_name", "pool"),
        )
        for role, ratios in self.first_token.items():
            ratios.add_to(first_token, (self._model_name, role))
        hand_off = HistogramMetricFamily(
            "diptych:hand_off_real_over_predicted",
            "Seconds from the first token to the one after the hand-off, over what was predicted.",
            labels=("model_name",),
        )
        self.hand_off.add_to(hand_off, (self._model_name,))
        yield from (first_token, hand_off)
