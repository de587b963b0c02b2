"""A request inside the engine core, and the table of its life."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from llguidance import LLMatcher

from diptych_engine.scheduling.adapter import Adapter
from diptych_engine.scheduling.images import ImageWork, PlacedImage, identity_of
from diptych_engine.scheduling.number_limit import Digits
from diptych_engine.scheduling.reasoning import Reasoning
from diptych_frontend.fair_share import Account
from diptych_protocol import (
    Array,
    EngineCoreOutput,
    FinishReason,
    KVTransferParams,
    LogprobsTensors,
    PoolingParams,
    SamplingParams,
)


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Queued; holds no blocks."""
    WAITING_FOR_GRAMMAR = enum.auto()
    """Not queued yet: its grammar is being compiled."""
    WAITING_FOR_REMOTE_KV = enum.auto()
    """Holds blocks that the hinge is filling."""
    RUNNING = enum.auto()
    WAITING_FOR_STREAMING_REQ = enum.auto()
    """Its prompt's pieces so far are answered; keeps its blocks and its row for the next one,
    unless others need them."""
    PREEMPTED = enum.auto()
    """Lost its blocks to another request; queued again, keeps its tokens."""
    FINISHED = enum.auto()


TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset(
        {
            RequestStatus.RUNNING,
            RequestStatus.WAITING_FOR_GRAMMAR,
            RequestStatus.WAITING_FOR_REMOTE_KV,
            RequestStatus.FINISHED,
        }
    ),
    RequestStatus.WAITING_FOR_GRAMMAR: frozenset({RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.WAITING_FOR_REMOTE_KV: frozenset(
        {RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED}
    ),
    RequestStatus.RUNNING: frozenset(
        {
            RequestStatus.PREEMPTED,
            RequestStatus.WAITING_FOR_STREAMING_REQ,
            RequestStatus.FINISHED,
        }
    ),
    RequestStatus.WAITING_FOR_STREAMING_REQ: frozenset(
        {RequestStatus.WAITING, RequestStatus.FINISHED}
    ),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. `token_ids` is the prompt followed by everything generated so far."""

    request_id: str
    client: bytes
    """Who gets the answer: the ZMQ identity of the client's socket."""
    params: SamplingParams
    """For a pooling request: default values, which are not used."""
    token_ids: list[int]
    num_prompt_tokens: int
    eos_token_id: int | None
    max_total_tokens: int
    """Length (prompt + output) at which the request ends with LENGTH."""
    seed: int
    """The seed of its random stream: the caller's, or one drawn when the request arrived."""
    arrival_time: float = 0.0
    priority: int = 0
    deadline_s: float = 0.0
    """Its first token is due so long after `arrival_time`."""
    tenant: str = ""
    """Whose request it is."""
    account: Account = field(default_factory=Account)
    """The account of its tenant; the scheduler sets it in `add`."""
    num_charged: int = 0
    """Prompt tokens that its tenant is not to be charged for again."""
    cache_salt: str | None = None
    """All that its KV depends on besides its tokens and images: see `cache_identity`."""
    adapter: Adapter | None = None
    pooling: PoolingParams | None = None
    """Set: the prompt's hidden states are pooled, and nothing is sampled."""
    prompt_embeds: Array | None = None
    """[prompt tokens, hidden]: used in place of the embeddings of the prompt's tokens."""
    images: tuple[PlacedImage, ...] = ()
    """The images of its prompt, in order."""
    reads_prefix_cache: bool = True
    """False: every token has to be computed, because the answer needs more of it than its KV."""
    resumable: bool = False
    """More pieces of its prompt may come: see `sessions`."""
    trace_headers: Mapping[str, str] | None = None
    """Its caller's trace context, to be told with its last output."""
    kv_transfer: KVTransferParams | None = None
    prefix_source: KVTransferParams | None = None
    """The engine that may have the KV of its first `remote_num_tokens` tokens, in whole blocks of
    that engine; None: nobody else has, or nobody is asked any more."""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose KV stands in `block_ids`."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache had when it was first admitted; None before."""
    num_received_tokens: int = 0
    """Tokens whose KV came from another engine, until its client is told."""
    num_routed: int = 0
    """Leading tokens whose experts its client was told, by this engine or by those before it."""
    first_tokens: list[int] = field(default_factory=list)
    """Tokens that the engine of its prompt sampled, until its client is told: with the first token
    that is sampled here, so that a hand-off which fails is an error from the first byte on."""
    block_ids: list[int] = field(default_factory=list)
    """Append-only while the request holds blocks."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hash of every full block of `token_ids`, extended as it grows."""
    expected_hit: int = 0
    """While it waits: the number of its leading blocks that the prefix cache held when it was last
    asked."""
    grammar: LLMatcher | None = None
    """The matcher of its structured output's grammar, in the initial state; to be copied, not
    changed."""
    said_ended: bool | None = None
    """Whether its sender says that there is no reasoning to come before its answer."""
    reasoning: Reasoning | None = None
    """What may stand in its output before the part that has the grammar."""
    digits: Digits | None = None
    """What the vocabulary has of digits, if its grammar is one of JSON."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def due_at(self) -> float:
        """When its first token is due, on the clock of `arrival_time`; without a deadline it is
        due when it arrives."""
        return self.arrival_time + self.deadline_s

    def become(self, status: RequestStatus) -> None:
        """Change status. An illegal transition raises and changes nothing."""
        if status not in TRANSITIONS[self.status]:
            raise RuntimeError(f"request {self.request_id}: {self.status.name} -> {status.name}")
        self.status = status

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def kv_identity(self) -> str | None:
        """Names all that its KV depends on besides its tokens."""
        return identity_of(self.cache_salt, self.images)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Its prompt must be computed here from the first token on, whatever is remembered.

        Once there is output the log-probabilities were reported, by whoever made its first token.
        """
        handed_off = self.kv_transfer is not None and self.kv_transfer.do_remote_prefill
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.num_output_tokens == 0 and not handed_off

    @property
    def is_decoding(self) -> bool:
        """All but the token that was sampled last is computed."""
        return (
            self.status is RequestStatus.RUNNING
            and self.kv_transfer is None
            and not self.resumable
            and self.num_output_tokens > 0
            and self.num_computed_tokens == self.num_tokens - 1
        )

    @property
    def num_remote_tokens(self) -> int:
        """Tokens whose KV another engine has. Raises `RuntimeError` if there is none."""
        source = self.prefix_source or self.kv_transfer
        if source is None or source.remote_num_tokens is None:
            raise RuntimeError(f"request {self.request_id} has no remote KV")
        return source.remote_num_tokens

    @property
    def fetches(self) -> bool:
        """Its KV, or that of a prefix, is to come from another engine."""
        handed_off = self.kv_transfer is not None and self.kv_transfer.do_remote_prefill
        return handed_off or self.prefix_source is not None

    def forgo_remote(self) -> None:
        """Use nothing that another engine has: it is computed here."""
        if self.prefix_source is not None:
            self.prefix_source = None
        else:
            self.kv_transfer = None

    def take_over(self, num_tokens: int) -> int:
        """Count the KV of so many first tokens as computed, because its blocks hold that now; at
        least one token always remains to be computed. Returns how many tokens that adds."""
        before, remote = self.num_computed_tokens, min(num_tokens, self.num_tokens - 1)
        self.num_computed_tokens = remote
        self.num_received_tokens = remote - before
        self.forgo_remote()
        return self.num_received_tokens

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


class ScheduledRequest(msgspec.Struct, gc=False):
    """A request's share of a step: compute `num_tokens` from position `start` on.

    Nobody changes it. It is a struct because every step makes one for each request, and a dataclass
    takes four times as long.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """The share ends at the request's last known token, so the next one is sampled; never for a
    pooling request."""


@dataclass(slots=True, frozen=True)
class StepPlan:
    """What the model runner does in one step."""

    scheduled: list[ScheduledRequest]
    num_tokens: int
    removed: list[str]
    """Requests that lost their rows since the last plan (finished, aborted or preempted);
    one that comes back does so with a new block table."""
    ahead: bool = False
    """The tokens to compute are those that the step before it samples; only the runner has them."""
    images: ImageWork | None = None
    """None: no token of the step has to do with images."""

    def without_finished(self) -> StepPlan:
        """The plan without requests that have ended since it was made."""
        kept = [share for share in self.scheduled if not share.request.finished]
        if len(kept) == len(self.scheduled):
            return self
        num_tokens = sum(share.num_tokens for share in kept)
        return StepPlan(kept, num_tokens, self.removed, images=self.images)


@dataclass(slots=True, frozen=True)
class StepResult:
    """What the model runner found; the lists run over the plan's sampling requests, in order."""

    token_ids: list[int]
    logprobs: list[tuple[list[int], list[float], int] | None] | None
    """Per request (token ids, log-probabilities, rank of the sampled token), if it asked;
    the sampled token comes first. None when nobody asked."""
    num_nans: list[int] | None
    """NaNs among each request's logits; None when there are none at all."""
    prompt_logprobs: dict[str, LogprobsTensors] | None = None
    """By request id, for prompts that are complete with this step; None when nobody asked."""
    pooled: dict[str, Array] | None = None
    """Request id -> vectors of the pooling requests whose prompts this step completed; None when
    nobody pools."""
    routed: dict[str, Array] | None = None
    """Request id -> `EngineCoreOutput.routed_experts`; None unless the engine tells them."""
    failed: dict[str, str] = field(default_factory=dict)
    """Request id -> the reason why the request cannot go on; its tokens mean nothing."""


Pending = Callable[[], StepResult]
"""Waits for what a step found; may be called again."""


def no_result() -> StepResult:
    """The result of a step that samples nothing."""
    return StepResult([], None, None)


@dataclass(slots=True, frozen=True)
class LoadOrder:
    """Fetch blocks `indices` of the lease into `local_block_ids`, pairwise."""

    request_id: str
    params: KVTransferParams
    indices: list[int]
    local_block_ids: list[int]
    token_ids: list[int]
    """The tokens whose KV is fetched, from position 0: the lease must be for the same ones."""
    identity: str | None
    """`Request.kv_identity`."""
    names: list[bytes] | None = None
    """The names of the lender's blocks, if a prefix is fetched; None: a hand-off, which has a
    lease."""

    @classmethod
    def of(
        cls, request: Request, first: int, end: int, names: list[bytes] | None = None
    ) -> LoadOrder:
        """For the blocks `first` to `end` of a request. Raises `RuntimeError` if nothing was lent
        to it."""
        params = request.prefix_source or request.kv_transfer
        if params is None:
            raise RuntimeError(f"request {request.request_id} has no remote KV")
        return cls(
            request.request_id,
            params,
            list(range(first, end)),
            request.block_ids[first:end],
            request.token_ids[: request.num_remote_tokens],
            request.kv_identity,
            names,
        )


class TokenOutput(msgspec.Struct, gc=False):
    """What a step produced for one request. A struct for the reason that `ScheduledRequest` is."""

    request: Request
    output: EngineCoreOutput
    """What its client is to be told; without the end of the request, if this is one."""
