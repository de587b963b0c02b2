"""The messages between a front-end and an EngineCore.

A client owns one DEALER socket; the core owns one ROUTER socket that all its clients connect to.

    client -> core   [type byte, msgpack payload, *bytes of arrays]
        ADD      EngineCoreRequest
        ABORT    list of request ids
        UTILITY  UtilityCall
        START_DP_WAVE  (wave, rank of the core that need not be told)
    core -> client   [msgpack EngineCoreOutputs, *bytes of arrays]
                     or the one-frame sentinel ENGINE_CORE_DEAD

Evolution rules: the structs are positional arrays, so a new field goes at the end and has a default
(an older writer leaves it out, an older reader skips it); no field is ever moved, retyped or
reused; an enumeration takes a value that it does not know for one that it does. The first fields
and their order are vLLM V1's (`vllm.v1.engine`); those below "ours" were appended.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from diptych_protocol.arrays import Array, FrameDecoder, FrameEncoder
from diptych_protocol.engine_stats import SchedulerStats
from diptych_protocol.errors import NoParametersError
from diptych_protocol.kv_transfer_params import KVTransferParams
from diptych_protocol.multimodal import MultiModalFeatureSpec
from diptych_protocol.outputs import RequestJourneyEvent
from diptych_protocol.sampling import PoolingParams, SamplingParams
from diptych_protocol.weights import LoRARequest

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
MAX_MESSAGE_BYTES = 64 << 20
"""ZMQ disconnects a peer that sends a larger message."""

PREFIX_KEY_BYTES = 8
"""The number of bytes of a block's hash by which clients know it. If two blocks have the same, a
router takes them for one, and may choose a worse engine."""
FOLLOW_PREFIXES = "follow_prefixes"
"""The call after which a core reports its cached blocks to the caller, and each change of them. It
has no answer but these messages."""
FOLLOW_HEARTBEAT = "follow_heartbeat"
"""The call after which a core's loop sends the caller a heartbeat every half second, with its
statistics. It has no answer but these messages."""
DOUBT_KV = "doubt_kv"
"""The call after which an engine that does not check KV uses nothing that it remembers now, nor
what it is fetching. Its argument is the reason, in words."""
TAKE_KEPT = "take_kept"
"""The call for what an engine kept of an answer: a name (`kept_as`) and its tenant. The answer ends
there if it is not over. The result is a `KeptAnswer`, or None."""
MAX_TENANT_LENGTH = 256
"""The most characters in the name of an API key."""
MAX_PIN_S = 3600
"""The longest time for which a request may ask to be remembered."""
MAX_DEADLINE_MS = 600_000

_BEGAN_AT: Final = time.time() - time.monotonic()

FINISH_REASON_STRINGS = ("stop", "length", "abort", "error")


def steady_time() -> float:
    """Return seconds since 1970 by a clock that never jumps, by which requests are ordered and
    spans measured. It starts at the system's time when this process begins, and then advances
    evenly. The system's clock may be set back or forth by hours. Then the newest request would be
    served first, or waiting requests would miss their deadlines.
    """
    return _BEGAN_AT + time.monotonic()


def time_of_day(monotonic_s: float) -> float:
    """Return what `steady_time` was, or will be, at a time of `time.monotonic()`."""
    return _BEGAN_AT + monotonic_s


class FinishReason(enum.IntEnum):
    """Why a request ended. ERROR is a failure of one request: an HTTP 500, unless the
    engine says that it is overloaded (503), or refuses what the request came with (400)."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return FINISH_REASON_STRINGS[self.value]

    @classmethod
    def _missing_(cls, value: object) -> FinishReason:
        """A newer engine's reason: it costs this request, and not the connection."""
        return cls.ERROR


class ErrorKind(enum.IntEnum):
    """The meaning of an error for the code that decides what to do next."""

    FAULT = 0
    """This attempt failed."""
    OVERLOADED = 1
    """There is no room now: try another engine, or later."""
    MISSING_IMAGE = 2
    """The request names an image that the core does not have: send it again with all data."""
    REFUSED = 3
    """The request can never succeed as written. Engines of another runtime report this, and cores
    for a form that their vocabulary cannot write; front-ends filter everything else that cores
    refuse."""

    @classmethod
    def _missing_(cls, value: object) -> ErrorKind:
        """A newer engine's kind."""
        return cls.FAULT


