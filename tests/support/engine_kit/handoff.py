"""Real engines in this process, joined by UCX, and a router between them without sockets.

The model is small, and what it says depends on every token before. On the import path of the tests
(pytest's `pythonpath`).
"""

from __future__ import annotations

import itertools
import json
import select
import string
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from engine_kit.block_checks import check_blocks
from engine_kit.core import CLIENT, core_request, make_core
from model_kit.checkpoints import SIZES, random_tensors, save_model
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from toy_pools import EngineView, ForgetfulFleet, choose, successor
from waits import PATIENCE_S, Deadline, source_of

from diptych_frontend.text.collector import Collector
from diptych_frontend.text.output_processor import OutputProcessor, fan_out
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    KVTransferConfig,
    KVTransferParams,
    KVTransferStats,
    RequestOutput,
    Slo,
    fingerprint,
)
from diptych_protocol.config import Staging
from diptych_router.choosing.policy import Decision, RequestView
from diptych_router.engines.engine_link import common_to_leases
from diptych_router.engines.engine_table import ROLES, Role
from diptych_router.requests.promises import Promises
from diptych_router.requests.request_table import RequestTable
from diptych_router.requests.table_interface import (
    Abort,
    Action,
    Add,
    Announce,
    AskHandOff,
    Deliver,
    Fail,
    Release,
)

BLOCK = 4
MAX_MODEL_LEN = 96
EOS = 0
_COUNT = itertools.count()
_staging: list[Staging] = ["auto"]
LETTERS = [*string.ascii_lowercase, *string.ascii_uppercase[:14], *string.digits, *'Ġ{}[]":,.-_+?']
"""Tokens 1 to 63; Ġ is how byte-level tokenizers write a blank."""


