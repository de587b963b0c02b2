"""The common part of AsyncLLM and the router's PoolClient: turns prompts into requests, and tokens
into text.

A subclass implements how an `EngineCoreRequest` reaches an engine (`_submit`) and is withdrawn
(`_withdraw`), and passes arriving outputs to its `OutputProcessor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, Unpack

from diptych_frontend.model_files.model_config import ModelConfig
from diptych_frontend.observability.stat_loggers import log_stats
from diptych_frontend.text.input_processor import (
    InputProcessor,
    name_alike,
    params_of,
    warn_of_made_requests,
    warn_of_truncation,
)
from diptych_frontend.text.output_processor import (
    Collector,
    OutputProcessor,
    ParentRequest,
    fan_out,
)
from diptych_frontend.text.renderer import TextRenderer, text_of
from diptych_frontend.text.streamed_prompt import StreamedPrompt, next_piece
from diptych_protocol import (
    ClientClosedError,
    DiptychError,
    EngineClient,
    EngineConfig,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDeadError,
    EngineGenerateError,
    EngineOverloadedError,
    InvalidRequestError,
    KeptAnswer,
    LoRARequest,
    PoolingParams,
    PoolingRequestOutput,
    PromptOptions,
    PromptType,
    RequestOptions,
    RequestOutput,
    RouterConfig,
    SamplingParams,
    SchedulerStats,
    StreamingInput,
    UtilityError,
)
from diptych_protocol.as_sent import check_whole, ids_of
from diptych_protocol.engine_client import ADD_ORDER, ENCODE_ORDER, by_name, spelled_out
from diptych_protocol.weights import numbered

if TYPE_CHECKING:
    from diptych_frontend.observability.request_tracer import RequestTracer

log = logging.getLogger(__name__)


MANY_TOKENS: Final = 1 << 12
"""A prompt with more tokens or characters is not checked on the event loop."""


class Told(Protocol):
    """Facts about a request besides its answer."""

    facts: dict[str, Any]
    """Facts for the response headers."""


class AsyncEngine(EngineClient):
    """An EngineClient whose requests are answered by engine cores elsewhere."""

    input_processor: InputProcessor
    renderer: TextRenderer
    model_config: ModelConfig

    def __init__(
        self,
        config: EngineConfig | RouterConfig,
        inputs: InputProcessor,
        outputs: OutputProcessor,
        *,
        max_open_requests: int,
    ) -> None:
        self.vllm_config = config
        self.renderer = inputs.renderer
        self.model_config = inputs.renderer.model_config
        self.input_processor = inputs
        self.output_processor = outputs
        self._max_open_requests = max_open_requests
        self._adapters = {a.lora_name: a for a in numbered(config.lora_modules)}
        own = config if isinstance(config, EngineConfig) else None
        self._piece_timeout_s = None if own is None else own.streaming_input_timeout_s
        """None: no prompts in pieces."""
        self._max_waiting_tokens = None if own is None else own.max_waiting_tokens
        self._tracer: RequestTracer | None = None
        self._dead: EngineDeadError | None = None
        self._closed = False
        self._told: dict[str, Told] = {}
        """By internal request id, if there is something to be told about it."""

    # --- for subclasses -----------------------------------------------------------------------

    async def _connect(self) -> None:
        """Called before each request: whoever starts with the first one does it here."""

    def _prepare(self, process: Callable[[], EngineCoreRequest]) -> EngineCoreRequest:
        """Make a request whose making takes long, in a thread. A subclass may do further work."""
        return process()

    def _check_tenant(self, tenant: str, num_requests: int) -> None:
        """Raise `EngineOverloadedError` if a tenant may not have so many more requests open, though
        there is room. A subclass may see to it that one tenant leaves room for others."""

    @abstractmethod
    def _submit(self, request: EngineCoreRequest, leader: str | None = None) -> None:
        """Send a request on its way. Raises `EngineOverloadedError` when nobody can take it.

        leader: the request for another answer to the same prompt, which was submitted first.
        """

    @abstractmethod
    def _withdraw(self, request_ids: list[str]) -> None:
        """End requests (internal ids) wherever they are; unknown ids are ignored."""

    @abstractmethod
    def stats_by_engine(self) -> dict[str, SchedulerStats]:
        """The newest statistics of each engine, by its id."""

    # --- EngineClient -------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[str, LoRARequest]:
        return self._adapters

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def errored(self) -> bool:
        return self._dead is not None or self._closed

    @property
    def dead_error(self) -> BaseException:
        if self._dead is not None:
            return self._dead
        return EngineDeadError(
            "the engine was shut down" if self._closed else "the engine is alive"
        )

    @spelled_out(RequestOptions)
    async def generate(
        self,
        prompt: EngineCoreRequest | PromptType | AsyncGenerator[StreamingInput, None],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        take_at_once: Callable[[RequestOutput], bool] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        if isinstance(prompt, AsyncGenerator):
            streamed = StreamedPrompt(request_id, sampling_params, self.renderer, options)
            async with contextlib.aclosing(self._generate_by_pieces(prompt, streamed)) as outputs:
                async for output in outputs:
                    yield output
            return
        if isinstance(prompt, EngineCoreRequest):
            check_whole(prompt)
            sampling_params = params_of(prompt, sampling_params)
        if isinstance(sampling_params, PoolingParams):
            raise InvalidRequestError("pooling parameters are for encode", param="sampling_params")
        collector = await self.add_request(request_id, prompt, sampling_params, **options)
        collector.take_at_once = take_at_once
        try:
            while not collector.finished:
                await collector.ready()
                if (latest := collector.take()) is None:
                    continue
                told = self._told.get(collector.request_ids[0])
                if told is not None:
                    latest.metrics = told.facts
                yield latest
        except DiptychError:
            raise
        except Exception as exc:
            raise _unexpected(exc) from exc
        finally:
            self._end(collector)

    @spelled_out(PromptOptions, ENCODE_ORDER)
    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        *documented: Any,
        truncate_prompt_tokens: int | None = None,
        **options: Unpack[PromptOptions],
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Do the same as `EngineClient.encode`; `truncate_prompt_tokens` of older callers is
        ignored."""
        if truncate_prompt_tokens is not None:
            warn_of_truncation()
        if isinstance(prompt, EngineCoreRequest):
            check_whole(prompt)
            pooling_params = params_of(prompt, pooling_params)
        if isinstance(pooling_params, SamplingParams):
            raise InvalidRequestError(
                "sampling parameters are for generate", param="pooling_params"
            )
        if documented:
            options = by_name(ENCODE_ORDER, documented, options)
        collector = await self.add_request(request_id, prompt, pooling_params, **options)
        try:
            yield await collector.get()
        finally:
            self._end(collector)

    async def _generate_by_pieces(
        self, pieces: AsyncGenerator[StreamingInput, None], prompt: StreamedPrompt
    ) -> AsyncGenerator[RequestOutput, None]:
        """Send each piece when the one before it is answered and its answer was read.

        So a slow reader slows the prompt down, and nothing piles up.
        """
        timeout_s = self._piece_timeout_s
        if timeout_s is None:
            raise InvalidRequestError("a prompt in pieces is not supported here", param="prompt")
        async with contextlib.aclosing(pieces):
            piece = await next_piece(pieces, timeout_s, None)
            if piece is None:
                raise InvalidRequestError("the prompt ended before its first piece", param="prompt")
            first = prompt.extend(piece)
            collector = await self.add_request(
                first.request_id, first, first.sampling, prompt_text=prompt.text
            )
            try:
                while not collector.finished:
                    output = await collector.get()
                    answered = prompt.saw(output)
                    yield output
                    if not answered or collector.finished:
                        continue
                    piece = await next_piece(pieces, timeout_s, collector)
                    if collector.is_ready:  # it ended while it waited
                        continue
                    self._send_piece(collector.request_ids[0], piece, prompt)
            finally:
                self._end(collector)

    def _send_piece(
        self, internal_id: str, piece: StreamingInput | None, prompt: StreamedPrompt
    ) -> None:
        """Send a later piece of a prompt to the core, or word that there are no more."""
        if piece is None:
            self._submit(prompt.closing(internal_id))
            return
        whole = self.input_processor.process("", prompt.extend(piece), SamplingParams())
        whole.request_id = internal_id
        self.output_processor.next_piece(whole, prompt.text)
        self._submit(prompt.newest(whole))

    @spelled_out(RequestOptions, ADD_ORDER)
    async def add_request(
        self,
        request_id: str,
        prompt: EngineCoreRequest | PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        *documented: Any,
        **options: Unpack[RequestOptions],
    ) -> Collector[Any]:
        """Send a request; its outputs come to the collector.

        Once the engine has started, the request is registered before anything is awaited, unless it
        takes long to check, as a long prompt does. A reader of the collector that stops early has
        to call `abort`; `generate` does both. Raises as `generate`.

        A prompt that is an `EngineCoreRequest` gets this request's ids, and `prompt_text` is its
        text; any other prompt brings its own.
        """
        self._check_usable()
        await self._connect()
        if documented:
            options = by_name(ADD_ORDER, documented, options)
        kept: KeptAnswer | None = options.pop("kept", None)
        prompt_text = options.pop("prompt_text", None)
        if prompt_text is not None and not isinstance(prompt_text, str):
            raise InvalidRequestError("prompt_text must be a string", param="prompt_text")
        made = prompt if isinstance(prompt, EngineCoreRequest) else None
        if made is not None and not made.resumable:
            warn_of_made_requests(self, request_id, made)
        process = partial(
            self.input_processor.process,
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            **options,
        )
        if _is_quick(prompt, params if made is None else params_of(made, params)):
            request = process()
        else:  # it would hold up everybody's stream here
            request = await asyncio.to_thread(self._prepare, process)
        text = text_of(prompt) if made is None else prompt_text
        parent, parts, collector = fan_out(request)
        num_tokens = len(parts) * len(request.prompt_token_ids or ())
        self._check_room(len(parts), num_tokens, request.tenant)
        try:
            for index, part in enumerate(parts):
                if kept is None:
                    self._add_request(part, text, parent, index, collector)
                else:
                    self._go_on(part, text, kept, collector)
        except BaseException as exc:
            self._end(collector)
            if isinstance(exc, Exception) and not isinstance(exc, DiptychError):
                raise _unexpected(exc) from exc
            raise
        if made is not None:
            name_alike(made, request)
        return collector

    def check_admission(
        self, num_requests: int = 1, request_id: str = "", *, num_tokens: int = 0, tenant: str = ""
    ) -> None:
        self._check_usable()
        self._check_room(num_requests, num_tokens, tenant)

    def _check_room(self, num_requests: int, num_tokens: int, tenant: str) -> None:
        """Whether so many more requests of a tenant may be open."""
        open_now = len(self.output_processor.answers)
        if open_now + num_requests > self._max_open_requests:
            raise EngineOverloadedError(f"{open_now} requests are open already; retry later")
        if self._max_waiting_tokens is not None:
            waiting = self.output_processor.num_waiting_tokens
            if waiting and waiting + num_tokens > self._max_waiting_tokens:
                raise EngineOverloadedError(f"{waiting} prompt tokens wait already; retry later")
        self._check_tenant(tenant, num_requests)

    def _add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        index: int,
        queue: Collector[Any],
    ) -> None:
        """Register a request, or one of the children of a parent, and send it to an engine."""
        self.output_processor.add(request, prompt, queue, parent_req, index)
        self._submit(request, queue.request_ids[0] if index else None)
        if self._tracer is not None:
            self._tracer.begin(request)

    def _go_on(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        kept: KeptAnswer,
        queue: Collector[Any],
    ) -> None:
        """Go on with an answer that another client of the engines began. Its beginning is told
        again: first what its reader has, in one output, then the rest, before anything new."""
        self.output_processor.add(request, prompt, queue)
        told, rest = kept.token_ids[: kept.num_told], kept.token_ids[kept.num_told :]
        beginning, last = (EngineCoreOutput(request.request_id, part) for part in (told, rest))
        cached = min(kept.num_cached_tokens, len(request.prompt_token_ids or ()))
        beginning.num_cached_tokens = last.num_cached_tokens = cached  # as its client says
        last = last if rest else beginning
        last.finish_reason, last.stop_reason = kept.finish_reason, kept.stop_reason
        ended = self.output_processor.process([beginning] if told or not rest else [])
        request.generated_token_ids = kept.token_ids
        if rest:
            # The reader takes the beginning in this turn of the loop, so nothing is joined to it.
            asyncio.get_running_loop().call_soon(self._tell, request, last, queue)
        elif kept.finish_reason is None and not ended:
            self._submit(request)

    def _tell(
        self, request: EngineCoreRequest, output: EngineCoreOutput, queue: Collector[Any]
    ) -> None:
        """Tell the rest of a beginning, and only then have more computed: on a busy loop an engine
        answers before what it is told to do soon."""
        if ended := self.output_processor.process([output]):
            self._withdraw(ended)
        elif request.request_id in self.output_processor.answers:
            try:
                self._submit(request)
            except Exception as exc:
                self._end(queue)
                queue.fail(exc if isinstance(exc, DiptychError) else _unexpected(exc))

    def _end(self, collector: Collector[Any]) -> None:
        """Forget a request, and abort what is left of it."""
        if not collector.finished:
            self._withdraw(self.output_processor.abort(collector.request_ids, internal=True))
            collector.offer_rest()
        for part_id in collector.request_ids:
            self._told.pop(part_id, None)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Do the same as `EngineClient.abort`; with `internal`, the ids are those of a collector or
        of the parent of n answers."""
        self._withdraw(self.output_processor.abort(ids_of(request_id), internal))

    @abstractmethod
    async def reject_kv_transfer(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None: ...

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        try:
            await self.reject_kv_transfer(
                request_id, kv_transfer_params, data_parallel_rank=data_parallel_rank
            )
        except (ValueError, TypeError, RecursionError, UtilityError) as exc:
            log.info("request %s: nothing to release: %s", request_id, exc)

    async def is_tracing_enabled(self) -> bool:
        return self._tracer is not None

    async def do_log_stats(self) -> None:
        log_stats(self.stats_by_engine())

    # --- life and death -----------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closed:
            raise ClientClosedError("this engine client was shut down")
        if self._dead is not None:
            raise self._dead

    def _die(self, cause: EngineDeadError) -> None:
        """Record the first cause of death and wake everybody who waits."""
        if self._dead is None:
            self._dead = cause
            log.error("%s", cause)
        self.output_processor.fail_all(self._dead)


def _is_quick(prompt: object, params: object) -> bool:
    """There are no images to prepare, no schema to compile, no words to tokenise, and few tokens to
    check."""
    given = prompt
    if isinstance(prompt, dict):
        if "multi_modal_data" in prompt:
            return False
        given = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(given, str | list) and len(given) > MANY_TOKENS:
        return False
    if not isinstance(params, SamplingParams):
        return True
    words = params.bad_words
    return params.structured_outputs is None and isinstance(words, list) and not words


def _unexpected(exc: Exception) -> EngineGenerateError:
    """An error that nobody raised on purpose fails the request, and names itself as the cause."""
    return EngineGenerateError(f"unexpected: {exc!r}")
