"""The interface of engines: everything that serves users calls an `EngineClient`.

Signatures follow vLLM's `vllm.engine.protocol.EngineClient`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from operator import attrgetter
from typing import Any, Final, Protocol, TypedDict, TypeVar, Unpack, get_args, get_type_hints

from diptych_protocol.arrays import Array
from diptych_protocol.config import EngineConfig, RouterConfig
from diptych_protocol.control_calls import PauseMode
from diptych_protocol.engine_settings import JsonSchemas
from diptych_protocol.errors import UnsupportedFeatureError
from diptych_protocol.multimodal import MultiModalFeatureSpec
from diptych_protocol.outputs import PoolingRequestOutput, RequestOutput
from diptych_protocol.sampling import PoolingParams, SamplingParams
from diptych_protocol.weights import (
    LoRARequest,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from diptych_protocol.wire import EngineCoreRequest, KeptAnswer


@dataclass(slots=True)
class StreamingInput:
    """A piece of a prompt that arrives in pieces: see `EngineClient.generate`."""

    prompt: PromptType
    sampling_params: SamplingParams | None = None
    """None: those of the `generate` call."""


class TextPrompt(TypedDict, total=False):
    prompt: str
    cache_salt: str
    multi_modal_data: dict[str, Any]
    """`{"image": ...}`: the bytes of an image file, an image of Pillow's, or a list of these, one
    for each image token of the prompt."""


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str
    multi_modal_data: dict[str, Any]
    mm_features: list[MultiModalFeatureSpec]
    """Set by the renderer, which expands the image tokens."""
    prompt_embeds: Array
    """Set by the renderer for an `EmbedsPrompt`, whose token ids are zeros."""


class EmbedsPrompt(TypedDict, total=False):
    prompt_embeds: Any
    """[tokens, hidden] float32, bfloat16 or float16: used instead of the embeddings of tokens. A
    `torch.Tensor`, a `numpy.ndarray` or an `Array`."""
    cache_salt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
EngineInput = TokensPrompt | EmbedsPrompt
"""A prompt that a renderer has tokenised."""


class OurOptions(TypedDict, total=False):
    """The options of a request that vLLM's documents do not have."""

    tenant: str
    """Whose request it is: engines are fair to tenants."""
    kept_as: str
    """See `EngineCoreRequest.kept_as`."""
    kept: KeptAnswer | None
    """The beginning of the answer, from `find_kept`. The first output has the tokens that are told
    already, and no others."""
    pin_s: int
    """For so many seconds after its end its next turn is expected: its KV is forgotten last."""
    session: str
    """See `EngineCoreRequest.session`."""
    prefetches: bool
    """See `EngineCoreRequest.prefetches`."""


class PromptOptions(OurOptions, total=False):
    """What a caller may say of a request beside its prompt and its parameters, whether an answer or
    a vector is wanted. One that is left out has the empty value of its type.

    An option that is a field of `EngineCoreRequest` under the same name reaches an engine core from
    any client, and needs nothing else for that.
    """

    lora_request: LoRARequest | None
    tokenization_kwargs: dict[str, Any] | None
    trace_headers: Mapping[str, str] | None
    priority: int
    reasoning_ended: bool | None
    """True: no reasoning is to come, so that the form of `structured_outputs` holds from the first
    token on. False: the prompt has begun it. None: the prompt's end, or else the output, shows."""


class OneCoreOptions(PromptOptions, total=False):
    """What a client with one engine core may say of any request."""

    prompt_text: str | None
    """The text of a prompt that has none of its own."""
    reasoning_parser_kwargs: dict[str, Any] | None
    """`{"chat_template_kwargs": {...}}`: what the template was given, of which `enable_thinking:
    false` says that no reasoning is to come. The text of a request with these keeps the markers of
    reasoning that are special tokens."""


class RequestOptions(OneCoreOptions, total=False):
    """The keywords of `EngineClient.generate`."""

    data_parallel_rank: int | None
    """The engine core that is to compute it; None: any."""


ENCODE_ORDER: Final = (
    "lora_request", "trace_headers", "priority", "tokenization_kwargs", "reasoning_ended",
)  # fmt: skip
"""The options that callers of `encode` may give by position."""
ADD_ORDER: Final = (
    "lora_request", "tokenization_kwargs", "trace_headers", "priority", "data_parallel_rank",
    "prompt_text",
)  # fmt: skip
"""The same of `AsyncLLM.add_request`, after its time of arrival."""

F = TypeVar("F", bound=Callable[..., Any])


def spelled_out(options: type, order: Sequence[str] = ()) -> Callable[[F], F]:
    """Let the signature of a method that takes `**options` show each of them, with its default.

    order: those that it also takes by position, as `*documented`; it calls `by_name`.
    """
    hints = get_type_hints(options)
    added = [
        Parameter(
            name,
            Parameter.POSITIONAL_OR_KEYWORD if name in order else Parameter.KEYWORD_ONLY,
            default=None if type(None) in get_args(hints[name]) else hints[name](),
            annotation=hints[name],
        )
        for name in dict.fromkeys((*order, *hints))
    ]

    def spell(method: F) -> F:
        shown: Any = method
        signature = inspect.signature(method)
        known = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        own = [each for each in signature.parameters.values() if each.kind in known]
        parameters = sorted([*own, *added], key=attrgetter("kind"))
        shown.__signature__ = signature.replace(parameters=parameters)
        return method

    return spell


