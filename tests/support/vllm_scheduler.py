"""Halves of vLLM's connector without vLLM: a hinge whose network is a script, and what vLLM's
scheduler demands of a connector."""

from __future__ import annotations

import enum
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from diptych_kv_transfer.connector import make_hinge
from diptych_kv_transfer.hinge_thread import Command
from diptych_kv_transfer.memory.layout import KVGroup
from diptych_kv_transfer.parameters import describe_engine
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_kv_transfer.tables.actions import (
    Action,
    Connect,
    Connected,
    ConnectFailed,
    Fence,
    LeaseEnded,
    LoadEnded,
    PeerLost,
    PrefixAsked,
    ReceiveBlocks,
    Received,
    ReceiveKey,
    Report,
    Send,
    SendBlocks,
    SendKey,
)
from diptych_kv_transfer.tables.actions import TransferEnded as Ended
from diptych_kv_transfer.tables.messages import (
    AnyMessage,
    Close,
    Closed,
    Hello,
    Open,
    Opened,
    Refused,
    Sending,
    encode,
)
from diptych_protocol import KVTransferConfig, KVTransferParams, KVTransferStats
from diptych_vllm.kv_groups import VllmKVGroups
from diptych_vllm.lending import Progress
from diptych_vllm.orders import Fetch, Lend
from diptych_vllm.ranks import Ranks, epoch_of_rank
from diptych_vllm.request import Arrival
from diptych_vllm.scheduler_half import SchedulerHalf
from diptych_vllm.transfers import Results
from diptych_vllm.worker_half import WorkerHalf

BLOCK = 4
ONE_GROUP = VllmKVGroups((KVGroup(BLOCK),))
WINDOWS = VllmKVGroups((KVGroup(BLOCK), KVGroup(BLOCK, 6), KVGroup(2, 5)))
"""Three groups: one that keeps all, and two of windows, with blocks of another size in the last."""
LEASE_SECONDS = 30.0
COMPAT: dict[str, str | int] = {"model": "m"}
PREFILL = Hello("prefill", "p1", COMPAT)
"""Another engine, which lends."""
DECODE = Hello("decode", "d1", COMPAT)
"""Another engine, which reads what is lent."""
HERE, THERE = ("127.0.0.1", 5000), ("127.0.0.1", 6000)


