"""Both pools as one router sees them: which engines there are, and which may get requests."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import zmq

from diptych_protocol import (
    UNREADABLE,
    EngineDescription,
    EngineOverloadedError,
    InvalidRequestError,
    KeptAnswer,
    RouterConfig,
    SchedulerStats,
    wire,
)
from diptych_protocol.router_settings import Serving
from diptych_protocol.wire import PrefixChanges
from diptych_router.choosing.fleet_table import FOR_A_PAIR, FleetTable
from diptych_router.choosing.policies import policy_of
from diptych_router.choosing.policy import Decision, RequestView
from diptych_router.choosing.roles import OTHER, Watch
from diptych_router.engines.discovery import Target, resolve
from diptych_router.engines.engine_link import (
    CALL_ERRORS,
    EngineLink,
    compat_mismatch,
    key_of,
)
from diptych_router.engines.engine_table import ROLES, EngineRow, Role
from diptych_router.engines.health_book import FullEngines
from diptych_router.engines.serving import RevisionShare, ServingFile
from diptych_router.requests.pools.health_watch import HealthWatch

log = logging.getLogger(__name__)

DISCOVERY_INTERVAL_S = 1.0
ROLES_INTERVAL_S = 0.2
STATS_TIMEOUT_S = 1.0
NOTIFY_TIMEOUT_S = 5.0
EXPECTED_S = 10.0
"""How long, at least, a prompt that was sent counts as cached, before its engine reports it."""

Connect = Callable[[Role, str, EngineRow, str, Callable[[], None]], EngineLink]
"""Makes an `EngineLink` of its first arguments."""


class Pools:
    """Follows discovery, `serving.json` and the engines' reports, and verifies new engines."""

    def __init__(
        self,
        config: RouterConfig,
        targets: dict[Role, list[Target]],
        connect: Connect,
        serving: Path | None,
        on_change: Callable[[], None],
    ) -> None:
        """on_change: maybe more, fewer or others are usable."""
        self.links: dict[str, EngineLink] = {}
        self.get: Callable[[str], EngineLink | None] = self.links.get
        self.had_pair = False
        """Some pair was usable at some time, or there were no engines, as intended."""
        self._usable_at = -math.inf
        """When a decode engine was last seen usable, on the monotonic clock."""
        self._config = config
        self._targets, self._connect = targets, connect
        self._name = secrets.token_hex(8)
        self._serving = ServingFile(serving)
        self.trial: RevisionShare | None = None
        """Deals a revision its share of new requests; None: each gets what it can carry."""
        self._on_change = on_change
        policy, self.refused_settings = policy_of(config)
        self.fleet = FleetTable(policy, Random().randrange, config.disaggregate)
        self.first_token, self.placed = self.fleet.first_token, self.fleet.placed
        self.turns: dict[Role, int] = dict.fromkeys(ROLES, 0)
        """How many engines have turned to each role."""
        self._follows_prefixes = policy.reads_prefixes
        self._followed: dict[str, int] = {}
        """Key -> which connection the engine was last greeted over: `EngineLink.times_up`."""
        self._age_at = 0.0
        verifies = config.verify != "Off"
        self.health = HealthWatch(
            self.links, self.usable, self.release, self.spawn, self._changed, verifies
        )
        self.canaries, self.verified = self.health.reports, self.health.verified
        self.went_badly = self.health.went_badly
        self.full = FullEngines(self._stats_of)
        """The engines that refused a request a moment ago, and have not reported room since."""
        self._late_reads: dict[str, int] = {}
        """Epoch of a prefill engine -> the late reads that it has told."""
        self._unresolved: set[Role] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        self.spawn(self._discover())
        if self._config.elastic_roles:
            self.spawn(self._follow_load())

    def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for link in self.links.values():
            link.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background, until it ends or the pools are closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_coro(), exc_info=task.exception())

    # --- who may get requests -----------------------------------------------------------------

    @property
    def serving(self) -> Serving:
        return self._serving.serving

    def of(self, role: Role) -> list[EngineLink]:
        """Return the engines of a pool that are up."""
        return [link for link in self._up() if link.role == role]

    def _up(self) -> list[EngineLink]:
        return [link for link in self.links.values() if link.up]

    def usable(self, link: EngineLink) -> bool:
        """Whether it may get new requests."""
        revisions = self.serving.revisions
        if not link.open_to_work or link.speaks_otherwise:
            return False
        if revisions and link.revision not in revisions:
            return False
        return self._config.verify != "Required" or self._trusted(link)

    def _trusted(self, link: EngineLink) -> bool:
        """Verified, as far as the service wants that, or in the place of one that was, as soon as
        it is known what is left of its KV. A decode engine that has nobody to receive KV from needs
        no proof: it will compute the prompts itself."""
        if self._config.verify != "Required" or self.verified(link):
            return True
        if self.health.trusted(link) and self.fleet.known.has_told(link.key):
            return True
        return link.role == "decode" and not any(p.open_to_work for p in self.of("prefill"))

    def may_begin_at(self, key: str) -> bool:
        link = self.links.get(key)
        return link is not None and self.usable(link) and not link.is_bad

    def choose(self, request: RequestView, full: Collection[str] = ()) -> Decision | None:
        """Do the same as `FleetTable.choose`, for the engines that are usable now. Those that
        refused a request a moment ago are tried if no other has room."""
        now = time.monotonic()
        refusing = self.full.now(now) if self.full.refusals else None
        others = self._not_of(request.revisions) if request.revisions else ()
        for left_out in (refusing.union(full), full) if refusing else (full,):
            decision = self.fleet.choose(request, now, left_out, others)
            if decision is not None and not self._holds(decision):
                self._refresh_rows()
                decision = self.fleet.choose(request, now, left_out, others)
            if decision is not None:
                return decision
        return None

    def _not_of(self, revisions: Collection[str]) -> Collection[str]:
        """Keys of the engines of other revisions. None if these have nobody left to decode: an
        answer of another revision is better than no answer."""
        able = (link for link in self.of("decode") if link.revision in revisions)
        if not any(self.usable(link) for link in able):
            return ()
        return [key for key, link in self.links.items() if link.revision not in revisions]

    def _holds(self, decision: Decision) -> bool:
        """Its engines are still usable. Whether they are is looked at when there is news."""
        for key in (decision.prefill, decision.decode):
            if key and (key not in self.links or not self.usable(self.links[key])):
                return False
        return True

    def went_well(self, *keys: str) -> None:
        now = time.monotonic()
        for key in keys:
            if (link := self.links.get(key)) is not None:
                link.breaker.well(now)

    def was_full(self, key: str) -> None:
        self.full.refused(key, time.monotonic())

    def _stats_of(self, key: str) -> SchedulerStats | None:
        link = self.links.get(key)
        return link.stats if link is not None and link.up else None

    def take_prefixes(self, link: EngineLink, changes: PrefixChanges) -> None:
        about = link.description
        most = 0 if about is None else about.num_blocks + about.num_disk_blocks
        if not self.fleet.known.take(link.key, changes, most):
            link.tell(wire.FOLLOW_PREFIXES)
        elif changes.whole and self.health.trusted(link) and not self.verified(link):
            self._changed()

    def successor(self, fingerprint: str) -> EngineLink | None:
        """A revision without new requests keeps its streams, so its engines may take over."""
        fit = [
            link.key
            for link in self.of("decode")
            if link.open_to_work and self._trusted(link) and not link.is_bad
        ]
        chosen = self.fleet.successor(fingerprint, fit, time.monotonic())
        return self.links[chosen] if chosen is not None else None

    def supported_tasks(self) -> tuple[str, ...]:
        """Return what every engine that is up can do. Raises `EngineOverloadedError` while there is
        none."""
        known = [link.description.tasks for link in self.links.values() if link.description]
        if not known:
            raise EngineOverloadedError("no engine is up that could say what it can do")
        return tuple(task for task in known[0] if all(task in tasks for tasks in known))

    def usable_engines(self) -> list[EngineDescription]:
        return [
            link.description
            for link in self.links.values()
            if link.description is not None and self.usable(link)
        ]

    def num_decoding(self) -> int:
        return sum(self.usable(link) for link in self.of("decode"))

    def draining(self) -> list[EngineLink]:
        return [link for link in self._up() if link.sheds_streams]

    def why_not_ready(self) -> str:
        """Return an empty text once a pair was usable, as long as a decode engine is; otherwise the
        reason.

        Pools that are empty on purpose are ready too, if requests may wait for them to wake up.
        """
        if self.refused_settings:
            return "; ".join(f"{each.setting}: {each.why}" for each in self.refused_settings)
        if not self.had_pair:
            return self._why_no_pair()
        if self.serving.asleep and self._config.hold_seconds > 0:
            return ""
        if not any(self.usable(link) for link in self.of("decode")):
            return self._with_mismatch("no decode engine is usable")
        return ""

    def num_routers(self) -> int:
        """Return how many routers there are, by what engines say."""
        return max(table.share.count for table in self.fleet.tables.values())

    def may_hold(self) -> bool:
        """Whether there were engines a moment ago, so that requests may wait for their return."""
        idle_s = time.monotonic() - self._usable_at
        return self.had_pair and idle_s < self._config.hold_seconds

    def _why_no_pair(self) -> str:
        missing = [role for role in ROLES if self._targets[role] and not self.of(role)]
        if missing:
            return f"no engine yet in the {' and the '.join(missing)} pool"
        failed = [report for report in self.canaries.values() if not report.ok]
        if failed:
            last = failed[-1]
            return f"no usable pair yet; {last.prefill} to {last.decode}: {last.error}"
        return self._with_mismatch("no usable pair yet")

    def _with_mismatch(self, reason: str) -> str:
        """A reason, and why no two engines that are up fit together, or with this router, if so."""
        for link in self.links.values():
            if link.up and link.speaks_otherwise:
                return f"{reason}; {link.name} has a model of another tokenizer than this router's"
        prefill, decode = ([x.description for x in self.of(r) if x.description] for r in ROLES)
        found = compat_mismatch(prefill, decode)
        return f"{reason}; {found}" if found else reason

    # --- discovery ----------------------------------------------------------------------------

    async def _discover(self) -> None:
        """Follow the pools' addresses and the operator's word, for ever."""
        while True:
            try:
                await self._look()
            except Exception:  # whatever it is, the next look may be luckier
                log.exception("discovery failed")
            await asyncio.sleep(DISCOVERY_INTERVAL_S)

    async def _look(self) -> None:
        if self._serving.refresh():
            log.info("revisions that may serve: %s", self.serving)
            if not self.serving.canary:
                self.trial = None
            elif self.trial is None or self.trial.now_other(self.serving):
                self.trial = RevisionShare(self.serving)  # counts anew with each share
        found = await asyncio.gather(*(resolve(self._targets[role]) for role in ROLES))
        for role, endpoints in zip(ROLES, found, strict=True):
            if endpoints is not None:
                self._follow(role, endpoints)
                self._unresolved.discard(role)
            elif role not in self._unresolved:
                self._unresolved.add(role)
                log.warning("the %s pool's names cannot be resolved; it stays as it is", role)
        self.had_pair |= self.serving.asleep and not (self.links or self._unresolved)
        now = time.monotonic()
        if now >= self._age_at:
            self._age_at = now + EXPECTED_S
            self.fleet.known.index.age()
        self._changed()

    async def _follow_load(self) -> None:
        """Give engines the roles that promises need, and treat them as what they say, for ever."""
        slo = self._config.slo
        ttft_s, gap_s = (slo.ttft_ms or 0) / 1e3, (slo.inter_token_ms or 0) / 1e3
        watch = Watch(self.fleet, self._config.elastic_roles, ttft_s, gap_s)
        while True:
            await asyncio.sleep(ROLES_INTERVAL_S)
            now = time.monotonic()
            for link in self._up():
                if link.given != link.role:
                    self._turn(link)
                    watch.turned(link.role, now)
            homes = {key: link.home for key, link in self.links.items()}
            key = watch.due(homes, now)
            if key is not None:
                link = self.links[key]
                link.tell(wire.FOLLOW_HEARTBEAT, self._name, OTHER[link.role])

    def _turn(self, link: EngineLink) -> None:
        role = self.fleet.turn(link.key, link.description.engine_id if link.description else "")
        link.turn(role)
        self.turns[role] += 1
        self._changed()

    def _follow(self, role: Role, endpoints: set[str]) -> None:
        """Open lines to new addresses; drop those that are neither listed nor alive."""
        known = {link.endpoint: key for key, link in self.links.items() if link.home == role}
        for endpoint in endpoints - known.keys():
            row = self.fleet.add(role, key_of(role, endpoint))
            try:
                link = self._connect(role, endpoint, row, self._name, self._changed)
            except (InvalidRequestError, zmq.ZMQError) as exc:
                log.warning("cannot connect to %s: %s", endpoint, exc)
                self.fleet.remove(row.key)
                continue
            self.links[link.key] = link
        for endpoint, key in known.items():
            link = self.links[key]
            link.listed = endpoint in endpoints
            if not link.listed and not link.up:
                link.close()
                del self.links[key]
                self.fleet.remove(key)
                self._followed.pop(key, None)

    def _changed(self) -> None:
        """Something is different: verify who is new, and tell."""
        self._greet()
        self._doubt_late_readers()
        now = time.monotonic()
        self.health.look(now)
        self._refresh_rows()
        decision = self.fleet.choose(FOR_A_PAIR, now)
        if decision is not None:
            self._usable_at = now
            self.had_pair |= decision.prefill is not None or not self._targets["prefill"]
        self._on_change()

    def _doubt_late_readers(self) -> None:
        """A block that was read after its lease had ended may have been anybody's, and its answer
        looks like any other. Nobody says who has read it."""
        known, self._late_reads = self._late_reads, {}
        for link in self.links.values():
            if not link.up or not (link.role == "prefill" or link.has_turned):
                continue
            told = link.stats.kv_transfer
            count = self._late_reads[link.epoch] = 0 if told is None else told.late_reads
            if count <= known.get(link.epoch, 0):
                continue
            why = f"blocks of {link.name} were read after their lease had ended"
            log.warning("%s", why)
            for reader in self.links.values():
                reads = reader.up and (reader.role == "decode" or reader.has_turned)
                if reads and reader.fingerprint == link.fingerprint:
                    reader.tell(wire.DOUBT_KV, why)

    def _greet(self) -> None:
        """Take in who answers anew, and have it tell what it remembers."""
        for link in self.links.values():
            if link.description is not None and self._followed.get(link.key) != link.times_up:
                self._followed[link.key] = link.times_up
                engine_id = link.description.engine_id
                self.fleet.is_up(link.row, link.fingerprint, engine_id, link.location)
                if self._follows_prefixes:
                    link.tell(wire.FOLLOW_PREFIXES)

    def _refresh_rows(self) -> None:
        for link in self.links.values():
            link.row["usable"] = self.usable(link)

    # --- what all engines are asked or told ----------------------------------------------------

    async def refresh_stats(self) -> None:
        """Ask every engine for its present statistics; a silent one keeps its last ones."""
        up = self._up()
        answers = await asyncio.gather(
            *(link.refresh_stats(STATS_TIMEOUT_S) for link in up), return_exceptions=True
        )
        for link, answer in zip(up, answers, strict=True):
            if isinstance(answer, BaseException):
                log.debug("no statistics from %s: %s", link.name, answer)

    async def call_each(self, method: str, *args: Any) -> list[Any]:
        """Make a utility call to every engine that is up, one after the other. Raises what
        `CoreClient.call` raises."""
        return [await link.client.call(method, *args) for link in self._up()]

    async def find_kept(self, name: str, tenant: str) -> list[KeptAnswer]:
        """Ask every engine that is up for what it kept of an answer, all at once."""
        calls = [
            link.client.call(wire.TAKE_KEPT, name, tenant, timeout_s=NOTIFY_TIMEOUT_S)
            for link in self._up()
        ]
        found = []
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            try:
                if isinstance(answer, list):
                    found.append(msgspec.convert(answer, KeptAnswer))
            except UNREADABLE as exc:
                log.warning("an engine says what it kept in another form: %s", exc)
        return found

    def release(self, request_id: str, params: dict[str, Any]) -> None:
        """Free a lease that is not needed, without waiting for the answer."""
        if not self._closed:
            self.spawn(self.reject(request_id, params))

    async def reject(self, request_id: str, params: dict[str, Any]) -> None:
        """Free a lease. If that fails, it expires."""
        those = self._who_frees(params)
        if not those:
            log.warning("request %s: lease not released: nobody is up who can", request_id)
        for link in those:
            try:
                await link.client.call(
                    "reject_kv_transfer", request_id, params, timeout_s=NOTIFY_TIMEOUT_S
                )
            except CALL_ERRORS as exc:
                log.warning("request %s: lease not released: %s", request_id, exc)

    def _who_frees(self, params: dict[str, Any]) -> list[EngineLink]:
        """The engine that granted a lease, or one that could read its blocks."""
        owner = params.get("remote_engine_id")
        owners = [
            link
            for link in self.links.values()
            if link.description is not None and link.description.engine_id == owner
        ]
        if all(x.description is None or x.description.abilities.frees_leases for x in owners):
            return owners
        fit = (x for x in self.of("decode") if x.fingerprint == params.get("compat"))
        return sorted(fit, key=lambda link: link.is_bad)[:1]
