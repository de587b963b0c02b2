"""The engines of one pool as columns of numbers, so that a decision looks at all of them at once.

Each engine has a row. Its numbers change when the engine reports, and when this router gives it
work, so nothing has to be gathered when a request comes. The caller passes the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diptych_protocol import KVTransferStats, SchedulerStats
from diptych_protocol.engine_stats import MAX_MOVES_TOLD
from diptych_protocol.wire import Heartbeat
from diptych_router.engines.known_prefixes import MAX_ADAPTERS
from diptych_router.engines.learned_rates import LearnedRates
from diptych_router.engines.pair_rates import PairRates
from diptych_router.engines.router_share import RouterShare

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

STEP_PRIOR: Final = (5e-3, 1e-4, 1e-4)
"""The expected seconds, for an engine without reports, of a step, of each prompt token in it, and
of each generating row in it."""
TRIP_PRIOR: Final = (5e-3, 5e-6)
"""The expected seconds that a request waits for a hand-off, and for each token of its KV."""
READ_PRIOR: Final = (5e-3, 5e-5)
"""The expected seconds that a request waits for a disk, and for each token of its KV."""
ADAPTER_PRIOR: Final = (0.2,)
"""The expected seconds to load an adapter."""
FLEET_PRIOR_S: Final = 1e-4
OWN_PRIOR_S: Final = 2.0
"""What is expected of the fleet, or of one engine, counts as this many seconds of work."""
WINDOW_S: Final = 10.0
"""For `prompt_load`, what was computed this long ago counts 1/e of what is computed now."""
MOST_LOAD: Final = 0.9
"""A pool that spends a larger part of its time on prompts counts as fully loaded."""
EXPECTED_S: Final = 10.0
"""How long an adapter that was sent for counts as loaded, whatever the engine reports."""
MOST_UNHEARD: Final = 256
UNHEARD_S: Final = 5.0
"""How long requests count that an engine was given and that no report of it includes yet."""
FIELDS: Final = (
    "usable", "silent", "lends", "fingerprint", "block_size", "processors", "processors_part",
    "open_tokens", "given",
    "free_at", "rows", "coming", "free_tokens", "used_tokens",
    "step_s", "prompt_token_s", "row_s", "trip_s", "trip_token_s", "told_steps", "told_trips",
    "adapter_s", "told_adapters", "read_s", "read_token_s", "told_reads",
    "unheard_s", "home", "others",
)  # fmt: skip
"""`free_tokens` is infinite for an engine that has not reported its KV memory, so that it never
seems full; `used_tokens` is at least 1. `unheard_s`: seconds of prompts that this router gave it
and no report includes yet. `home` and `others`: see `RouterShare.homes`. `processors` and
`processors_part`: as in `EngineDescription`."""
SELDOM: Final = frozenset({"usable", "silent", "lends", "fingerprint", "block_size"})
"""Fields that change only when an engine comes, goes or hangs."""


RATES: Final[Mapping[str, tuple[Sequence[float], Sequence[str]]]] = {
    "told_steps": (STEP_PRIOR, ("step_s", "prompt_token_s", "row_s")),
    "told_trips": (TRIP_PRIOR, ("trip_s", "trip_token_s")),
    "told_adapters": (ADAPTER_PRIOR, ("adapter_s",)),
    "told_reads": (READ_PRIOR, ("read_s", "read_token_s")),
}
"""What is learned from reports: the rates that are expected, and their columns. By the column that
says which engines have reported any such work."""


def _unlearned(prior_s: float) -> dict[str, LearnedRates]:
    return {kind: LearnedRates(prior, prior_s) for kind, (prior, _) in RATES.items()}


class EngineTable:
    """The rows of one pool, in no particular order."""

    def __init__(self, pairs: PairRates | None = None) -> None:
        """pairs: learns from what these engines report of moves of KV to them."""
        self.fleet_rates = _unlearned(FLEET_PRIOR_S)
        """Learned from all engines' reports, and used for one that has reported little."""
        self.pairs = pairs
        self.rows: list[EngineRow] = []
        self.places: NDArray[np.intp] = np.zeros(0, np.intp)
        """[engines] Which bit each is in what `KnownPrefixes.match` returns."""
        self.identities: NDArray[np.uint64] = np.zeros(0, np.uint64)
        """[engines] Numbers that all routers know these engines by."""
        self._prompt_s = 0.0
        self._prompt_s_at = 0.0
        self.prompt_seconds = 0.0
        """Seconds that engines have computed prompts for while they were here."""
        self.tokens_generated = 0
        """By engines while they were here."""
        self.share = RouterShare()
        self._set_columns(np.zeros((len(FIELDS), 0)))

    def __len__(self) -> int:
        return len(self.rows)

    def _set_columns(self, columns: Floats) -> None:
        self.columns = columns
        self.column: Mapping[str, Floats] = dict(zip(FIELDS, columns, strict=True))
        """By names, see `FIELDS`: [engines]."""
        self.seldom_changed()

    @property
    def trips(self) -> Floats:
        """[2, engines] Seconds for a move to each engine, and for a token in it, whoever sends."""
        both: Floats = self.columns[_TRIP_S : _TRIP_S + 2]
        return both

    @cached_property
    def eligibility(self) -> Eligibility:
        """The columns that change seldom, and so are not gathered for each decision."""
        return Eligibility.of(self.column, self.places)

    def seldom_changed(self) -> None:
        """One of `SELDOM` has: what follows from them is to be found anew."""
        self.__dict__.pop("eligibility", None)

    def add(self, key: str, place: int) -> EngineRow:
        """Add an engine. It counts as having got as much as those that got most."""
        row = EngineRow(self, key)
        self.admit(row, place, np.zeros(len(FIELDS)))
        row["block_size"], row["free_tokens"], row["used_tokens"] = 1.0, math.inf, 1.0
        self.share_rates()
        return row

    def admit(self, row: EngineRow, place: int, numbers: Floats) -> None:
        """Take in a row that no table has. numbers: [fields] its own, as in another table."""
        most = self.column["given"].max(initial=0.0)
        row.table, row.at = self, len(self.rows)
        self.rows.append(row)
        self._set_columns(np.column_stack((self.columns, numbers)))
        self.places = np.append(self.places, place)
        identity = int.from_bytes(blake2b(row.key.encode(), digest_size=8).digest())
        self.identities = np.append(self.identities, np.uint64(identity))
        row["given"] = most
        self.find_homes()

    def remove(self, row: EngineRow) -> None:
        self._set_columns(np.delete(self.columns, row.at, axis=1))
        self.places = np.delete(self.places, row.at)
        self.identities = np.delete(self.identities, row.at)
        # Whoever explains an earlier choice has the rows of that time.
        self.rows = [other for other in self.rows if other is not row]
        for at, other in enumerate(self.rows):
            other.at = at
        self.find_homes()

    def find_homes(self) -> None:
        """Divide the engines among as many routers as they say that there are."""
        self.share.told(row.routers for row in self.rows)
        self.column["home"][:], self.column["others"][:] = self.share.homes(self.identities)

    def given_by_others(self) -> Floats:
        """[engines] Seconds of prompts that the other routers have probably given to engines, and
        no report includes yet: as many as this router gave to its own."""
        home, unheard, others = (self.column[name] for name in ("home", "unheard_s", "others"))
        given: Floats = float(home @ unheard) / home.sum() * self.share.of_another * others
        return given

    def waits(self, now: float) -> Floats:
        """[engines] Seconds until each has computed all prompts that it has."""
        waits: Floats = np.maximum(self.column["free_at"] - now, 0.0)
        return waits + self.given_by_others() if self.share.of_another else waits

    def preferred(self, among: NDArray[np.intp], tie: int) -> int:
        """Return the one of some engines that a number prefers. Different numbers prefer different
        engines, and all routers agree (rendezvous hashing, Thaler and Ravishankar 1998)."""
        scores = (self.identities[among] ^ np.uint64(tie)) * _MIX
        scores ^= scores >> _HALF
        scores *= _MIX
        return int(among[scores.argmax()])

    def share_rates(self) -> None:
        """Give engines without reports the rates of the others."""
        for kind, learned in self.fleet_rates.items():
            silent = (self.column[kind] == 0).nonzero()[0]
            if len(silent):
                self.columns[np.ix_(_RATES_AT[kind], silent)] = learned.rates[:, np.newaxis]

    def prompt_load(self, now: float) -> float:
        """The share of their time, 0 to `MOST_LOAD`, in which these engines compute prompts."""
        if not self.rows:
            return 0.0
        seconds = self._prompt_s * math.exp(min(0.0, self._prompt_s_at - now) / WINDOW_S)
        return min(seconds / (WINDOW_S * len(self.rows)), MOST_LOAD)

    def computed(self, seconds: float, now: float) -> None:
        """Record that an engine has computed prompts for this long."""
        self._prompt_s *= math.exp(min(0.0, self._prompt_s_at - now) / WINDOW_S)
        self._prompt_s += seconds
        self.prompt_seconds += seconds
        self._prompt_s_at = max(now, self._prompt_s_at)


