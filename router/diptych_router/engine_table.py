"""The engines of one pool as columns of numbers, so that a decision looks at all of them at once.

An engine has a row. Its numbers change when it reports, and when this router gives it work; nothing
is gathered when a request comes. Pure: time is passed in.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from diptych_protocol import SchedulerStats
from diptych_router.learned_rates import LearnedRates

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

STEP_PRIOR: Final = (5e-3, 1e-4, 1e-4)
"""Seconds for a step, for a token of a prompt in it, and for a row that generates in it, of an
engine of which nothing is known."""
TRIP_PRIOR: Final = (5e-3, 5e-6)
"""Seconds that a request waits for a hand-off, and for each token of its KV."""
FLEET_PRIOR_S: Final = 1e-4
OWN_PRIOR_S: Final = 0.05
"""What is known beforehand of the fleet, and of one engine from the others, counts as much as so
many seconds of work."""
SHARE_FADING: Final = 0.999
"""How much of what counts for `FleetRates.share` is left after the next report."""
LEAST_SHARE: Final = 1 / 64
FIELDS: Final = (
    "usable", "silent", "fingerprint", "block_size", "place", "open_tokens", "given", "planned",
    "queued", "placed_tokens", "rows", "placed_rows", "free_tokens", "all_tokens", "reported_at",
    "step_s", "prompt_token_s", "row_s", "trip_s", "trip_token_s",
)  # fmt: skip


def distinct(values: Floats) -> list[float]:
    """The different ones. Mostly there is one."""
    if len(values) and (values == values[0]).all():
        return [float(values[0])]
    found: list[float] = np.unique(values).tolist()
    return found


class FleetRates:
    """What the reports of all engines teach: the rates of one that has told little."""

    def __init__(self) -> None:
        self.steps = LearnedRates(STEP_PRIOR, FLEET_PRIOR_S)
        self.trips = LearnedRates(TRIP_PRIOR, FLEET_PRIOR_S)
        self._placed = self._computed = 0.0
        self._step_prior, self._trip_prior = np.array(STEP_PRIOR), np.array(TRIP_PRIOR)

    @property
    def share(self) -> float:
        """The part of all work that this router places. Other routers place the rest meanwhile, and
        only the next report tells how much."""
        if self._computed <= 0:
            return 1.0
        return min(max(self._placed / self._computed, LEAST_SHARE), 1.0)

    def placed(self, tokens: float) -> None:
        """This router gave somebody so many tokens to compute."""
        self._placed += tokens

    def computed(self, tokens: float) -> None:
        """Somebody has computed so many."""
        self._placed *= SHARE_FADING
        self._computed = self._computed * SHARE_FADING + max(tokens, 0.0)

    def saw_steps(self, amounts: tuple[float, ...], seconds: float) -> None:
        self.steps.saw(amounts, seconds, self._step_prior)

    def saw_trips(self, amounts: tuple[float, ...], seconds: float) -> None:
        self.trips.saw(amounts, seconds, self._trip_prior)


class EngineTable:
    """The rows of one pool, in no particular order."""

    def __init__(self, rates: FleetRates) -> None:
        self.fleet_rates = rates
        self.rows: list[EngineRow] = []
        self.columns: Floats = np.zeros((len(FIELDS), 0))

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> Floats:
        """[engines] The numbers of this name; see `FIELDS`."""
        values: Floats = self.columns[_PLACE_OF[name]]
        return values

    def add(self, key: str) -> EngineRow:
        """A new engine. It has been given as much as those that were given most."""
        row = EngineRow(self, key, len(self.rows))
        most = self.column("given").max(initial=0.0)
        self.rows.append(row)
        self.columns = np.hstack((self.columns, np.zeros((len(FIELDS), 1))))
        row["given"], row["block_size"] = most, 1.0
        row.learn()
        return row

    def remove(self, row: EngineRow) -> None:
        """An engine is gone."""
        self.columns = np.delete(self.columns, row.at, axis=1)
        del self.rows[row.at]
        for at, other in enumerate(self.rows):
            other.at = at

    def waiting_tokens(self, now: float) -> Floats:
        """[engines] Prompt tokens that wait at each: what it reported, less what it can have
        computed since, and what was placed there since: others place as this router does."""
        age = np.maximum(now - self.column("reported_at"), 0.0)
        left = self.column("queued") - age / self.column("prompt_token_s")
        placed = self.column("placed_tokens") / self.fleet_rates.share
        waiting: Floats = np.maximum(left, 0.0) + placed
        return waiting

    def decoding(self) -> Floats:
        """[engines] Requests that decode at each, or will soon."""
        return self.column("rows") + self.on_the_way()

    def on_the_way(self) -> Floats:
        """[engines] Requests that will decode there, and that its last report does not have."""
        own = self.column("planned") + self.column("placed_rows")
        return own / self.fleet_rates.share


class EngineRow:
    """One engine's numbers."""

    def __init__(self, table: EngineTable, key: str, at: int) -> None:
        self.key = key
        self.at = at
        self._table = table
        self._steps = LearnedRates(STEP_PRIOR, OWN_PRIOR_S)
        self._trips = LearnedRates(TRIP_PRIOR, OWN_PRIOR_S)
        self._last: SchedulerStats | None = None

    def __getitem__(self, name: str) -> float:
        return float(self._table.columns[_PLACE_OF[name], self.at])

    def __setitem__(self, name: str, value: float) -> None:
        self._table.columns[_PLACE_OF[name], self.at] = value

    def plan(self, more: int) -> None:
        """Requests that will decode there are planned, or, if negative, arrive: they count until
        the next report has them."""
        self["planned"] += more
        if more < 0:
            self["placed_rows"] -= more

    def place(self, tokens: float) -> None:
        """A request goes there, with so many tokens of its prompt to compute."""
        self["placed_tokens"] += tokens
        self._table.fleet_rates.placed(tokens)

    def restarted(self) -> None:
        """Another process answers there, whose totals begin anew."""
        self._last = None

    def report(self, stats: SchedulerStats, now: float) -> None:
        """The engine says how it is, as of `now`."""
        size = float(self._table.columns[_BLOCK_SIZE, self.at])
        rows = stats.num_running + stats.num_waiting + stats.num_waiting_for_remote_kv
        free, total = stats.blocks_free * size, stats.blocks_total * size
        told = (stats.queued_prompt_tokens, rows, 0.0, 0.0, free, total, now)
        self._table.columns[_REPORTED, self.at] = told
        last, self._last = self._last, stats
        if last is not None:
            self._learn_from(last, stats, size)

    def _learn_from(self, last: SchedulerStats, stats: SchedulerStats, size: float) -> None:
        fleet = self._table.fleet_rates
        steps = (
            stats.steps - last.steps,
            stats.prompt_tokens_computed - last.prompt_tokens_computed,
            stats.tokens_generated - last.tokens_generated,
        )
        fleet.computed(steps[1])
        seconds = stats.seconds_stepping - last.seconds_stepping
        if steps[0] > 0 and seconds > 0:
            fleet.saw_steps(steps, seconds)
            self._steps.saw(steps, seconds, fleet.steps.rates)
        before, after = last.kv_transfer, stats.kv_transfer
        if before is not None and after is not None:
            blocks = after.blocks_received - before.blocks_received
            trips = (after.loads_completed - before.loads_completed, blocks * size)
            seconds = after.seconds_receiving - before.seconds_receiving
            if trips[0] > 0 and seconds > 0:
                fleet.saw_trips(trips, seconds)
                self._trips.saw(trips, seconds, fleet.trips.rates)
        if stats.steps != last.steps:
            self.learn()

    def learn(self) -> None:
        """Take over what was learned; of an engine that has told nothing, what others have."""
        fleet = self._table.fleet_rates
        own_steps = self._steps if self._steps.told else fleet.steps
        own_trips = self._trips if self._trips.told else fleet.trips
        self._table.columns[_STEP_RATES, self.at] = own_steps.rates
        self._table.columns[_TRIP_RATES, self.at] = own_trips.rates


_PLACE_OF: Final = {name: place for place, name in enumerate(FIELDS)}
_BLOCK_SIZE: Final = _PLACE_OF["block_size"]
_REPORTED: Final = [
    _PLACE_OF[name]
    for name in (
        "queued", "rows", "placed_tokens", "placed_rows", "free_tokens", "all_tokens",
        "reported_at",
    )
]  # fmt: skip
_STEP_RATES: Final = [_PLACE_OF[name] for name in ("step_s", "prompt_token_s", "row_s")]
_TRIP_RATES: Final = [_PLACE_OF[name] for name in ("trip_s", "trip_token_s")]