def by_name(order: Sequence[str], documented: Sequence[Any], options: Any) -> Any:
    """Return a caller's options, including those that were given by position, in this order.

    Raises `TypeError` for too many, and for one that was given twice.
    """
    if len(documented) > len(order):
        raise TypeError(f"{len(documented)} options by position, but there are {len(order)}")
    named = dict(zip(order, documented, strict=False))
    if twice := named.keys() & options.keys():
        raise TypeError(f"{', '.join(sorted(twice))} given by position and by name")
    return {**named, **options}


class Renderer(Protocol):
    """Turns users' texts into tokens."""

    @property
    def chat_template(self) -> str | None:
        """The source of the model's chat template, if it has one."""

    def of(self, *asker: str | None) -> Renderer:
        """Return a renderer for prompts of one asker. It may remember what it made of long ones,
        and only the same asker can notice."""

    def render_prompt(self, prompt: PromptType) -> TokensPrompt:
        """Tokenise a completion prompt; token ids pass through, range-checked.

        Raises `InvalidRequestError` for an empty prompt or an id outside the vocabulary.
        """

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> TokensPrompt:
        """Apply the model's chat template; `tools` are those that the answer may call, and
        `template_kwargs` further variables of the template. With `continue_final_message` the
        prompt ends with the last message's text, so that the answer continues it.

        Raises `InvalidRequestError` if the template refuses.
        """

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text that is no prompt; with `add_special_tokens`, as for a
        prompt.

        Raises `InvalidRequestError` for a text that is empty, or surely longer than the model's
        context, and for a model without a tokenizer.
        """

    def token_names(self, token_ids: list[int]) -> list[str]:
        """Return each token as the vocabulary writes it; empty where it has none. Raises as
        `tokenize`."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a sequence of tokens."""