class Eligibility(NamedTuple):
    """What follows from the columns that change seldom. The arrays are [engines], read-only."""

    barred: Floats
    """0 for engines that may get requests, infinity for the others."""
    barred_or_silent: Floats
    """The same, but infinity also for engines that may hang."""
    lends: dict[float, int]
    """By fingerprint, of which there is mostly one: the engines from which a prefix can be fetched,
    as the bits of their places. Engines that may hang do not lend."""
    block_sizes: list[float]
    fingerprints: list[float]

    @classmethod
    def of(cls, column: Mapping[str, Floats], places: NDArray[np.intp]) -> Eligibility:
        """places: see `EngineTable`."""
        usable, lively = column["usable"] > 0, column["silent"] == 0
        lends, kinds = (column["lends"] > 0) & lively, column["fingerprint"]
        fingerprints = np.unique(kinds).tolist()
        return cls(
            np.where(usable, 0.0, np.inf),
            np.where(usable & lively, 0.0, np.inf),
            {
                kind: sum(1 << place for place in places[lends & (kinds == kind)].tolist())
                for kind in fingerprints
            },
            np.unique(column["block_size"]).tolist(),
            fingerprints,
        )


class _Unheard(NamedTuple):
    number: int
    """Which one it is of those sent there."""
    seconds: float
    """How long its prompt takes there."""
    at: float
    tokens: float = 0.0
    """Those of its prompt that are to be computed there."""
    tenant: str = ""


