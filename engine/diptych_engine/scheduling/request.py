"""A request inside the engine core, and the table of its states."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
from llguidance import LLMatcher

from diptych_engine.scheduling.adapter import Adapter
from diptych_engine.scheduling.guesses import Guesser
from diptych_engine.scheduling.images import ImageWork, PlacedImage, identity_of
from diptych_engine.scheduling.number_limit import Digits
from diptych_engine.scheduling.reasoning import Reasoning
from diptych_frontend.fair_share import Account
from diptych_protocol import (
    Array,
    DiptychError,
    EngineCoreOutput,
    FinishReason,
    KVTransferParams,
    LogprobsTensors,
    PoolingParams,
    SamplingParams,
)

NOT_SAMPLED: Final = -1


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Queued, without blocks."""
    WAITING_FOR_GRAMMAR = enum.auto()
    """Not queued yet, because its grammar is being compiled."""
    WAITING_FOR_REMOTE_KV = enum.auto()
    """Holds blocks that are being received."""
    RUNNING = enum.auto()
    WAITING_FOR_STREAMING_REQ = enum.auto()
    """All pieces of its prompt so far are answered. It keeps its blocks and its row for the next
    one, unless others need them."""
    PREEMPTED = enum.auto()
    """It lost its blocks to another request, is queued again, and keeps its tokens."""
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
        {RequestStatus.PREEMPTED, RequestStatus.WAITING_FOR_STREAMING_REQ, RequestStatus.FINISHED}
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
    """The receiver of the answer: the ZMQ identity of the client's socket."""
    params: SamplingParams
    """Default values, which are not used, for a pooling request."""
    token_ids: list[int]
    num_prompt_tokens: int
    eos_token_id: int | None
    max_total_tokens: int
    """Length (prompt + output) at which the request ends with LENGTH."""
    seed: int
    """The seed of its random numbers: the caller's, or one drawn when the request arrived."""
    arrival_time: float = 0.0
    priority: int = 0
    deadline_s: float = 0.0
    """The time after `arrival_time` at which its first token is due."""
    tenant: str = ""
    """The tenant to whom the request belongs."""
    account: Account = field(default_factory=Account)
    """Its tenant's account, which the scheduler sets in `add`."""
    kept_as: str = ""
    """See `EngineCoreRequest.kept_as`."""
    num_charged: int = 0
    """Prompt tokens for which its tenant is not charged again."""
    cache_salt: str | None = None
    """Everything besides tokens and images that its KV depends on: see `cache_identity`."""
    adapter: Adapter | None = None
    pooling: PoolingParams | None = None
    """If set, the prompt's hidden states are pooled, and nothing is sampled."""
    prompt_embeds: Array | None = None
    """[prompt tokens, hidden]: used instead of the embeddings of the prompt's tokens."""
    images: tuple[PlacedImage, ...] = ()
    """The images of its prompt, in order."""
    reads_prefix_cache: bool = True
    """False: every token has to be computed, because the answer needs more than KV."""
    resumable: bool = False
    """Whether more pieces of its prompt may come: see `sessions`."""
    pin_s: int = 0
    """For how many seconds after its end a next turn is expected, which begins with its tokens."""
    session: str = ""
    """See `EngineCoreRequest.session`."""
    leaves_disk: bool = False
    """See `EngineCoreRequest.leaves_disk`."""
    prefetches: bool = False
    """See `EngineCoreRequest.prefetches`."""
    trace_headers: Mapping[str, str] | None = None
    """Its caller's trace context, which its last output contains."""
    kv_transfer: KVTransferParams | None = None
    prefix_source: KVTransferParams | None = None
    """The engine that may have the KV of its first `remote_num_tokens` tokens, in whole blocks of
    that engine; None if no engine has it, or none is asked any more."""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose KV is in `block_ids`."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache had when it was first admitted; None before."""
    num_received_tokens: int = 0
    """Tokens whose KV came from another engine, until its client gets to know."""
    num_pinned_tokens: int = 0
    """Those of `num_cached_tokens` that were pinned, until its client gets to know."""
    num_routed: int = 0
    """Leading tokens whose experts its client already has, from this engine or earlier ones."""
    first_tokens: list[int] = field(default_factory=list)
    """Tokens that the prefill engine sampled. The client gets them with the first token sampled
    here, so that a failed hand-off is an error from the first byte on."""
    block_ids: list[int] = field(default_factory=list)
    """Its blocks: see `kv_groups`. While the request holds blocks, they are only appended, or
    replaced by `NULL_BLOCK`."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hash of every full block of `token_ids`, extended as it grows."""
    expected_hit: int = 0
    """While it waits: how many of its leading blocks the prefix cache had at the last look-up."""
    grammar: LLMatcher | None = None
    """The matcher of its structured output's grammar, in the initial state. Copy it; do not change
    it."""
    said_ended: bool | None = None
    """Whether its sender says that no reasoning precedes its answer."""
    reasoning: Reasoning | None = None
    """The reasoning that may precede the part of its output with the grammar."""
    digits: Digits | None = None
    """The vocabulary's digits, if its grammar is one of JSON."""
    guesser: Guesser | None = None
    """Guesses its next tokens; None before the first guess."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def due_at(self) -> float:
        """When its first token is due, on the clock of `arrival_time`. Without a deadline it is due
        when it arrives."""
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
        """The identity of everything besides tokens that its KV depends on."""
        return identity_of(self.cache_salt, self.images)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt must be computed here from the first token on, whatever is cached.

        Once there is output, the engine that made its first token has reported the
        log-probabilities.
        """
        handed_off = self.kv_transfer is not None and self.kv_transfer.do_remote_prefill
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.num_output_tokens == 0 and not handed_off

    @property
    def is_decoding(self) -> bool:
        """Whether all but the last sampled token is computed."""
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
        """Whether its KV, or that of a prefix, has to come from another engine."""
        handed_off = self.kv_transfer is not None and self.kv_transfer.do_remote_prefill
        return handed_off or self.prefix_source is not None

    def forgo_remote(self) -> None:
        """Use nothing from another engine; compute everything here."""
        if self.prefix_source is not None:
            self.prefix_source = None
        else:
            self.kv_transfer = None

    def take_over(self, num_tokens: int) -> int:
        """Count the KV of this many first tokens as computed, because its blocks contain it now. At
        least one token always remains to be computed. If more was here, windows have passed what
        precedes that. Returns how many tokens that adds."""
        before = self.num_computed_tokens
        remote = max(before, min(num_tokens, self.num_tokens - 1))
        self.num_computed_tokens = remote
        self.num_received_tokens = remote - before
        self.forgo_remote()
        return self.num_received_tokens

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


