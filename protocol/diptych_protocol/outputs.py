"""The outputs of `EngineClient.generate` and `encode`, and the events in a request's life."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from diptych_protocol.arrays import Array

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity in answers, as in OpenAI's API: JSON cannot express it."""


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    rank: int | None = None
    """1 = the most likely token."""
    decoded_token: str | None = None
    token_bytes: bytes | None = None
    """What it adds to a text, in UTF-8 or as a part of a character; empty for a special token that
    the text leaves out. None without a tokenizer."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers to a prompt, cumulative or delta as the request asked."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """Per token of `token_ids`: token id -> Logprob; the sampled token comes first."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: NDArray[np.int16] | None = None
    """[tokens, layers, experts a token], with the last output, if the engine has
    `enable_return_routed_experts`: which experts each layer chose for the tokens of prompt and
    answer, the likeliest first. The last sampled token went through no layer. -1: a layer without
    experts, or a token whose KV came from another engine, such as a prefix that an earlier request
    fetched."""
    text_ends: list[int] | None = None
    """Beside `logprobs`, if there is a text: how many characters of the answer were decoded after
    each token. A stop string may have cut the text before."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request after some step."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """Per token of the prompt: token id -> Logprob, its own token first; None for the first."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Facts for headers and logs, for example which engines served the request."""


class RequestJourneyEventType(enum.IntEnum):
    """The kinds of events. The values from 7 on are ours."""

    OTHER = 0
    """One that only newer engines know."""
    QUEUED = 1
    SCHEDULED = 2
    FIRST_TOKEN = 3
    PREEMPTED = 4
    FINISHED = 5
    DEPARTED = 6
    """Its last output was sent."""
    KV_WAIT = 7
    """It waits for blocks from another engine."""
    KV_DONE = 8
    KV_FAIL = 9
    CHUNK = 10
    """A step has computed a part of its prompt, and more follows."""

    @classmethod
    def _missing_(cls, value: object) -> RequestJourneyEventType:
        return cls.OTHER


class RequestJourneyEvent(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """One event, with the progress of the request."""

    request_id: str
    event_type: RequestJourneyEventType
    ts_monotonic: float
    """`time.monotonic()` of the core."""
    scheduler_step: int | None = None
    prefill_done_tokens: int = 0
    """The most prompt tokens that were ever computed; a preemption does not lower it."""
    prefill_total_tokens: int = 0
    decode_done_tokens: int = 0
    decode_max_tokens: int = 0
    phase: str = "PREFILL"
    """PREFILL or DECODE."""
    num_preemptions_so_far: int = 0
    schedule_kind: str | None = None
    """FIRST or RESUME, for SCHEDULED."""
    finish_status: str | None = None
    """One of FINISH_REASON_STRINGS, for FINISHED."""


@dataclass(slots=True)
class PoolingOutput:
    data: Array
    """float32: [dimensions] for `embed`, [prompt tokens, dimensions] for `token_embed`."""


@dataclass(slots=True)
class PoolingRequestOutput:
    """The only answer to a pooling request."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