class LoadedAdapters:
    """Which adapters an engine has loaded: by its reports, and by what was just sent to it.

    An engine loads an adapter when its first request is scheduled. Until it reports that, it counts
    as having what such a request was sent for, so that a burst of them stays together.
    """

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()
        self._expected: dict[str, float] = {}
        """Until when each counts as loaded."""

    def tell(self, names: Collection[str], now: float) -> None:
        self._told = frozenset(names if len(names) <= MAX_ADAPTERS else ())
        if self._expected:
            self._expected = {name: end for name, end in self._expected.items() if end > now}

    def expect(self, name: str, now: float) -> None:
        """Record that a request with this adapter goes there."""
        if name in self._expected or len(self._expected) < MAX_ADAPTERS:
            self._expected[name] = now + EXPECTED_S

    def has(self, name: str, now: float) -> bool:
        return name in self._told or self._expected.get(name, now) > now


class EngineRow:
    """One engine's numbers."""

    def __init__(self, table: EngineTable, key: str) -> None:
        self.key = key
        self.table = table
        self.at = -1
        self._rates = _unlearned(OWN_PRIOR_S)
        self.routers = 1, 0
        """Its last word of how many routers there are, and which one of them this is."""
        self.num_planned = 0
        """Requests that are to decode here, once another engine has computed their prompts."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        """What a process that answers there has told and been given: nothing yet."""
        self.adapters = LoadedAdapters()
        self._last: SchedulerStats | None = None
        self._last_move = 0
        """Number of the newest move of KV that it has told."""
        self.num_sent = 0
        """Requests sent over this connection."""
        self._unheard: deque[_Unheard] = deque(maxlen=MOST_UNHEARD)
        """Requests given to it that no report has counted yet."""
        self._num_received = self._num_of_all = 0
        """Requests that the engine had from this router, and from all, by its last word."""

    def __getitem__(self, name: str) -> float:
        return float(self.table.column[name][self.at])

    def __setitem__(self, name: str, value: float) -> None:
        column = self.table.column[name]
        if name in SELDOM and column[self.at] != value:
            self.table.seldom_changed()
        column[self.at] = value

    @property
    def last(self) -> SchedulerStats:
        """Its last report."""
        return self._last or SchedulerStats()

    def charge(self, tokens: int, planned: int = 0) -> None:
        column, at = self.table.column, self.at
        column["open_tokens"][at] += tokens
        if planned:
            self.num_planned += planned
            column["coming"][at] = self.num_planned + len(self._unheard)

    def queue(self) -> tuple[int, dict[str, int]]:
        """Return the prompt tokens that wait there, by all that is known: in total, by tenant."""
        queued, of_tenants = 0, dict[str, int]()
        if self._last is not None:
            queued = self._last.queued_prompt_tokens
            of_tenants.update(self._last.queued_tokens_of)
        for request in self._unheard:
            queued += int(request.tokens)
            of_tenants[request.tenant] = of_tenants.get(request.tenant, 0) + int(request.tokens)
        return queued, of_tenants

    def place(self, tokens: float, now: float, tenant: str = "") -> None:
        """Record that a request goes there next, with this many tokens of its prompt to compute."""
        column, at = self.table.column, self.at
        seconds = tokens * float(column["prompt_token_s"][at])
        self._unheard.append(_Unheard(self.num_sent + 1, seconds, now, tokens, tenant))
        column["free_at"][at] = max(float(column["free_at"][at]), now) + seconds
        column["unheard_s"][at] += seconds
        column["coming"][at] = self.num_planned + len(self._unheard)

    def sent(self, now: float) -> None:
        """Record that a request was sent: the one placed last, or one with nothing to compute."""
        self.num_sent += 1
        if not self._unheard or self._unheard[-1].number != self.num_sent:
            self._unheard.append(_Unheard(self.num_sent, 0.0, now))
            self.table.column["coming"][self.at] = self.num_planned + len(self._unheard)

    def restarted(self) -> None:
        """Record that another process answers there, whose totals begin at zero."""
        self._begin_anew()
        self["unheard_s"] = 0.0

    def report(self, stats: SchedulerStats, num_received: int, now: float) -> None:
        """Apply the engine's report. It includes this many of the requests sent to it."""
        while self._unheard and (
            self._unheard[0].number <= num_received or self._unheard[0].at < now - UNHEARD_S
        ):
            self._unheard.popleft()
        column, at = self.table.column, self.at
        size = self["block_size"]
        queued_s = stats.queued_prompt_tokens * self["prompt_token_s"]
        unheard_s = column["unheard_s"][at] = sum(request.seconds for request in self._unheard)
        used = (stats.blocks_total - stats.blocks_free) * size
        column["free_at"][at] = now + queued_s + unheard_s
        column["rows"][at] = stats.num_running + stats.num_waiting + stats.num_waiting_for_remote_kv
        column["coming"][at] = self.num_planned + len(self._unheard)
        column["free_tokens"][at] = stats.blocks_free * size if stats.blocks_total else math.inf
        column["used_tokens"][at] = max(1.0, used)
        last, self._last = self._last, stats
        if last is not None:
            self._learn_from(last, stats, size, now)
        pairs = self.table.pairs
        if pairs is not None and stats.kv_transfer is not None:
            told = stats.kv_transfer.newest_moves[-MAX_MOVES_TOLD:]
            new = [move for move in told if move.number > self._last_move]
            self._last_move = max((move.number for move in new), default=self._last_move)
            pairs.saw(self.at, new, size, self.table.trips, now)

    def heard(self, heartbeat: Heartbeat, num_received: int, now: float) -> None:
        """Apply what it says of routers. It has received this many requests of this one."""
        former, self.routers = self.routers, (heartbeat.followers, heartbeat.follower)
        if self.routers != former:
            self.table.find_homes()
        if heartbeat.requests:
            own, of_all = num_received - self._num_received, heartbeat.requests - self._num_of_all
            if self._num_of_all:  # else these may be from long before
                self.table.share.received(own, of_all - own, now)
            self._num_received, self._num_of_all = num_received, heartbeat.requests

    def _learn_from(
        self, last: SchedulerStats, stats: SchedulerStats, size: float, now: float
    ) -> None:
        steps = (
            stats.steps - last.steps,
            stats.prompt_tokens_computed - last.prompt_tokens_computed,
            stats.tokens_generated - last.tokens_generated,
        )
        step_s = stats.seconds_stepping - last.seconds_stepping
        self.table.tokens_generated += max(steps[2], 0)
        if steps[0] > 0 and step_s > 0:
            prompt_s = steps[1] * self["prompt_token_s"]
            self.table.computed(min(max(prompt_s, 0.0), step_s), now)
        after = stats.kv_transfer or KVTransferStats()
        before = last.kv_transfer or after
        trips = (
            after.loads_completed - before.loads_completed
            + after.prefix_fetches_completed - before.prefix_fetches_completed,
            (after.blocks_received - before.blocks_received) * size,
        )  # fmt: skip
        trip_s = after.seconds_receiving - before.seconds_receiving
        trip_s += after.prefix_seconds - before.prefix_seconds
        loads = (stats.adapters_loaded - last.adapters_loaded,)
        load_s = stats.seconds_loading_adapters - last.seconds_loading_adapters
        reads = (
            stats.disk_reads - last.disk_reads,
            (stats.disk_blocks_read - last.disk_blocks_read) * size,
        )
        read_s = stats.seconds_reading_disk - last.seconds_reading_disk
        for kind, amounts, seconds in (
            ("told_steps", steps, step_s),
            ("told_trips", trips, trip_s),
            ("told_adapters", loads, load_s),
            ("told_reads", reads, read_s),
        ):
            own, of_all = self._rates[kind], self.table.fleet_rates[kind]
            if amounts[0] > 0 and seconds > 0:
                of_all.saw(amounts, seconds)
                own.saw(amounts, seconds, of_all.rates)
            else:
                own.saw_nothing(of_all.rates)
            if own.told:
                self[kind] = 1.0
                self.table.columns[_RATES_AT[kind], self.at] = own.rates
        if stats.steps != last.steps:
            self.table.share_rates()


_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)
_PLACE_OF: Final = {name: place for place, name in enumerate(FIELDS)}
_TRIP_S: Final = _PLACE_OF["trip_s"]
_RATES_AT: Final = {kind: [_PLACE_OF[name] for name in names] for kind, (_, names) in RATES.items()}