class EngineCoreRequestType(enum.Enum):
    """The first frame of every message to a core."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    """Listed so that nothing else gets this value: no core sends it, and every core refuses it."""


REVISION_HEADER = "x-diptych-revision"
"""The header by which a client chooses `canary` or `stable` while a revision is tried."""


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request for an EngineCore."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[MultiModalFeatureSpec] | None
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    eos_token_id: int | None
    arrival_time: float
    """`steady_time()` of the front-end; compared only with other arrival times."""
    lora_request: LoRARequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Array | None = None
    """[prompt tokens, hidden]: used in place of the tokens' embeddings; the ids are zeros then."""
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    """The client's headers that go along with it: its trace, and `REVISION_HEADER`."""
    external_req_id: str | None = None
    """The user's id; `request_id` is the internal, unique one."""
    # ours
    resumable: bool = False
    """Whether further pieces of the prompt will follow, as requests with the same id and this flag.
    A request without it says that there are no more."""
    reasoning_ended: bool | None = None
    """True: no reasoning comes before the answer. False: the prompt has begun it. None: the
    prompt's end, or else the output, shows that. A form of the answer applies after the
    reasoning."""
    reasoning_parser_kwargs: dict[str, Any] | None = None
    """The arguments for the format of the reasoning: `{"chat_template_kwargs": {...}}`."""
    abort_immediately: bool = False
    """Unused: nobody reads it, and the fields after it keep their positions."""
    generated_token_ids: list[int] | None = None
    """Output tokens from elsewhere: from a prefill engine, or from an engine that was lost.

    The core continues after them. They count towards max_tokens and are not emitted again.
    """
    tenant: str = ""
    """The name of the API key with which it came. Tenants share an engine fairly."""
    prefix_source: KVTransferParams | None = None
    """The engine that may have cached the beginning of the prompt, named as in announcements, and
    in `remote_num_tokens` how much of it. The core fetches what it lacks of that, and computes what
    it does not get."""
    deadline_ms: int | None = None
    """Its first token is due this many milliseconds after `arrival_time`; None: at once."""
    kept_as: str = ""
    """The secret name by which another client may take it over; empty: nobody may. The core keeps
    its tokens under this name for some seconds after its end, whatever ended it."""
    pin_s: int = 0
    """For so many seconds after its end a next turn is expected, which begins with its tokens. The
    core forgets its blocks after others."""
    session: str = ""
    """The name of its session, in as many characters as a tenant's at most. With `pin_s` 0 this is
    its last turn: the core forgets that it expected another."""
    leaves_disk: bool = False
    """What the engine has of the prompt on disk only is not read: its router has found that to
    compute or fetch it is faster."""
    prefetches: bool = False
    """Nothing is wanted but that what can be read or fetched of the prompt's KV is in the engine's
    memory. It ends without a token."""

    @property
    def shown_id(self) -> str:
        """The id under which its answers come: the user's own, which may be empty."""
        return self.request_id if self.external_req_id is None else self.external_req_id

    @property
    def params(self) -> SamplingParams | PoolingParams:
        """The sampling parameters, or else the pooling parameters. Raises `NoParametersError` if
        there are neither."""
        params = self.sampling_params or self.pooling_params
        if params is None:
            raise NoParametersError(
                f"request {self.request_id} has neither sampling nor pooling params"
            )
        return params

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters. Raises `NoParametersError` for a pooling request."""
        if self.sampling_params is None:
            raise NoParametersError(f"request {self.request_id} carries no sampling_params")
        return self.sampling_params


class KeptAnswer(msgspec.Struct, array_like=True):
    """What an engine, or a router, knows of an answer whose client may come back for the rest."""

    token_ids: list[int]
    """All of its tokens."""
    finish_reason: FinishReason | None = None
    """None: it was cut short."""
    stop_reason: int | str | None = None
    num_told: int = 0
    """How many of the tokens its client has, with all of their events. Engines do not know this,
    nor the next."""
    num_cached_tokens: int = 0
    """As its client was told of the prompt."""
    is_unpaid: bool = False
    """The router that told it was lost with its bill."""


class LogprobsLists(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of newly sampled tokens; the outer lists run over those tokens.

    Row i is the sampled token followed by the k most likely ones (fewer if k is 0).
    """

    logprob_token_ids: list[list[int]]
    logprobs: list[list[float]]
    sampled_token_ranks: list[int]
    """1 = the most likely token."""