class ScheduledRequest(msgspec.Struct, gc=False):
    """A request's share of a step: compute `num_tokens` from position `start` on.

    Nobody changes it, but for a guess that a model drafts. It is a struct, because every step makes
    one for each request, and a dataclass takes four times as long.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the share ends at the request's last known token, so that the next one is sampled;
    never for a pooling request."""
    guess: int | None = None
    """The token at `start`, if it is only guessed; `TO_DRAFT` until the runner has drafted it. Such
    a share follows that of the token before. What it samples counts only if the token is what that
    one samples."""


@dataclass(slots=True, frozen=True)
class StepPlan:
    """The work of one step for the model runner."""

    scheduled: list[ScheduledRequest]
    num_tokens: int
    removed: list[str]
    """Requests that lost their rows since the last plan (finished, aborted or preempted). One that
    returns does so with a new block table."""
    ahead: bool = False
    """Whether the tokens to compute are those that the step before it samples; only the runner has
    them."""
    images: ImageWork | None = None
    """None if no token of the step belongs to an image."""
    guesses: bool = False
    """Whether any token of the step is only guessed."""
    wager: bool = False
    """Whether it takes longer for guesses, even if none was found; see `guesses.Stakes`."""
    brought: Sequence[Request] = ()
    """Prefetches that have ended since the last plan."""

    def without_finished(self) -> StepPlan:
        """Return the plan without requests that have ended since it was made."""
        kept = [share for share in self.scheduled if not share.request.finished]
        if len(kept) == len(self.scheduled):
            return self
        num_tokens = sum(share.num_tokens for share in kept)
        return replace(self, scheduled=kept, num_tokens=num_tokens)


@dataclass(slots=True, frozen=True)
class StepResult:
    """The results of a step; the lists run over the plan's sampling shares, in order."""

    token_ids: list[int]
    """`NOT_SAMPLED` for guesses after which nothing could be sampled."""
    logprobs: list[tuple[list[int], list[float], int] | None] | None
    """Per request (token ids, log-probabilities, rank of the sampled token), if it asked;
    the sampled token comes first. None when nobody asked."""
    num_nans: list[int] | None
    """NaNs among each request's logits; None when there are none at all."""
    prompt_logprobs: dict[str, LogprobsTensors] | None = None
    """By request id, for prompts that this step completed; None when nobody asked."""
    pooled: dict[str, Array | None] | None = None
    """Request id -> vectors of the pooling requests whose prompts this step completed, None for
    such as are no numbers; None without any."""
    routed: dict[tuple[str, int], Array] | None = None
    """(Request id, end of the share) -> its part of `EngineCoreOutput.routed_experts`; None unless
    the engine reports them."""
    failed: dict[str, DiptychError] = field(default_factory=dict)
    """Request id -> why the request cannot continue; its tokens mean nothing."""


Pending = Callable[[], StepResult]
"""A function that waits for a step's results. It may be called again."""


def no_result() -> StepResult:
    """Return the result of a step that samples nothing."""
    return StepResult([], None, None)


@dataclass(slots=True, frozen=True)
class LoadOrder:
    """An order to fetch blocks `indices` of the lease into `local_block_ids`, pairwise."""

    request_id: str
    params: KVTransferParams
    indices: list[int]
    local_block_ids: list[int]
    token_ids: list[int]
    """The tokens whose KV is fetched, from position 0; the lease must be for the same ones."""
    identity: str | None
    """`Request.kv_identity`."""
    num_here: int
    """How many of these tokens have KV here."""
    num_blocks: int
    """How many blocks the lease has."""
    names: list[bytes] | None = None
    """The names of the lender's blocks, for a prefix; None for a hand-off, which has a lease."""

    @classmethod
    def of(
        cls, request: Request, first: int, kept: Sequence[int], names: list[bytes] | None = None
    ) -> LoadOrder:
        """Return the order for the blocks of a request from place `first` on. kept: the places of
        the blocks that are lent. Raises `RuntimeError` if nothing was lent to it."""
        params = request.prefix_source or request.kv_transfer
        if params is None:
            raise RuntimeError(f"request {request.request_id} has no remote KV")
        wanted = {index: place for index, place in enumerate(kept) if place >= first}
        return cls(
            request.request_id,
            params,
            list(wanted),
            [request.block_ids[place] for place in wanted.values()],
            request.token_ids[: request.num_remote_tokens],
            request.kv_identity,
            request.num_computed_tokens,
            len(kept),
            names,
        )


class TokenOutput(msgspec.Struct, gc=False):
    """The output of a step for one request. A struct for the same reason as `ScheduledRequest`."""

    request: Request
    output: EngineCoreOutput
    """The output for its client, without the end of the request, if this is one."""


class StoredPrefix(KVTransferParams):
    """The source of a prefix whose KV this engine has on disk: no engine has to be asked."""