class ScriptedDriver:
    """A real hinge, each of whose peers does what a test says."""

    wake_fd = -1
    port = HERE[1]

    def __init__(self, me: Hello, ranks_there: int = 1) -> None:
        """`ranks_there`: how many ranks the engine has from which we read."""
        self.hinge = make_hinge(KVTransferConfig(lease_seconds=LEASE_SECONDS), me)
        self.now = 0.0
        self.ranks_there = ranks_there
        self.rank_of: dict[int, int] = {}
        """Peer -> its rank in the engine from which we read."""
        self._peers = 0
        self._ended: list[Report] = []
        self.connecting: list[tuple[str, int]] = []
        self.opens: list[tuple[int, Open]] = []
        """What we have asked other engines for."""
        self.receiving: list[ReceiveKey] = []
        self.sending: list[SendKey] = []
        self.said: list[tuple[int, AnyMessage]] = []

    def tell(self, command: Command) -> None:
        self.do(command(self.hinge, self.now))

    def poll_events(self) -> list[Report]:
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> KVTransferStats:
        return KVTransferStats()

    def close(self) -> None:
        """Nothing is open."""

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    self.said.append((peer, message))
                    if isinstance(message, Open):
                        self.opens.append((peer, message))
                case SendBlocks():
                    self.sending.append(action.key)
                case ReceiveBlocks():
                    self.receiving.append(action.key)
                case Connect(address):
                    self.connecting.append(address)
                case Fence(peer):
                    self.handle(PeerLost(peer))
                case LeaseEnded() | LoadEnded() | PrefixAsked():
                    self._ended.append(action)
                case _:
                    pass

    def handle(self, event: Any) -> None:
        self.do(self.hinge.handle(event, self.now))

    def hear(self, peer: int, message: AnyMessage) -> None:
        self.handle(Received(peer, encode(message)))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.hinge.tick(self.now))

    # --- other engines ------------------------------------------------------------------------

    def connect(self, *, well: bool) -> None:
        """Every connection that we have asked for is made, or fails."""
        while self.connecting:
            address = self.connecting.pop()
            if well:
                self._peers += 1
                self.rank_of[self._peers] = rank = address[1] - THERE[1]
                self.handle(Connected(self._peers, address))
                epoch = epoch_of_rank(PREFILL.epoch, rank, self.ranks_there)
                self.hear(self._peers, msgspec.structs.replace(PREFILL, epoch=epoch))
            else:
                self.handle(ConnectFailed(address, "nobody is there"))

    def serve(self, *, held: bool) -> None:
        """The other engine sends all that we have opened, and says whether it was held."""
        for peer, asked in self.opens:
            self.hear(peer, Opened(asked.lease_id, asked.tag))
            self.hear(peer, Sending(asked.lease_id, asked.tag, asked.tag, asked.runs))
            for key in self.receiving:
                self.handle(Ended(key, ok=True))
            self.receiving.clear()
            self.hear(peer, Closed(asked.lease_id, held, asked.tag))
        self.opens.clear()

    def refuse(self) -> None:
        """The other engine refuses all that we have opened."""
        for peer, asked in self.opens:
            self.hear(peer, Refused(asked.lease_id, "unknown lease", asked.tag))
        self.opens.clear()

    def read(self, params: KVTransferParams, share: str = "") -> bool:
        """The other engine reads all blocks that a reference names, or its share of them. Returns
        whether all was held."""
        self._peers += 1
        peer, lease_id = self._peers, (params.lease_id or "") + share
        self.handle(Connected(peer, None))
        self.hear(peer, DECODE)
        num_blocks = sum(map(len, params.remote_block_ids or []))
        self.hear(peer, Open(lease_id, params.tokens_digest or "", 7, [(0, num_blocks)]))
        self.hear(peer, Close(lease_id, True, 7))
        for key in self.sending:
            self.handle(Ended(key, ok=True))
        self.sending.clear()
        return (peer, Closed(lease_id, True, 7)) in self.said


class Status(enum.Enum):
    WAITING = "waiting"
    LOADING = "WAITING_FOR_REMOTE_KVS"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Request:
    """One of the scheduler's requests."""

    arrival: Arrival
    status: Status = Status.WAITING
    block_ids: list[list[int]] = field(default_factory=list)
    """Group by group."""
    unfilled: set[int] = field(default_factory=set)
    """Blocks that a load is to fill, all of them, or their content is anything."""
    loaded: bool = False
    """Its KV came from another engine."""
    num_computed: int = 0
    """So many tokens of its prompt are computed when the steps so far are over."""
    error: bool = False


