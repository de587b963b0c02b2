"""The event loop: requests, routers, pods and hand-offs in virtual time.

A request's way is that of docs/architecture.md: a router chooses a pair with the product's own
policy, P computes the prompt and the first token, D takes the KV over and generates the rest. P's
blocks stay pinned until D has read them, so a decode pool that is full holds up the prefill pool.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from diptych.simulator.engine import Sequence as Row
from diptych.simulator.metrics import Log
from diptych.simulator.plan import (
    Job,
    Pod,
    SimulatedService,
    expected_news,
    prefix_news,
    statistics,
)
from diptych.simulator.routing import Router, WouldBeLate
from diptych.simulator.workload import Request
from diptych_protocol.wire import Heartbeat
from diptych_router.choosing.roles import OTHER, Watch
from diptych_router.engines.engine_table import Role
from diptych_router.requests.pools.pools import ROLES_INTERVAL_S

REPORT_S = 0.25
"""Seconds between two reports of a pod that has work, as of an engine."""


class Simulation:
    """One run. Everything follows from the plan and the requests: what is drawn, is
    drawn from seeds."""

    def __init__(self, plan: SimulatedService) -> None:
        self.plan = plan
        self.now = 0.0
        self.events = 0
        self.log = Log()
        roles: dict[Role, Any] = {"prefill": plan.prefill, "decode": plan.decode}
        self.pods = {
            f"{role}-{number}": Pod(
                f"{role}-{number}", role, pool, [0] * plan.routers, number % plan.zones.number
            )
            for role, pool in roles.items()
            for number in range(pool.pods)
        }
        self.routers = [
            Router(plan, list(self.pods.values()), seed) for seed in range(plan.routers)
        ]
        self._home: dict[str, Role] = {key: pod.role for key, pod in self.pods.items()}
        self._turns = count()
        self._order = count()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._waiting: deque[Request] = deque()
        self._open: dict[Job, None] = {}

    def run(
        self, requests: Iterable[Request], failures: Sequence[tuple[float, Sequence[str]]] = ()
    ) -> Log:
        """Until every request has ended. `failures`: when which pods are lost, by their keys."""
        for request in requests:
            if request.waits:
                self._waiting.append(request)
            else:
                self._at(request.arrival, self._arrive, request)
        for time, keys in failures:
            self._at(time, self._fail, keys)
        if self.routers[0].roles is not None:
            self._at(0.0, self._look_at_roles, self.routers[0].roles)
        while self._queue:
            self.now, _, call, args = heapq.heappop(self._queue)
            call(*args)
            self.events += 1
        self.log.unanswered += [job.arrival for job in self._open]
        self.log.busy_s = {key: pod.busy_s for key, pod in self.pods.items()}
        self.log.preemptions = sum(pod.engine.preemptions for pod in self.pods.values())
        self.log.cached_tokens = sum(pod.engine.cached_tokens for pod in self.pods.values())
        return self.log

    def _at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._queue, (time, next(self._order), call, args))

    # --- routers ------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        if request.prompt + request.output > self.plan.room_tokens:
            self.log.unanswered.append(self.now)
            self._send_waiting()
            return
        job = Job(request, self.now, next(self._turns) % self.plan.routers)
        self._open[job] = None
        self._begin(job)

    def _begin(self, job: Job) -> None:
        """Start an attempt with what is known so far; without any engine left, wait for ever."""
        try:
            decision = self.routers[job.router].choose(
                job.request, self.now, arrives=job.attempts == 0
            )
        except WouldBeLate:
            self.log.refused.append(job.arrival)
            del self._open[job]
            self._send_waiting()
            return
        job.expected = self.routers[job.router].expected if job.attempts == 0 else None
        job.attempts += 1
        if decision is None:
            return
        request, known = job.request, job.request.prompt + job.generated
        left = request.output - job.generated
        taker = self.pods[decision.decode]
        job.at = self.pods[decision.prefill] if decision.prefill else taker
        job.taker = taker if job.at is not taker else None
        first = 1 if job.taker else left
        row = Row(known, first, lends=bool(job.taker) and left > 1, owner=job)
        row.chain = request.chain
        job.sequence, job.coming = row, None
        job.source = self.pods[decision.fetch] if decision.fetch else None
        row.remote = min(decision.fetch_tokens, known - 1) if job.source else 0
        row.computed = request.cached
        self._charge(job, known, job.at, job.taker)
        self._plan(job, job.taker)
        self.routers[job.router].rows[job.at.key].sent(self.now)
        self._at(self.now + self.plan.overheads.request_s, self._add, job, row)

    def _charge(self, job: Job, tokens: int, *pods: Pod | None) -> None:
        """Put a request to the accounts of these engines, and of nobody else."""
        rows = self.routers[job.router].rows
        for key, charged in job.charges:
            rows[key].charge(-charged)
        job.charges = [(pod.key, tokens) for pod in pods if pod is not None]
        for key, charged in job.charges:
            rows[key].charge(charged)

    def _plan(self, job: Job, taker: Pod | None) -> None:
        """This engine, and no other, is planned to take over."""
        rows = self.routers[job.router].rows
        if job.planned is not None:
            rows[job.planned].charge(0, planned=-1)
        job.planned = None if taker is None else taker.key
        if job.planned is not None:
            rows[job.planned].charge(0, planned=1)

    def _add(self, job: Job, row: Row) -> None:
        """A request reaches its engine, and the announcement the one after it."""
        if job.sequence is not row or job.at is None:
            return
        if row.lends and job.taker is not None:
            left = row.known + 1, job.request.output - job.generated - 1
            coming = Row(*left, remote=row.known, owner=job)
            coming.chain = row.chain
            if job.taker.alive and job.taker.engine.reserve(coming):
                job.coming = coming
        job.at.received[job.router] += 1
        job.at.engine.add(row)
        if len(self.routers) > 1 and not row.remote and self.plan.policy.reads_prefixes:
            news = expected_news(job.at, job.request)
            for router in self.routers:
                router.hear_prefixes(job.at, news)
        self._wake(job.at)

    def _hand_over(self, job: Job, lent: Row) -> None:
        """P has answered: the request goes to D, where the KV is already or is ordered."""
        accounts, lender, taker = self.routers[job.router], job.at, job.taker
        if taker is None or taker.role != "decode" or not accounts.rows[taker.key]["usable"]:
            if job.coming is not None and taker is not None and taker.alive:
                taker.engine.forgo(job.coming)
            successor = accounts.successor(self.now)
            taker, job.coming = (self.pods[successor] if successor else None), None
        job.generated += lent.generated
        job.lender, job.lent = lender, lent
        job.at, job.taker = taker, None
        if taker is None:
            return  # no decode engine is left
        self._charge(job, job.request.prompt + job.generated, taker)
        self._plan(job, None)
        accounts.rows[taker.key].sent(self.now)
        job.lent_at = self.now
        relay = self.plan.overheads.hand_off_s / 2
        row, job.coming = job.coming, None
        if row is not None and taker.engine.claim(row):
            job.sequence = row
            taker.received[job.router] += 1
            lacking = max(0, lent.prompt - row.computed)
            share = min(lacking, self.plan.prefill.limits.max_num_batched_tokens)
            self._at(self.now + relay, self._move, job, row, share)
            return
        left = job.request.output - job.generated
        row = Row(lent.known, left, remote=lent.known - 1, owner=job)
        row.chain = lent.chain
        job.sequence = row
        self._at(self.now + relay, self._add, job, row)

    # --- the network --------------------------------------------------------------------------

    def _move(self, job: Job, row: Row, tokens: int) -> None:
        """Move the KV of so many tokens now. What had gone before, while P computed, is put to the
        account of both pods' links afterwards."""
        lender, taker = job.lender, job.at
        if job.sequence is not row or lender is None or taker is None or job.lent is None:
            return
        seconds, way_s = self.plan.overheads.kv_token_s, self.plan.token_s(lender, taker)
        begins = max(self.now, lender.link_free, taker.link_free)
        before = max(0, job.lent.prompt - row.computed - tokens) if row.early else 0
        # A slow way between two zones does not keep the pods' own links busy any longer.
        lender.link_free = taker.link_free = begins + (tokens + before) * seconds
        done = begins + tokens * way_s
        self._at(done + self.plan.overheads.hand_off_s / 2, self._loaded, job, row)

    def _fetch(self, job: Job, row: Row) -> None:
        """Before it computes a prompt, an engine gets what another one has of it."""
        source, taker, job.source = job.source, job.at, None
        if source is None or taker is None:
            return
        size = source.pool.limits.block_size
        has = source.engine.prefixes.find(row.chain, row.remote // size)[0] * size
        row.remote = max(has if source.alive else 0, row.computed)
        tokens = row.remote - row.computed
        begins = max(self.now, source.link_free, taker.link_free)
        source.link_free = taker.link_free = begins + tokens * self.plan.overheads.kv_token_s
        done = begins + tokens * self.plan.token_s(source, taker) + self.plan.overheads.hand_off_s
        self._at(done, self._fetched, job, row, source.key, self.now, tokens)

    def _fetched(self, job: Job, row: Row, source: str, asked_at: float, tokens: int) -> None:
        """What another engine had of the prompt is here; the rest is computed."""
        taker = job.at
        if job.sequence is not row or taker is None or not taker.alive:
            return
        taker.saw_load(source, tokens, self.now - asked_at)
        taker.engine.cached_tokens += row.remote
        row.cached = row.remote
        taker.engine.received(row)
        self._wake(taker)

    def _loaded(self, job: Job, row: Row) -> None:
        """D has the KV, and P need not keep it."""
        taker = job.at
        if job.sequence is not row or taker is None or not taker.alive:
            return
        if job.lender is not None:
            job.loaded_s, job.far = self.now - job.lent_at, job.lender.zone != taker.zone
            taker.saw_load(job.lender.key, row.remote - row.computed, job.loaded_s)
        self._free_lent(job)
        taker.engine.received(row)
        self._wake(taker)

    def _free_lent(self, job: Job) -> None:
        lender, lent, job.lender, job.lent = job.lender, job.lent, None, None
        if lender is not None and lent is not None and lender.alive:
            lender.engine.release(lent)
            self._wake(lender)

    # --- steps --------------------------------------------------------------------------------

    def _wake(self, pod: Pod) -> None:
        if pod.busy or not pod.alive:
            return
        engine = pod.engine
        shape = engine.begin()
        if engine.victims:
            for victim in engine.victims:
                _job_of(victim).last_at = pod.last_end
            engine.victims = []
        if engine.loads:
            loads, engine.loads = engine.loads, []
            for row in loads:
                job = _job_of(row)
                if job.source is not None:
                    self._fetch(job, row)
                else:
                    self._move(job, row, row.remote - row.computed)
        if shape is None:
            return
        pod.busy, pod.pace = True, 1.0
        pod.began = pod.since = self.now
        pod.work_left = pod.pool.cost.seconds(shape) + self.plan.overheads.step_s
        if self.plan.one_machine:
            self._share_cores()
        else:
            self._at(self.now + pod.work_left, self._end, pod, pod.turn)

    def _share_cores(self) -> None:
        """Who computes has begun or ended: the others go on at another pace."""
        busy = [pod for pod in self.pods.values() if pod.busy]
        for pod in busy:
            pod.work_left -= (self.now - pod.since) / pod.pace
            pod.since, pod.turn = self.now, pod.turn + 1
            pod.pace = 1.0 + (pod.pool.slowdown - 1.0) * (len(busy) - 1)
            self._at(self.now + pod.work_left * pod.pace, self._end, pod, pod.turn)

    def _end(self, pod: Pod, turn: int) -> None:
        if pod.turn != turn or not pod.alive:
            return
        pod.busy = False
        pod.busy_s += self.now - pod.began
        pod.turn += 1
        result = pod.engine.end()
        self.log.saw_gaps(self.now, self.now - pod.last_end, result.steady_rows)
        pod.last_end = self.now
        for row in result.sampled:
            job = _job_of(row)
            if job.first_at < 0:
                job.first_at = self.now
                took_s = self.now - job.arrival
                self.routers[job.router].saw_first(job.expected, took_s)
            else:
                self.log.saw_gaps(self.now, self.now - job.last_at, 1)
            job.last_at = self.now
        for row in result.finished:
            job = _job_of(row)
            if row.lends:
                self._hand_over(job, row)
            else:
                self._finish(job)
        if pod.role == "prefill":
            self._move_streams(pod)
        self._report(pod)
        self._wake(pod)
        if self.plan.one_machine and not pod.busy:
            self._share_cores()

    def _report(self, pod: Pod) -> None:
        """A pod tells routers how it is, now and then, and when it has nothing more to do."""
        if not self.plan.policy.compares_duties:
            return  # policies that count only what the router itself has placed read no reports
        idle = not pod.engine.running and not pod.engine.waiting
        due = idle or self.now >= pod.report_at
        news = prefix_news(pod) if pod.engine.prefixes.changed else None
        stats = statistics(pod, moves=self.plan.zones.moves_told) if due else None
        if due:
            pod.report_at = self.now + REPORT_S
        if stats is None and news is None:
            return
        beat = Heartbeat(1.0, followers=len(self.routers), requests=sum(pod.received))
        for number, (router, received) in enumerate(zip(self.routers, pod.received, strict=True)):
            beat.follower = number
            router.hear(pod, stats, beat, received, news, self.now)

    def _finish(self, job: Job) -> None:
        self.routers[job.router].saw_end(job.request.output)
        job.ended_at = job.last_at = self.now
        self._charge(job, 0)
        del self._open[job]
        self.log.jobs.append(job)
        self._send_waiting()

    def _send_waiting(self) -> None:
        """A user has the answer, and another request comes."""
        if self._waiting:
            request = self._waiting.popleft()
            self._at(max(self.now, request.arrival), self._arrive, request)

    # --- roles --------------------------------------------------------------------------------

    def _look_at_roles(self, roles: Watch) -> None:
        """Have a pod turn, as long as there is something to do."""
        key = roles.due(self._home, self.now)
        if key is not None:
            pod = self.pods[key]
            pod.role = OTHER[pod.role]
            for router in self.routers:
                router.turned(key, pod.role, self.now)
            self.log.turns.append((self.now, key, pod.role))
            if pod.role == "prefill" and not pod.busy:
                self._move_streams(pod)
        if self._queue:
            self._at(self.now + ROLES_INTERVAL_S, self._look_at_roles, roles)

    def _move_streams(self, pod: Pod) -> None:
        """What a prefill pod decodes goes to others, with its KV."""
        if not pod.engine.rows:
            return
        for job in [job for job in self._open if job.at is pod]:
            row = job.sequence
            if row is not None and row.row_since >= 0 and not row.lends:
                pod.engine.hand_off(row)
                job.last_at = self.now
                self._hand_over(job, row)

    # --- losses -------------------------------------------------------------------------------

    def _fail(self, keys: Sequence[str]) -> None:
        """These pods are gone; routers find out a little later."""
        for key in keys:
            self.pods[key].alive = self.pods[key].busy = False
        self._at(self.now + self.plan.detection_s, self._miss, keys)

    def _miss(self, keys: Sequence[str]) -> None:
        """Routers take pods for lost: what was there begins again elsewhere."""
        for accounts in self.routers:
            for key in keys:
                accounts.rows[key]["usable"] = False
        lost = {self.pods[key] for key in keys}
        for job in list(self._open):
            unread = job.lender in lost
            if job.at in lost or unread:
                self._restart(job)

    def _restart(self, job: Job) -> None:
        """Prompt and tokens so far go to another pair; the user's stream goes on."""
        if job.sequence is not None and job.at is not None:
            job.generated += job.at.engine.tokens_of(job.sequence)
            job.at.engine.loading.discard(job.sequence)
            if job.last_at >= 0:
                job.last_at = max(job.last_at, job.at.last_end)
        if job.coming is not None and job.taker is not None and job.taker.alive:
            job.taker.engine.forgo(job.coming)
        if job.lender is not None and job.lender.alive:
            self._free_lent(job)
        job.lender = job.lent = None
        self._plan(job, None)
        self._begin(job)


def _job_of(row: Row) -> Job:
    if not isinstance(row.owner, Job):
        raise RuntimeError("a sequence that belongs to no request")
    return row.owner