class LogprobsTensors(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of a prompt's tokens from the second on (nothing precedes the first).

    Column 0 is the prompt's own token, the others are the k most likely ones.
    """

    logprob_token_ids: Array
    """[prompt tokens - 1, k + 1] int32."""
    logprobs: Array
    """[prompt tokens - 1, k + 1] float32."""
    selected_token_ranks: Array
    """[prompt tokens - 1] int32; 1 = the most likely token."""


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The result of one step for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsTensors | None = None
    pooling_output: Array | None = None
    """float32, with the shape of `PoolingOutput.data`."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token id (int) or stop string (str) that ended the request."""
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens in this engine's prefix cache, which were not computed."""
    routed_experts: Array | None = None
    """[tokens, layers, experts a token] int16, if the engine has `enable_return_routed_experts`:
    the experts of the tokens after those reported before, up to the one before the newest. -1: not
    known, or a layer without experts."""
    num_nans_in_logits: int = 0
    # ours
    error: str | None = None
    """With FinishReason.ERROR: what went wrong, in words."""
    piece_finish_reason: FinishReason | None = None
    """Why a resumable request's present piece has ended; it waits for the next piece."""
    num_received_tokens: int = 0
    """Tokens whose KV came from another engine; reported once."""
    error_kind: ErrorKind = ErrorKind.FAULT
    """With FinishReason.ERROR."""
    error_param: str | None = None
    """With FinishReason.ERROR: the request's field that was refused; None if no field
    is at fault."""
    num_wrong_guesses: int = 0
    """Rows that the step computed for guessed tokens in vain."""
    num_pinned_tokens: int = 0
    """Those of `num_cached_tokens` that were pinned for this turn; reported once."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class UtilityCall(msgspec.Struct, array_like=True, gc=False):
    """A control call: `getattr(core, method)(*args)` for a method the core declares as callable."""

    client_index: int
    call_id: int
    """Identifies the answer. Negative: the caller expects no answer; an older core answers all the
    same."""
    method: str
    args: list[Any]


UtilityResult = Any
"""The result of a call, in msgpack's types."""


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Answer to a UtilityCall; a failure message means there is no result."""

    call_id: int
    failure_message: str | None = None
    result: UtilityResult | None = None
    # ours
    failure_param: str | None = None
    """The argument's field that was refused; None if no field is at fault."""


class PrefixChanges(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The blocks that a core added to and removed from its prefix cache, for clients that follow
    it."""

    number: int
    """One more than in the message before. A client that has missed one follows anew."""
    added: bytes = b""
    """`PREFIX_KEY_BYTES` of the hash of each block."""
    removed: bytes = b""
    whole: bool = False
    """Whether `added` are all cached blocks: the answer to `follow_prefixes`."""
    adapters: dict[str, str] = {}
    """Name -> digest of the content of the loaded adapters. The hashes of blocks computed with them
    depend on both."""
    digest: int = 0
    """The digest of all cached blocks (`next_digest`); 0 if not reported."""
    expected: list[bytes] = []
    """For each prompt that has come since the last message: `PREFIX_KEY_BYTES` of each block, which
    will be cached. Beside other routers only, because one router knows what it sent."""
    to_disk: bytes = b""
    """Those of the cached blocks that are only on disk now."""
    from_disk: bytes = b""
    """Those that were, and are in memory again, or nowhere."""
    disk_digest: int = 0
    """The digest of all cached blocks that are only on disk; 0 if not reported."""


class Heartbeat(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A sign that a core's loop is running, for clients that called `FOLLOW_HEARTBEAT`. They pass a
    name of theirs, the same to all engines, and may pass a role to give the engine."""

    within_s: float
    """The core promises its next heartbeat within this many seconds."""
    in_call: bool = False
    """A control call begins that may take long; new requests wait for its end."""
    adapters: list[str] | None = None
    """Names of the loaded adapters; None if this message does not report them."""
    follower: int = 0
    """Which one of the followers the client is, in the order of their names, from 0."""
    followers: int = 1
    requests: int = 0
    """With statistics: how many requests of all followers had arrived when they were made."""
    role: str = ""
    """The last role that a follower has given the engine; empty: none has since its start."""


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message per client and step."""

    engine_index: int = 0
    """The core's rank among those of its engine."""
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    """`time.monotonic()` of the core; stamped at construction."""
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    """Ids of the requests that ended; None if there are none."""
    journey_events: list[RequestJourneyEvent] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    # ours
    last_words: str | None = None
    """Why the core ends; the sentinel follows."""
    prefix_changes: PrefixChanges | None = None
    requests_received: int = 0
    """With statistics: how many requests of this client had arrived when they were made."""
    heartbeat: Heartbeat | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


class Abilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine says that it can do. One that says nothing can do everything: cores of this
    project said nothing while there was no other kind of engine."""

    checks_kv: bool = True
    """It checks that KV which it receives belongs to the request. Where it does not, a canary
    compares answers."""
    frees_leases: bool = True
    """It frees the blocks of a lease when it is told that nobody needs them. Where it cannot, an
    engine that could read the blocks can have it done."""
    lends_prefixes: bool = True
    """Engines can fetch prefixes that it remembers, if it takes part in hand-offs."""
    prompt_embeds: bool = True
    images: bool = True
    """It takes images if its model does."""
    adapters: bool = True
    prompt_logprobs: bool = True
    logits_processors: bool = True


class EngineDescription(msgspec.Struct, omit_defaults=True):
    """A core's description of itself for a client that greets it (the utility call `describe`)."""

    engine_id: str
    epoch: str
    """A random string that is new at each start of the process. It identifies the engine, which an
    address does not."""
    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    dtype: str
    compat: dict[str, Any]
    """Everything that must be equal for two engines to exchange KV, by name."""
    max_num_seqs: int
    pid: int
    kv_transfer: bool = False
    revision: str = ""
    """The deployment's revision; part of `compat` too."""
    hidden_size: int = 0
    """Width of a hidden state, and so of `prompt_embeds` and of embeddings."""
    pooling: str = "last"
    """`EngineConfig.pooling`."""
    tasks: tuple[str, ...] = ("generate",)
    """The result of `EngineClient.get_supported_tasks`."""
    scheduling_policy: str = "fcfs"
    """Only `priority` uses the priorities of requests; front-ends of other policies refuse them.
    Not a `SchedulingPolicy`: a newer engine may have one more."""
    kv_transfer_host: str = ""
    """The host at which other engines reach this one's hinge: `remote_host` of its leases."""
    kv_transfer_port: int = 0
    """The port of the hinge: `remote_port` of its leases; 0 if it takes no part in hand-offs."""
    kv_transfer_proof: str = ""
    """`proof` of announcements: the engine's signature of its name and address."""
    tracing_enabled: bool = False
    """Whether an OTLP endpoint is configured, so that it reports the events of requests."""
    logits_processors: tuple[str, ...] = ()
    """`EngineConfig.logits_processors`: the functions that a request may name."""
    node: str = ""
    zone: str = ""
    """`EngineConfig.node` and `zone`: where it runs, as far as it knows."""
    name: str = ""
    """What it is called where it runs, as by the name of its pod; empty: by its `engine_id`."""
    runtime: str = "diptych"
    """What computes there, a `Runtime`; routers show it, and need not know it."""
    abilities: Abilities = Abilities()
    processors: int = 0
    """A number that engines on the same processors have in common; 0: not known, or a GPU's."""
    processors_part: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """The part of them that a step computes on."""
    vocabulary: str = ""
    """A digest of the text of each token; empty: not known. To a router of another one, token ids
    mean something else."""
    num_disk_blocks: int = 0
    """The most blocks that it keeps on disk, beside its `num_blocks`."""
    max_num_batched_tokens: int = 0
    """The token budget of one step; 0: not known."""
    enough_prompt_tokens: int = 0
    """A step that holds so many prompt tokens begins no further prompt; 0: not known."""

    @property
    def shown_name(self) -> str:
        """The name for logs, metrics and people."""
        return self.name or self.engine_id


class ReconfigureDistributedRequest(msgspec.Struct):
    """Sent by UTILITY when data parallelism is resized."""

    new_data_parallel_size: int
    new_data_parallel_rank: int
    new_data_parallel_rank_local: int
    new_data_parallel_master_ip: str
    new_data_parallel_master_port: int


class ReconfigureRankType(enum.IntEnum):
    """Special values of the rank fields of `ReconfigureDistributedRequest`."""

    KEEP_CURRENT_RANK = -1
    SHUTDOWN_CURRENT_RANK = -2


encoder = FrameEncoder()
"""The only encoder of this channel. Like the decoders, it is not for use by two threads at once."""
request_decoder = FrameDecoder(EngineCoreRequest)
abort_decoder = FrameDecoder(list[str])
utility_decoder = FrameDecoder(UtilityCall)
wave_decoder = FrameDecoder(tuple[int, int])
outputs_decoder = FrameDecoder(EngineCoreOutputs)