def save_toy(folder: Path, seed: int = 0) -> str:
    """A checkpoint whose tokens are single letters; returns its path."""
    path = save_model(folder, random_tensors(seed))
    config = {"model_type": "llama", "eos_token_id": EOS, **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {letter: index for index, letter in enumerate(["<end>", *LETTERS])}
    assert len(vocabulary) == SIZES["vocab_size"]
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    return path


class Engine:
    """An engine core of this process."""

    def __init__(self, model: str, name: str, **options: Any) -> None:
        hinge = KVTransferConfig(
            lease_seconds=options.pop("lease_seconds", 30.0),
            load_timeout_s=options.pop("load_timeout_s", 30.0),
            staging=_staging[-1],
        )
        fields = {"block_size": BLOCK, "max_model_len": MAX_MODEL_LEN, "max_loras": 2, **options}
        self.name = name
        self.core = make_core(model, engine_id=name, kv_transfer=hinge, **fields)

    def turn(self) -> list[EngineCoreOutput]:
        """Hear what the hinge has to say, and take a step."""
        core = self.core
        core.handle_transfer_events()
        if core.has_work:
            core.finish_step(*core.start_step())
        core.deferred.settle()
        return core.take_outputs().get(CLIENT, [])

    @property
    def at_rest(self) -> bool:
        """It holds nothing of anybody."""
        scheduler = self.core.scheduler
        check_blocks(scheduler.pool)
        stats = self.hinge
        held = (
            scheduler.requests, scheduler.loading, scheduler.leased,
            stats.leases_held, stats.staging_bytes,
        )  # fmt: skip
        return scheduler.pool.num_free == scheduler.pool.num_blocks and not any(held)

    @property
    def hinge(self) -> KVTransferStats:
        stats = self.core.stats().kv_transfer
        assert stats is not None
        return stats

    @property
    def prompt_tokens_computed(self) -> int:
        return self.core.stats().prompt_tokens_computed

    def forget_prefixes(self) -> None:
        assert self.core.call("reset_prefix_cache", []) is True


@contextmanager
def staging(way: Staging) -> Iterator[None]:
    """Engines that are made meanwhile move their KV so."""
    _staging.append(way)
    try:
        yield
    finally:
        _staging.pop()


@contextmanager
def engines(model: str, **options: dict[str, Any]) -> Iterator[list[Engine]]:
    """Engines by name, with their options."""
    made: list[Engine] = []
    try:
        for name, fields in options.items():
            made.append(Engine(model, name, **fields))
        yield made
    finally:
        for engine in made:
            engine.core.close()


def signed(lent: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A changed reference as a rogue engine would sign it, which has the key as engines of these
    tests do."""
    params = KVTransferParams.parse({**lent, **changes})
    return References(PUBLIC_KEY).sign(params, 30.0).to_dict()


def wait_for_news(engines: Sequence[Engine]) -> None:
    """If nobody has anything to compute, until the hinge or a grammar has something to tell."""
    cores = [engine.core for engine in engines]
    if not any(core.has_work for core in cores):
        hinges = [core.connector.wake_fd for core in cores if core.connector is not None]
        select.select([*hinges, *(core.grammars.wake_fd for core in cores)], [], [], 0.05)
        for core in cores:
            core.take_grammars()


def drive(engine: Engine, message: EngineCoreRequest, *others: Engine) -> list[EngineCoreOutput]:
    """All outputs of a request that is sent to a core as it is, while other engines go on."""
    return drive_all(engine, [message], *others)[message.request_id]


def drive_all(
    engine: Engine, messages: Sequence[EngineCoreRequest], *others: Engine
) -> dict[str, list[EngineCoreOutput]]:
    """All outputs of requests that are sent to a core as they are, one a step."""
    made: dict[str, list[EngineCoreOutput]] = {m.request_id: [] for m in messages}
    to_come = list(messages)
    deadline = Deadline("an end of every request")
    while not all(outputs and outputs[-1].finished for outputs in made.values()):
        deadline.check()
        if to_come:
            engine.core.add(to_come.pop(0), CLIENT)
        for output in engine.turn():
            if output.request_id in made:
                made[output.request_id].append(output)
        for other in others:
            other.turn()
        wait_for_news([engine, *others])
    return made


@dataclass
class Seat:
    """An engine as the router knows it."""

    engine: Engine
    role: Role
    open_tokens: int = 0
    withdrawn: bool = False
    up: bool = True
    planned: int = 0
    announces: bool = True
    """What it is to lend is announced."""

    @property
    def key(self) -> str:
        return f"{self.role} {self.name}"

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.engine.core.description.compat)

    @property
    def lends(self) -> KVTransferParams | None:
        if not self.announces:
            return None
        return common_to_leases(self.engine.core.description, self.fingerprint)

    def charge(self, tokens: int, planned: int = 0) -> None:
        self.open_tokens += tokens
        self.planned += planned

    @property
    def view(self) -> EngineView:
        return EngineView(self.key, self.fingerprint, self.open_tokens, not self.withdrawn)


class LocalFleet(ForgetfulFleet):
    """Both pools, in this process, in the order in which they are to be chosen."""

    def __init__(self, prefill: Sequence[Engine], decode: Sequence[Engine]) -> None:
        pools: dict[Role, Sequence[Engine]] = {"prefill": prefill, "decode": decode}
        seats = [Seat(engine, role) for role, pool in pools.items() for engine in pool]
        self.seats = {seat.key: seat for seat in seats}
        self._holder: Seat | None = None

    def of(self, role: Role) -> list[Seat]:
        return [seat for seat in self.seats.values() if seat.role == role]

    def get(self, key: str) -> Seat | None:
        return self.seats.get(key)

    def may_begin_at(self, key: str) -> bool:
        return not self.seats[key].withdrawn

    def choose(self, request: RequestView, full: Collection[str] = ()) -> Decision | None:
        prefill, decode = ([seat.view for seat in self.of(role)] for role in ROLES)
        decision = choose(request, prefill, decode, full)
        if decision is None or self._holder is None:
            return decision
        return replace(decision, fetch=self._holder.key, fetch_tokens=request.prompt_tokens)

    def fetch_from(self, engine: Engine) -> None:
        """Whoever computes a prompt is to fetch what this engine has of it. If that is in no pool,
        it comes into one, but gets no requests."""
        known = [seat for seat in self.seats.values() if seat.engine is engine]
        self._holder = known[0] if known else Seat(engine, "prefill", withdrawn=True)
        self.seats[self._holder.key] = self._holder

    def successor(self, fingerprint: str) -> Seat | None:
        chosen = successor([seat.view for seat in self.of("decode")], fingerprint)
        return None if chosen is None else self.seats[chosen]

    def num_decoding(self) -> int:
        return sum(not seat.withdrawn for seat in self.of("decode"))

    def draining(self) -> list[Seat]:
        return [seat for seat in self.of("decode") if seat.withdrawn]


class LocalRouter:
    """A router without sockets: the real table, policy and output processor."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        prefill: Sequence[Engine] = (),
        decode: Sequence[Engine],
        move_after: int | None = None,
    ) -> None:
        """move_after: when a stream has so many tokens, the first decode engine begins to leave."""
        self.fleet = LocalFleet(prefill, decode)
        self.table = RequestTable(
            self.fleet, hold_seconds=PATIENCE_S, max_held=8, promises=Promises(Slo())
        )
        self.outputs = OutputProcessor(tokenizer)
        self._move_after = move_after

    @property
    def engines(self) -> list[Engine]:
        return [seat.engine for seat in self.fleet.seats.values()]

    def send(self, request: EngineCoreRequest) -> Collector[RequestOutput]:
        """Begin to have a request answered, under a name that no engine has heard before."""
        name = f"{request.request_id}-{next(_COUNT)}"
        request = msgspec.structs.replace(request, request_id=name)
        parent, parts, collector = fan_out(request)
        for index, part in enumerate(parts):
            self.outputs.add(part, None, collector, parent, index)
            leader = parts[0].request_id if index else None
            self._carry_out(self.table.submit(part, MAX_MODEL_LEN, time.monotonic(), leader))
        return collector

    def abandon(self, collector: Collector[RequestOutput]) -> None:
        """The consumer leaves."""
        self.withdraw(self.outputs.abort(collector.request_ids, internal=True))

    def withdraw(self, request_ids: list[str]) -> None:
        self._carry_out(self.table.withdraw(request_ids, time.monotonic()))

    def fleet_changed(self) -> None:
        self._carry_out(self.table.fleet_changed(time.monotonic()))

    def lose(self, key: str) -> None:
        """An engine ends what it has of us, and the line to it is lost for a moment."""
        seat = self.fleet.get(key)
        if seat is not None:
            seat.engine.core.client_lost(CLIENT)
            self._carry_out(self.table.engine_lost(key, "the line is cut", time.monotonic()))

    def turn(self) -> None:
        """Let every engine do a step, and pass on what came of it."""
        made = [(key, seat.engine.turn()) for key, seat in self.fleet.seats.items()]
        if not any(outputs for _, outputs in made):
            wait_for_news(self.engines)
        for key, outputs in made:
            self._carry_out(self.table.receive(key, outputs, time.monotonic()))
            self._carry_out(self.table.take_turns(time.monotonic()))
        self._let_go()

    def _let_go(self) -> None:
        first = self.fleet.of("decode")[0]
        if self._move_after is None or first.withdrawn:
            return
        streams = [r for r in self.table.requests.values() if r.engine == first.key]
        if any(len(routed.generated) >= self._move_after for routed in streams):
            first.withdrawn = True
            self.fleet_changed()

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Deliver(outputs):
                    self.withdraw(self.outputs.process(outputs))
                case Add(key, request):
                    if request.request_id in self.table.placed:
                        self.fleet.seats[key].engine.core.add(request, CLIENT)
                case Announce(key, request):
                    with suppress(DiptychError):  # it will be refused when it comes
                        self.fleet.seats[key].engine.core.hand_offs.announce_kv_transfer(request)
                case Abort(key, core_ids):
                    self.fleet.seats[key].engine.core.abort(core_ids)
                case Release(core_id, params):
                    owner = params["remote_engine_id"]
                    for engine in self.engines:
                        if engine.name == owner:
                            engine.core.call("reject_kv_transfer", [core_id, params])
                case AskHandOff(key, core_id):
                    if not self.fleet.seats[key].engine.core.hand_off(core_id):
                        why = "it has computed too little"
                        now = time.monotonic()
                        self._carry_out(self.table.cannot_hand_off(core_id, why, now))
                case Fail(request_id, error):
                    self.outputs.fail(request_id, error)
                case _:
                    pass  # explanations, and wake-ups: every turn may be one

    def run(self, *requests: EngineCoreRequest) -> list[list[RequestOutput]]:
        """What the consumer of each request reads, one output after the other."""
        collectors = [self.send(request) for request in requests]
        read: list[list[RequestOutput]] = [[] for _ in requests]

        def all_read() -> bool:
            for outputs, collector in zip(read, collectors, strict=True):
                output = collector.take()
                if output is not None:
                    outputs.append(output)
            return all(collector.finished for collector in collectors)

        self.until(all_read)
        self.settle()
        return read

    def settle(self) -> None:
        """Until nobody holds anything."""
        self.until(lambda: all(engine.at_rest for engine in self.engines))
        assert not self.table.requests

    def until(self, condition: Callable[[], bool]) -> None:
        """Go on until something is so."""
        deadline = Deadline(source_of(condition))
        while not condition():
            deadline.check()
            self.turn()


def request(name: str, prompt: list[int], **fields: Any) -> EngineCoreRequest:
    """As `core_request`, for a model whose answers end with `EOS`."""
    return core_request(name, prompt, **{"eos_token_id": EOS, **fields})


def prompt_of(seed: int, length: int) -> list[int]:
    """Letters, none of which is the end."""
    return [1 + (7 * seed + 3 * i * i + 5 * i) % 63 for i in range(length)]
