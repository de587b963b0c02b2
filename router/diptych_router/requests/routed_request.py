"""One request's path through the pools, as a small state machine over engine outputs.

    PREFILL ──token + lease──▶ DECODE ──finish──▶ done
       │ error / loss           │  │ ▲
       │                        │  └─┘ lease: another decode engine goes on
       │                        │ error / loss
       └────────────────────────┴─▶ a new attempt with prompt + tokens so far

It decides what to send next; `RequestTable` decides where. There is no I/O here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import asdict

from diptych_frontend.fair_share import OUTPUT_WEIGHT, Account
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVTransferParams,
    SamplingParams,
)
from diptych_protocol.kv_transfer_params import PARAM
from diptych_protocol.router_settings import Disaggregate
from diptych_protocol.wire import ErrorKind
from diptych_router.choosing.policy import RequestView
from diptych_router.engines.block_holders import Keys
from diptych_router.engines.known_prefixes import BlockNamer, BlockNaming
from diptych_router.requests.request_record import IS_KEPT, RequestRecord, Setback

MAX_ERRORS = 3
"""How often engines may report that they failed with a request."""
MAX_LOSSES = 8
"""How often engines may be lost during a request, or hand-offs to them may fail.

It is more than `MAX_ERRORS`, because it is seldom the request's fault: a stream must survive
several engines whose pods are deleted without warning. It is bounded, because a request that does
kill engines must not kill all of them.
"""
MAX_LATE = 2
"""How often a request is moved from an engine that is late with its first token. After that it
waits, because all engines seem to be slow."""


class Stage(enum.Enum):
    PREFILL = enum.auto()
    DECODE = enum.auto()


@dataclass(slots=True)
class RoutedRequest:
    """A request as its user meant it, and its progress."""

    original: EngineCoreRequest
    max_model_len: int
    record: RequestRecord
    namer: BlockNamer
    request_id: str = field(init=False)
    core_id: str = field(init=False)
    """The id for engines. Each placement has an id of its own, so that late outputs of an earlier
    placement are recognised, even from the same engine."""
    tokens_left: int = field(init=False)
    """How many tokens may still be generated."""
    generated: list[int] = field(default_factory=list)
    """Every token that has been delivered to the user."""
    placements: int = 0
    """How often it was sent to an engine."""
    errors: int = 0
    losses: int = 0
    late: int = 0
    patience_s: float = math.inf
    """An engine of this attempt has to bring a token within this many seconds."""
    first_token_by: float = math.inf
    """When the present engine is late, by the loop's clock."""
    wrong_field: str | None = None
    """The field of the request that an engine named in its error."""
    suspects: dict[str, Stage | None] = field(default_factory=dict)
    """Keys of engines that failed it since its last progress -> at what. If another engine succeeds
    at that, the request was not at fault. None: this engine was blamed at once."""
    stage: Stage = Stage.PREFILL
    engine: str = ""
    """Key of the engine that works on it now."""
    prefill_engine: str = ""
    """Key of the engine chosen for its prompt; empty: the one that decodes."""
    decode_engine: str = ""
    """Key of the engine chosen to take over after prefill."""
    lender: str = ""
    """Key of the engine that lent its KV to the present one; empty: none did."""
    leaves_disk: bool = False
    """Whether its engine is to compute what it has on disk of the prompt."""
    lease: dict[str, Any] | None = None
    """kv_transfer_params of a lease that no decode engine has read yet."""
    announced: str = ""
    """Key of the engine that was told to expect its next placement by its id; empty: none was."""
    moving: bool = False
    """Whether its engine was asked to hand it off."""
    full: set[str] = field(default_factory=set)
    """Keys of the engines that had no room for it since its last progress."""
    account: Account = field(default_factory=Account)
    crowded: bool = False
    """Whether it waits because its tenant has many requests at engines that others need too."""
    usual_output: float = 0.0
    """The average number of tokens in an answer."""
    _hashed: dict[BlockNaming, Keys] = field(default_factory=dict)
    """The keys of its blocks, as they were last asked for."""
    hold_until: float | None = None
    """When it stops waiting for an engine, by the loop's clock. Set when it first has to wait, so
    that attempts in between do not extend it; None after any progress."""

    def __post_init__(self) -> None:
        self.request_id = self.original.request_id
        self.core_id = f"{self.request_id}/{self.placements}"
        self.generated += self.original.generated_token_ids or ()
        params = self.original.sampling_params
        wanted = None if params is None else params.max_tokens
        room = self.max_model_len - self.record.prompt_tokens
        self.tokens_left = (room if wanted is None else min(room, wanted)) - len(self.generated)
        if self.original.prefetches:
            self.tokens_left = 0

    @property
    def urgency(self) -> tuple[int, float]:
        """A sort key: by priority, then by when its first token is due. Smaller is sooner."""
        due_at = self.original.arrival_time + (self.original.deadline_ms or 0) / 1e3
        return self.original.priority, due_at

    @property
    def decodes(self) -> bool:
        """Whether its engine is to generate all of its answer that is left."""
        return self.stage is Stage.DECODE and not self.record.prefill_only

    @property
    def has_decoded(self) -> bool:
        """Whether an engine has decoded for it, so that one holds the KV of its prompt."""
        return self.stage is Stage.DECODE and self.lease is None and bool(self.generated)

    @property
    def view(self) -> RequestView:
        """Return what a policy may know of it."""
        adapter, params = self.original.lora_request, self.original.sampling_params
        # A prefetch goes where its turn would.
        most = math.inf if self.original.prefetches else self.tokens_left
        pooled = self.original.pooling_params is not None
        return RequestView(
            self.record.prompt_tokens + len(self.generated),
            0.0 if pooled else min(self.usual_output, most),
            prefill_only=pooled,
            goes_on=bool(self.generated),
            keys=self._keys if self.original.prompt_embeds is None else None,
            adapter="" if adapter is None else adapter.lora_name,
            tenant=self.original.tenant,
            disaggregate=wanted_way(params) if params is not None and params.extra_args else None,
            revisions=self.record.revisions,
        )

    def _keys(self, naming: BlockNaming) -> Keys:
        """The keys of the full blocks of its tokens but for the last, which is always computed."""
        num_tokens = self.record.prompt_tokens + len(self.generated) - 1
        known = self._hashed.get(naming)
        if known is None or len(known) != num_tokens // naming.block_size:
            tokens = self.original.prompt_token_ids or []
            if self.generated:
                tokens = tokens + self.generated
            known = self._hashed[naming] = self.namer.keys(self.original, tokens[:-1], naming)
            self.record.block_size = naming.block_size
            self.record.keys = known[: IS_KEPT.size][IS_KEPT[: known.size]]
        return known

    def place(self, engine: str, stage: Stage) -> None:
        """Record that it goes to this engine now; the next `*_request` returns what to send."""
        self.placements += 1
        self.core_id = f"{self.request_id}/{self.placements}"
        self.engine, self.stage, self.moving = engine, stage, False
        self.first_token_by = math.inf

    def set_back(self, setback: Setback) -> bool:
        """Count what went wrong; True if it deserves another attempt."""
        self.errors += setback is Setback.ERROR
        self.losses += setback in (Setback.LOSS, Setback.FULL)
        self.late += setback is Setback.LATE
        if setback is Setback.FULL:
            self.full.add(self.engine)
        if setback is Setback.REFUSED:
            return False
        return self.errors < MAX_ERRORS and self.losses < MAX_LOSSES

    @property
    def avoided(self) -> Collection[str]:
        """Keys of engines that should not get it again while there are others."""
        return self.full | self.suspects.keys() if self.suspects else self.full

    def suspect(self) -> None:
        """Record that the present engine failed. Of a hand-off both sides are suspects."""
        self.suspects[self.engine] = self.stage
        if self.stage is Stage.DECODE and self.lease is not None and self.lender:
            self.suspects[self.lender] = self.stage

    def take_guilty(self) -> list[str]:
        """Return the suspects, because another engine has succeeded at what they failed at."""
        guilty = [
            engine
            for engine, stage in self.suspects.items()
            if stage is self.stage and engine != self.engine
        ]
        for engine in [e for e, s in self.suspects.items() if s in (self.stage, None)]:
            del self.suspects[engine]
        return guilty

    def setback_of(self, kind: ErrorKind) -> Setback:
        """Return the meaning of an engine's error: with an unread lease the hand-off has failed."""
        if kind is ErrorKind.OVERLOADED:
            return Setback.FULL
        if kind is ErrorKind.REFUSED:
            return Setback.REFUSED
        handing_off = self.stage is Stage.DECODE and self.lease is not None
        return Setback.LOSS if handing_off else Setback.ERROR

    def prefill_request(
        self, lease_id: str | None = None, source: KVTransferParams | None = None
    ) -> EngineCoreRequest:
        """Return the request for the prefill engine: compute the KV, sample one token, keep the KV
        for a decode engine.

        When only one token is wanted there is nothing to hand off. lease_id: the id for the lease,
        32 random hexadecimal digits. source: the engine that may have the KV of a prefix.
        """
        if self.tokens_left <= 1:
            return self.aggregated_request(source)
        asked = KVTransferParams(do_remote_decode=True, lease_id=lease_id)
        request = self._with(asdict(asked), source)
        params = request.sampling_params
        if params is not None:
            params.max_tokens = len(self.generated) + 1
            params.min_tokens = min(params.min_tokens, params.max_tokens)
        return request

    def announce(
        self, engine: str, lends: KVTransferParams, lease_id: str
    ) -> EngineCoreRequest | None:
        """Return the announcement to the decode engine during prefill: the request that it will get
        if all goes well. None if prefill will not hand it off, or announcing it would be dear.

        lends: the common part of the prefill engine's leases.
        """
        if self.tokens_left <= 1 or self.original.prompt_embeds is not None:
            return None
        coming = f"{self.request_id}/{self.placements + 1}"
        self.announced = engine
        num_tokens = self.record.prompt_tokens + len(self.generated)
        lease = msgspec.structs.replace(lends, lease_id=lease_id, remote_num_tokens=num_tokens)
        coming_request = self._with(asdict(lease), core_id=coming)
        if coming_request.mm_features is not None:  # their names tell D enough
            coming_request.mm_features = [
                msgspec.structs.replace(feature, data=None)
                for feature in coming_request.mm_features
            ]
        return coming_request

    def withdraw_announcement(self) -> str:
        """Take the announced id, which cannot be used again, from the engine that is returned."""
        engine, self.announced = self.announced, ""
        if engine:
            self.placements += 1
            self.core_id = f"{self.request_id}/{self.placements}"
        return engine

    def decode_request(self) -> EngineCoreRequest:
        """Return the request for the decode engine: take the KV over, and continue."""
        return self._with(self.lease)

    def aggregated_request(self, source: KVTransferParams | None = None) -> EngineCoreRequest:
        """Return the request for one engine that does everything. source: as `prefill_request`."""
        return self._with(None, source)

    def _with(
        self,
        kv_transfer_params: dict[str, Any] | None,
        source: KVTransferParams | None = None,
        core_id: str = "",
    ) -> EngineCoreRequest:
        """The user's request with these parameters of a hand-off, for an engine that knows it by
        this id; empty: that of the placement of now."""
        params = copy(self.original.sampling_params)
        if params is not None:
            extra = dict(params.extra_args or {})
            extra.pop(PARAM, None)
            if kv_transfer_params is not None:
                extra[PARAM] = kv_transfer_params
            params.extra_args = extra or None
        core_id, trace = core_id or self.core_id, self.record.trace
        headers = self.original.trace_headers if trace is None else trace.headers(core_id)
        return msgspec.structs.replace(
            self.original,
            request_id=core_id,
            trace_headers=headers,
            sampling_params=params,
            generated_token_ids=list(self.generated) or None,
            prefix_source=source,
            leaves_disk=self.leaves_disk,
            deadline_ms=None if self.generated else self.original.deadline_ms,
        )

    def absorb(self, output: EngineCoreOutput) -> bool:
        """Take an output of the engine in charge; True if another engine has to continue.

        An output that ends only a stage is changed to look unfinished to the user. The output gets
        the user's id of the request.
        """
        self.generated += output.new_token_ids
        num_new = len(output.new_token_ids)
        self.tokens_left -= num_new
        self.account.served += OUTPUT_WEIGHT * (num_new + output.num_wrong_guesses)
        self.hold_until = None
        self.first_token_by = math.inf
        self.full.clear()
        prefill_done = (
            self.stage is Stage.PREFILL
            and output.finish_reason is FinishReason.LENGTH
            and self.tokens_left > 0
        )
        lent = output.kv_transfer_params
        # A decode engine let go of it, and lends its blocks to the engine that takes over.
        handed_off = output.finish_reason is FinishReason.ABORT and lent is not None
        if prefill_done or handed_off:
            self.lease = lent
            output.finish_reason = None
        elif self.stage is Stage.DECODE and output.new_token_ids:
            self.lease = None  # the engine that decodes now has read it
        output.kv_transfer_params = None
        output.request_id = self.original.request_id
        return prefill_done or handed_off


def wanted_way(params: SamplingParams | None) -> Disaggregate | None:
    """Return what a client's `kv_transfer_params` say of the way of its request; None if nothing.

    With do_remote_decode, another engine decodes than the one that prefills; where it is false and
    nothing was prefilled, one engine does both.
    """
    asked = None if params is None else (params.extra_args or {}).get(PARAM)
    if asked is None or asked.get("do_remote_prefill"):
        return None
    ways: dict[bool | None, Disaggregate] = {True: "always", False: "never"}
    return ways.get(asked.get("do_remote_decode"))