class InputProcessor(Protocol):
    """Turns callers' requests into messages for an engine core."""

    max_model_len: int

    def process(
        self,
        request_id: str,
        prompt: EngineCoreRequest | PromptType,
        params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> EngineCoreRequest:
        """Return a checked and complete request. Raises `InvalidRequestError`."""


class ModelFacts(Protocol):
    """Facts about a model that any code may need."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int:
        """Longest prompt plus output that the model was made for, in tokens."""


class EngineClient(ABC):
    """A running engine, or several behind one interface."""

    vllm_config: EngineConfig | RouterConfig
    """The engine's configuration; the name is vLLM's."""
    model_config: ModelFacts
    renderer: Renderer
    input_processor: InputProcessor

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self.vllm_config.name

    @property
    def reasoning_parser(self) -> str:
        """The format of the model's reasoning; `none` if it is not separated, `auto` if its chat
        template shows it."""
        return self.vllm_config.reasoning_parser

    @property
    def tool_call_parser(self) -> str:
        """The format in which the model calls tools; `auto` derives it from the chat template."""
        return self.vllm_config.tool_call_parser

    @property
    def json_schemas(self) -> JsonSchemas:
        """How keywords of JSON schemas that cannot be enforced are handled."""
        return self.vllm_config.json_schemas

    @property
    def adapters(self) -> Mapping[str, LoRARequest]:
        """The adapters that clients may name as models, by their names."""
        return {}

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self.input_processor.max_model_len

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether the output handler has not started yet, or is alive."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """The same as `errored`."""

    @property
    @abstractmethod
    def errored(self) -> bool:
        """Whether the engine is dead, so that no request can succeed."""

    @property
    @abstractmethod
    def dead_error(self) -> BaseException:
        """An `EngineDeadError` that names the first known cause."""

    @abstractmethod
    @spelled_out(RequestOptions)
    def generate(
        self,
        prompt: EngineCoreRequest | PromptType | EngineInput | AsyncGenerator[StreamingInput, None],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        take_at_once: Callable[[RequestOutput], bool] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for a prompt; the last output has `finished=True`.

        Leaving the generator early aborts the request in the core. An output that comes while the
        caller waits is first offered to `take_at_once`, and yielded only if that returns False.

        With a `reasoning_parser`, the form of `structured_outputs` holds from the end of the
        model's reasoning on.

        A prompt that comes in pieces (an async generator) keeps its KV between them. Each piece is
        answered by itself, with the parameters it brings, and the next one is asked for when that
        answer was read. Of an answer all but the last token becomes a part of the prompt. When the
        pieces end, a last output without tokens has `finished=True`; an error of the generator is
        raised as it is.

        Raises:
            InvalidRequestError: the prompt or a parameter can never succeed.
            EngineOverloadedError: too many requests wait already.
            EngineGenerateError: this request failed in the engine.
            EngineDeadError: the engine died.
        """

    @abstractmethod
    @spelled_out(OurOptions)
    def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
        **ours: Unpack[OurOptions],
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the vectors of a prompt as one output, then end.

        Leaving the generator early aborts the request in the core. Raises as `generate`. A request
        that somebody else aborts has no vectors and raises `EngineGenerateError`.
        """

    def check_admission(
        self, num_requests: int = 1, request_id: str = "", *, num_tokens: int = 0, tenant: str = ""
    ) -> None:
        """Check before an answer begins whether there is room for requests with this many prompt
        tokens.

        Raises `EngineOverloadedError` if there is none now. Room is not reserved: `generate` may
        still refuse.
        """
        if self.errored:
            raise self.dead_error

    @property
    def keeps_answers(self) -> bool:
        """Whether `find_kept` finds the answers of other clients of the same engines."""
        return False

    async def find_kept(self, name: str, tenant: str) -> list[KeptAnswer]:
        """Return what the engines kept of a tenant's answer (`kept_as`), which ends where it is
        not over. An engine that had only a part of it knows less of it than the others."""
        return []

    def get_kv_event_sources(self) -> dict[int, Any]:
        """Return no sources, because a core reports what it has cached to the connected routers."""
        return {}

    @abstractmethod
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End every request with these (external) ids; unknown ids are ignored."""

    @abstractmethod
    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        """Free what a prefill engine holds for a request that was refused before admission.

        Idempotent, creates no request, and never fails the caller's own error response: what names
        no lease, or is not signed, is ignored and counted.
        """

    async def reject_kv_transfer(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        """Do the same for a caller who wants to know: raises `InvalidRequestError` for parameters
        that the other method ignores."""
        await self.notify_kv_transfer_request_rejected(
            request_id, kv_transfer_params, data_parallel_rank=data_parallel_rank
        )

    @abstractmethod
    async def check_health(self) -> None:
        """Raise if the engine cannot serve, or should get no new requests."""

    async def check_live(self) -> None:
        """Raise if only a restart can help: busy and draining engines are alive."""
        if self.errored:
            raise self.dead_error

    @abstractmethod
    async def is_tracing_enabled(self) -> bool: ...

    @abstractmethod
    async def do_log_stats(self) -> None:
        """Write the current statistics to the log."""

    @abstractmethod
    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget every cached prefix; False if a block is in use."""

    @abstractmethod
    async def start_profile(self) -> None:
        """Begin a torch profile. Raises `UtilityError` if one is running."""

    @abstractmethod
    async def stop_profile(self) -> None:
        """End the profile and write its trace; harmless if none is running."""

    @abstractmethod
    async def reset_mm_cache(self) -> None:
        """Forget multimodal inputs; there are none without a multimodal model."""

    @abstractmethod
    async def reset_encoder_cache(self) -> None:
        """Forget encoder outputs; there are none without a multimodal model."""

    @abstractmethod
    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, then give memory back.

        Level 0 only pauses. Level 1 also drops the KV cache and saves the weights elsewhere. Level
        2 drops the weights too.
        """

    @abstractmethod
    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore what `tags` name (of `weights`, `kv_cache`, `scheduling`), or everything."""

    @abstractmethod
    async def is_sleeping(self) -> bool:
        """Whether it is paused, or without weights or KV cache."""

    @abstractmethod
    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; True once it can be used."""

    @abstractmethod
    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None:
        """Stop generating; new requests wait.

        `abort` ends running requests with their present output, `wait` lets them finish, `keep`
        freezes them. `wait_for_inflight_requests=True` is an old name of the mode `wait`. Returns
        when nothing runs any more.
        """

    @abstractmethod
    async def resume_generation(self) -> None:
        """Continue after a pause; harmless without one."""

    @abstractmethod
    async def is_paused(self) -> bool: ...

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Stop everything this client started. Safe to call twice and at interpreter exit.

        Requests that are open end as aborted; with a `timeout` in seconds they may end by
        themselves first.
        """

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what the model can do: `generate`, and tasks of `PoolingParams`."""
        raise UnsupportedFeatureError("get_supported_tasks: this client does not know its model")

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: int = 300) -> None:
        """Grow or shrink the data-parallel engine cores behind this client."""
        raise UnsupportedFeatureError("scale_elastic_ep: this client has no cores of its own")

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method of every worker; return the results in the order of their ranks."""
        raise UnsupportedFeatureError("collective_rpc: this client has no workers of its own")

    async def init_weight_transfer_engine(self, init_request: WeightTransferInitRequest) -> None:
        """Connect to the sender of new weights."""
        raise UnsupportedFeatureError("weights cannot be transferred through this client")

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Begin to replace weights; pause generation first."""
        raise UnsupportedFeatureError("weights cannot be transferred through this client")

    async def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        """Replace some weights."""
        raise UnsupportedFeatureError("weights cannot be transferred through this client")

    async def finish_weight_update(self) -> None:
        """Use the new weights from now on."""
        raise UnsupportedFeatureError("weights cannot be transferred through this client")