class Aggregator:
    """What vLLM's `KVOutputAggregator` makes of the reports of several ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._failed: set[str] = set()

    def aggregate(self, reports: list[Results]) -> Results:
        for report in reports:
            self._sent.update(report.sent)
            self._received.update(report.received)
            self._failed |= report.failed
        sent, received = self._complete(self._sent), self._complete(self._received)
        failed = self._failed & received
        self._failed -= failed
        return Results(sent, received, failed)

    def _complete(self, counts: Counter[str]) -> set[str]:
        """Those that every rank has reported. One that reports twice passes for two."""
        complete = {name for name, count in counts.items() if count >= self._num_ranks}
        for name in complete:
            del counts[name]
        return complete

    @property
    def is_empty(self) -> bool:
        return not (self._sent or self._received or self._failed)


class VllmScheduler:
    """What vLLM 0.32 and 0.33 do with a connector, and where they die: the assertions of
    `_update_from_kv_xfer_finished` and `_free_blocks`, which are the same in both. One engine,
    with the workers of its ranks."""

    def __init__(
        self,
        num_ranks: int = 1,
        ranks_there: int = 1,
        heads: int = 2,
        groups: VllmKVGroups = ONE_GROUP,
    ) -> None:
        """`ranks_there`: how many ranks the engine has from which this one reads."""
        self.groups = groups.groups
        self.ranks = [Ranks(heads, num_ranks, rank) for rank in range(num_ranks)]
        self.drivers = [
            ScriptedDriver(Hello("here", epoch_of_rank("e1", rank, num_ranks), COMPAT), ranks_there)
            for rank in range(num_ranks)
        ]
        self.references = References(PUBLIC_KEY, lambda: 0.0)
        self.half = SchedulerHalf(self.references, groups, LEASE_SECONDS)
        engine = describe_engine(Hello("here", "e1", COMPAT), *HERE, LEASE_SECONDS)
        self.half.meet(msgspec.structs.replace(engine, tp_size=num_ranks))
        self.workers = list(map(WorkerHalf, self.drivers, self.ranks))
        self.aggregator = Aggregator(num_ranks)
        self.requests: dict[str, Request] = {}
        self.received: set[str] = set()
        self.ended: dict[str, Request] = {}
        """Every request that vLLM has forgotten, as it was then."""
        self.answers: dict[str, dict[str, Any]] = {}
        """The `kv_transfer_params` of answers."""
        self._preempted: set[str] = set()
        """Since the last step."""
        self._next_block = 1

    # --- what clients do ----------------------------------------------------------------------

    def add(self, arrival: Arrival) -> None:
        assert arrival.request_id not in self.requests, "duplicate request id"
        self.requests[arrival.request_id] = Request(arrival)
        self.half.arrived(arrival)

    def reject(self, params: Any) -> None:
        """vLLM's front-end has refused a request, and adds one of a token, to abort it at once."""
        self.add(Arrival("rejected", [0], 1, None, params, rejected=True))
        self.abort("rejected")

    def abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None and request.status is not Status.FINISHED:
            self._finish(request)

    # --- steps --------------------------------------------------------------------------------

    def step(self, prefix: int = 0, chunk: int = 1 << 20) -> None:
        """Schedule all that can be, and have the worker hear of it.

        prefix: so many blocks of each prompt are in the prefix cache. chunk: so many tokens of
        each prompt are computed.
        """
        for request_id, request in self.requests.items():
            if request.status is Status.LOADING and request_id in self.received:
                self.received.remove(request_id)
                request.status, request.loaded = Status.RUNNING, True
            elif request.status is Status.WAITING:
                self._schedule(request, prefix)
        computed = {name: request.num_computed for name, request in self.requests.items()}
        self.half.step(self._compute(chunk), self._preempted & self.half.promised)
        self._preempted = set()
        orders = self.half.take_orders()
        for order in orders:
            if isinstance(order, Fetch):
                fetched = set(order.wanted.values())
                assert fetched == self.requests[order.request_id].unfilled
            if isinstance(order, Lend):
                self._check_lent(order, computed)
        for worker in self.workers:
            worker.obey(orders)

    def _compute(self, chunk: int) -> dict[str, Progress]:
        """How far a step brings the prompts that others wait for."""
        progress = {}
        for name in self.half.promised:
            request = self.requests[name]
            if request.status is Status.RUNNING:
                left = request.arrival.num_tokens - request.num_computed
                request.num_computed += min(chunk, left)
                progress[name] = Progress(
                    request.num_computed, [list(ids) for ids in request.block_ids]
                )
        return progress

    def _check_lent(self, order: Lend, computed: dict[str, int]) -> None:
        """A lease has blocks that its own request has computed before this step."""
        num_blocks = len(order.block_ids)
        [request] = (
            request
            for request in self.requests.values()
            if request.block_ids and request.block_ids[0][:num_blocks] == order.block_ids
        )
        assert num_blocks * self.groups[0].block_size <= computed[request.arrival.request_id]

    def _schedule(self, request: Request, prefix: int) -> None:
        name, num_tokens = request.arrival.request_id, request.arrival.num_tokens
        unit = math.lcm(*(group.block_size for group in self.groups))
        here = min(prefix, (num_tokens - 1) // unit) * unit
        elsewhere = self.half.num_elsewhere(name, here)
        assert here + elsewhere <= num_tokens
        num_computed = here + elsewhere
        if not request.block_ids:
            for group in self.groups:
                num_blocks = -(-(num_computed if elsewhere else num_tokens) // group.block_size)
                null = num_out_of_window(group, num_computed)
                ids = list(range(self._next_block, self._next_block + num_blocks))
                request.block_ids.append([0] * null + ids[null:])
                request.unfilled |= set(ids[max(null, here // group.block_size) :])
                self._next_block += num_blocks
        self.half.allocated(name, request.block_ids, elsewhere)
        request.status = Status.LOADING if elsewhere else Status.RUNNING
        request.num_computed = here

    def preempt(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None and request.status is Status.RUNNING:
            request.status, request.block_ids, request.unfilled = Status.WAITING, [], set()
            request.num_computed = 0
            self._preempted.add(request_id)

    def compute(self, request_id: str, *, by_length: bool, num_tokens: int = 1) -> None:
        """A running request ends by itself, with so many tokens."""
        request = self.requests.get(request_id)
        if request is not None and request.status is Status.RUNNING:
            num_computed = request.arrival.num_tokens + num_tokens - 1
            for ids, group in zip(request.block_ids, self.groups, strict=True):
                for _ in range(-(-num_computed // group.block_size) - len(ids)):
                    ids.append(self._next_block)
                    self._next_block += 1
                null = num_out_of_window(group, num_computed)
                ids[:null] = [0] * null
            self._finish(request, by_length=by_length)

    def _finish(self, request: Request, *, by_length: bool = False) -> None:
        name = request.arrival.request_id
        keeps = request.status is Status.LOADING and name not in self.received
        self.received.discard(name)
        request.status = Status.FINISHED
        block_ids = request.block_ids or [[] for _ in self.groups]
        params = self.half.finished(name, block_ids, by_length=by_length)
        if params is not None:
            self.answers[name] = params
        if not keeps and params is None:
            self._free(name)

    def _free(self, request_id: str) -> None:
        assert self.requests[request_id].status is Status.FINISHED
        self.ended[request_id] = self.requests.pop(request_id)

    def collect(self) -> Results:
        """What the workers report after a step, as one."""
        return self.aggregator.aggregate([worker.collect() for worker in self.workers])

    def update(self, results: Results) -> None:
        """`update_from_output`, for what the workers have reported."""
        for name in results.failed:
            request = self.requests.get(name)
            if request is not None and request.status is Status.LOADING:
                request.error = True
                self._finish(request)
        sent, received = self.half.awaited(results.sent, results.received)
        for name in received:
            assert name in self.requests
            if self.requests[name].status is Status.LOADING:
                self.received.add(name)
            else:
                self._free(name)
        for name in sent:
            assert name in self.requests
            self._free(name)


def num_out_of_window(group: KVGroup, num_computed: int) -> int:
    """How many blocks vLLM drops in front of a request that has computed so many tokens."""
    if group.window is None:
        return 0
    return max(0, num_computed - group.window + 1) // group.block_size


def prompt(request_id: str, num_tokens: int = 9, params: Any = None) -> Arrival:
    """A request; a longer prompt goes on where a shorter one ends."""
    return Arrival(request_id, list(range(num_tokens)), num_tokens, None, params)


def reference(
    num: int,
    num_tokens: int = 9,
    ranks_there: int = 1,
    groups: VllmKVGroups = ONE_GROUP,
    **changes: Any,
) -> dict[str, Any]:
    """What another engine says of the lease with a number, for `prompt`'s tokens; changed after it
    was signed."""
    other = SchedulerHalf(
        References(PUBLIC_KEY, lambda: 0.0), groups, LEASE_SECONDS, random_bits=lambda _: num
    )
    engine = describe_engine(PREFILL, *THERE, LEASE_SECONDS)
    other.meet(msgspec.structs.replace(engine, tp_size=ranks_there))
    other.arrived(prompt(f"p{num}", num_tokens, {"do_remote_decode": True}))
    blocks = [range(1, 2 + num_tokens // group.block_size) for group in groups.groups]
    params = other.finished(f"p{num}", blocks, by_length=True)
    assert params is not None
    return params | changes


def announcement(num: int, num_tokens: int = 9, **changes: Any) -> dict[str, Any]:
    """What a router says of the lease with a number before its engine has answered; changed after
    that engine has signed its name."""
    engine = describe_engine(PREFILL, *THERE, LEASE_SECONDS)
    proof = References(PUBLIC_KEY).proof_of_engine(engine)
    told = {"lease_id": f"{num:032x}", "remote_num_tokens": num_tokens, "proof": proof}
    return engine.to_dict() | told | changes
