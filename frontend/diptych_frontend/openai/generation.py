"""From a valid request to its answer: render, run on the engine, stream or collect.

All routes that generate share this. An `Api` contains their differences.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from diptych_frontend.observability.metrics import RequestProgress, ServerMetrics
from diptych_frontend.openai.api_types import GenerationRequest
from diptych_frontend.openai.asgi import UntilDisconnect
from diptych_frontend.openai.exchange import (
    EXCHANGE_KEY,
    Exchange,
    decode_body,
    header,
    most_values,
    prompt_options,
    rank_of,
    send_bytes,
)
from diptych_frontend.openai.promised_prefill import promised_prefill
from diptych_frontend.openai.request_workers import INLINE_BYTES, RequestWorkers
from diptych_frontend.openai.responses import AnswerWriter, Tally
from diptych_frontend.openai.resumption import (
    LAST_ID_HEADER,
    RESUMABLE_HEADER,
    EventIds,
    asked_for,
    choose_kept,
    not_kept,
    read_id,
)
from diptych_frontend.text.structured_outputs import check_structured_outputs
from diptych_protocol import (
    EngineClient,
    EngineGenerateError,
    InvalidRequestError,
    LoRARequest,
    RefusedByEngineError,
    Renderer,
    RequestOptions,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TokensPrompt,
)

logger = logging.getLogger("diptych.openai")

BEGUN_AT_ONCE = 16
"""The prompts of one request that begin in one turn of the event loop: a thousand would hold it up
for most of a second."""
_RESUMABLE, _LAST_ID = RESUMABLE_HEADER.encode(), LAST_ID_HEADER.encode()
ABORT_TIMEOUT_S = 10.0
"""How long the other prompts of a failed request may take to end."""

B = TypeVar("B", bound=msgspec.Struct)
R = TypeVar("R", bound=GenerationRequest)


class Api(Protocol[B, R]):
    """What distinguishes one generation route from the others."""

    body_type: type[B]
    image_word: bytes
    """A word that every body with images contains."""
    prompt_field: str

    def request(self, body: B, scope: Scope) -> R:
        """Parse a body. Raises `InvalidRequestError` naming the field."""

    def params(self, request: R) -> SamplingParams:
        """Return checked parameters. Raises `InvalidRequestError` naming the field."""

    def render(self, request: R, renderer: Renderer) -> list[TokensPrompt]:
        """Return the prompts as tokens; may run in a worker thread."""

    def options(self, request: R) -> RequestOptions:
        """Return what the engine is told besides the parameters."""

    def writer(self, sound: Sound[B, R], request_id: str, created: int) -> AnswerWriter: ...


@dataclass(slots=True)
class Sound(Generic[B, R]):
    """A request that was checked as far as that needs no engine."""

    body: B
    request: R
    adapter: LoRARequest | None
    params: SamplingParams
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    prompts: list[TokensPrompt] = field(default_factory=list)
    num_prompt_tokens: int = 0
    not_enforced: dict[str, None] = field(default_factory=dict)
    """Keywords of a schema that are not enforced, in their order."""
    kept_as: str = ""
    """The secret name of an answer whose client may come back."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is completely checked."""

    request_id: str
    prompts: list[TokensPrompt]
    params: SamplingParams
    options: RequestOptions
    num_prompt_tokens: int
    """Those to be billed whatever comes. A prefetch has none: it computes nothing, and is billed
    what is there in the end."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts for the answer's headers, beside the router's."""
    event_ids: EventIds | None = None
    """For a client that may come back for the rest."""

    @property
    def is_quickly_written(self) -> bool:
        """Whether its answer needs nothing that is written or read token by token, which may take a
        second."""
        of_tokens = (
            self.params.logprobs,
            self.params.prompt_logprobs,
            self.options.get("reasoning_parser_kwargs"),
        )
        return all(asked is None for asked in of_tokens)

    @property
    def num_paid(self) -> int:
        """How many tokens were billed when the client asked for the first time: its prompt's, and
        those that it has of the answer. An output of which it lacks events is billed again."""
        kept = self.options.get("kept")
        if kept is None or kept.is_unpaid or not kept.num_told:
            return 0
        return self.num_prompt_tokens + kept.num_told

    def engine_id(self, prompt_index: int) -> str:
        """Return the engine's request id for one of the prompts."""
        return self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{prompt_index}"


class GenerationRoute(Generic[B, R]):
    """The ASGI endpoint of one `Api`."""

    def __init__(
        self,
        api: Api[B, R],
        engine: EngineClient,
        served_names: frozenset[str],
        metrics: ServerMetrics,
        workers: RequestWorkers,
    ) -> None:
        self._api = api
        self._engine = engine
        self._served_names = served_names
        self._metrics = metrics
        self._workers = workers
        self._decoder = msgspec.json.Decoder(api.body_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE_KEY]
        sound = await self._read(scope, receive, exchange)
        if sound is None:
            logger.info("%s: the client left; its images are dropped", exchange.request_id)
            return
        if len(exchange.body) > INLINE_BYTES:
            exchange.body = b""  # it would be kept as long as its answer takes
        request, params = sound.request, sound.params
        options: RequestOptions = {
            **self._api.options(request),
            **prompt_options(scope, exchange, sound.adapter, request.priority),
            "data_parallel_rank": rank_of(scope),
        }
        job = Job(
            exchange.request_id,
            sound.prompts,
            params,
            options,
            0 if options.get("prefetches") else sound.num_prompt_tokens,
            {"not_enforced": ", ".join(sound.not_enforced)} if sound.not_enforced else {},
        )
        self._engine.check_admission(
            len(job.prompts) * params.n,
            job.request_id,
            num_tokens=job.num_prompt_tokens * params.n,
            tenant=exchange.tenant,
        )
        if request.stream and header(scope, _RESUMABLE) is not None:
            job = await self._resumable(job, scope, exchange)
        if exchange.tenant:
            await exchange.reserve(_most_tokens(sound) - job.num_paid)
        request_id, created = exchange.request_id, int(time.time())
        if (ids := job.event_ids) is not None:
            request_id, created, sound.kept_as = ids.request_id, ids.created, ids.name
        writer = self._api.writer(sound, request_id, created)
        writer.warnings = exchange.warnings or UNSET
        deliver = self._stream if request.stream else self._answer
        with UntilDisconnect(receive, exchange) as client:
            await deliver(job, writer, exchange, send)
        if client.gone:
            logger.info("%s: the client left; request aborted", exchange.request_id)

    async def _resumable(self, job: Job, scope: Scope, exchange: Exchange) -> Job:
        """Return the job of a client that may come back, or that does. An answer of which more than
        its text is told token by token has no ids, and no client can come back for its rest."""
        params = job.params
        asks_more = (params.logprobs, params.prompt_logprobs, params.extra_args)
        has_rest = len(job.prompts) == params.n == 1 and all(x is None for x in asks_more)
        last_id = header(scope, _LAST_ID)
        if not (self._engine.keeps_answers and has_rest):
            if last_id:
                raise not_kept()
            return job
        asked = asked_for(job.prompts[0], job.options.get("lora_request"), params)
        if not last_id:
            ids, kept = EventIds.new(int(time.time()), exchange.request_id, asked), None
        else:
            name = read_id(last_id, asked)[0].name
            found = await self._engine.find_kept(name, exchange.tenant)
            ids, kept = choose_kept(found, last_id, asked)
        options: RequestOptions = {**job.options, "kept_as": ids.name, "kept": kept}
        return replace(job, options=options, event_ids=ids)

    async def _read(self, scope: Scope, receive: Receive, exchange: Exchange) -> Sound[B, R] | None:
        """Read the body where that holds nobody up: here, or by turns in a thread.

        What takes long is not begun for an engine that has no room, and images are not prepared any
        longer for a client that has left: then there is no result.
        """
        body = exchange.body
        if len(body) <= INLINE_BYTES:
            sound = self._decode(scope, body)
            # An escaped letter might hide the word.
            may_see = self._api.image_word in body or b"\\u" in body
            if sound.params.structured_outputs is None and not (
                may_see and sound.request.has_images
            ):
                render = partial(self._rendered, sound)
                return await self._workers.small(scope, len(body), render)
        self._engine.check_admission()

        def read() -> Sound[B, R]:
            sound = self._decode(scope, body)
            exchange.promise = promised_prefill(body)
            # A form that no answer can have is refused by the field that asks for it.
            form = sound.params.structured_outputs
            for name, wanted in [] if form is None else sound.request.judged_forms(form):
                sound.not_enforced.update(dict.fromkeys(check_structured_outputs(wanted, name)))
            return sound if sound.request.has_images else self._rendered(sound, exchange.tenant)

        sound = await self._workers.run(scope, len(body), read)
        if not sound.request.has_images:
            return sound
        render = partial(self._rendered, sound)
        with UntilDisconnect(receive, exchange):
            return await self._workers.run(scope, len(body), render, has_images=True)
        return None

    def _decode(self, scope: Scope, body: bytes) -> Sound[B, R]:
        """All but the prompts."""
        limit, json_schemas = self._engine.max_model_len, self._engine.json_schemas
        read = decode_body(scope, body, self._decoder, most_values(limit))
        request = self._api.request(read, scope)
        request.json_schemas = request.json_schemas or json_schemas
        adapter = adapter_of(request.model, self._served_names, self._engine)
        return Sound(read, request, adapter, self._api.params(request), limit)

    def _rendered(self, sound: Sound[B, R], tenant: str | None = None) -> Sound[B, R]:
        """Tokenise, and refuse a prompt that leaves no room for an answer. tenant: whose prompt it
        is, if it may be long."""
        request, field = sound.request, self._api.prompt_field
        renderer = self._engine.renderer
        if tenant is not None:
            renderer = renderer.of(tenant, request.cache_salt)
        try:
            prompts = self._api.render(request, renderer)
        except InvalidRequestError as exc:
            exc.param = exc.param or field
            raise
        limit = sound.max_model_len
        for prompt in prompts:
            length = len(prompt["prompt_token_ids"])
            if length >= limit:
                raise InvalidRequestError(
                    f"the prompt has {length} tokens, but prompt and answer together may have at "
                    f"most {limit}",
                    param=field,
                    code="context_length_exceeded",
                )
            sound.num_prompt_tokens += length
            if request.cache_salt is not None:
                prompt["cache_salt"] = request.cache_salt
        sound.prompts.extend(prompts)
        return sound

    async def _stream(self, job: Job, writer: AnswerWriter, exchange: Exchange, send: Send) -> None:
        tally = Tally(job.num_prompt_tokens)
        parts, ids, kept = exchange.parts, job.event_ids, job.options.get("kept")
        is_told = bool(kept and kept.num_told)
        """Whether the client has what comes next."""
        last = b""

        def write_at_once(output: RequestOutput) -> bool:
            """Write a plain output where it arises, if the connection takes it: no task has to wake
            up for it."""
            is_plain = len(output.outputs) == 1 and output.prompt_logprobs is None
            if parts is None or exchange.status is None or output.finished or not is_plain:
                return False
            if not parts.may_write():
                return False
            tally.add(0, output)
            events = writer.events(0, output, tally)
            parts.write(events if ids is None else ids.marked(events, output))
            return True

        streaming = run(self._engine, job, exchange, self._metrics, write_at_once)
        async with aclosing(streaming) as outputs:
            async for prompt_index, output in outputs:
                if exchange.status is None:
                    exchange.is_event_stream = True
                    exchange.dialect = writer.dialect or exchange.dialect
                    headers = [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-cache"),
                        (b"x-accel-buffering", b"no"),
                        *decision_headers({**output.metrics, **job.facts}),
                    ]
                    start = {"type": "http.response.start", "status": 200, "headers": headers}
                    await send(start)
                tally.add(prompt_index, output)
                if output.prompt_logprobs is not None:  # they may be many
                    events = await asyncio.to_thread(_apart, writer, prompt_index, output, tally)
                elif len(output.outputs) > 1:
                    events = _apart(writer, prompt_index, output, tally)
                else:
                    events = writer.events(prompt_index, output, tally)
                if ids is not None and is_told:
                    is_told, events = False, b""
                    ids.saw(output.outputs[0].token_ids)
                    writer.has_told(ids.num_events)
                elif ids is not None:
                    events = ids.marked(events, output)
                if output.finished and len(job.prompts) == 1:
                    last = events  # goes out together with what ends the stream
                else:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
        ending = writer.ending(tally)
        ending = ending if ids is None else ids.marked(ending)
        await send({"type": "http.response.body", "body": last + ending, "more_body": False})

    async def _answer(self, job: Job, writer: AnswerWriter, exchange: Exchange, send: Send) -> None:
        tally = Tally(job.num_prompt_tokens)
        collected: list[list[RequestOutput]] = [[] for _ in job.prompts]
        async with aclosing(run(self._engine, job, exchange, self._metrics)) as outputs:
            async for prompt_index, output in outputs:
                tally.add(prompt_index, output)
                collected[prompt_index].append(output)
        headers = decision_headers({**collected[0][-1].metrics, **job.facts})
        if job.is_quickly_written:
            body = writer.answer(collected, tally)
        else:
            body = await asyncio.to_thread(writer.answer, collected, tally)
        await send_bytes(send, 200, body, headers)


def _most_tokens(sound: Sound[B, R]) -> int:
    """The most tokens that a request can take: those of its prompts, and of answers as long as it
    and the model allow."""
    most, params = sound.max_model_len, sound.params
    rooms = (most - len(prompt["prompt_token_ids"]) for prompt in sound.prompts)
    answers = sum(min(params.max_tokens or room, room) for room in rooms)
    return sound.num_prompt_tokens + params.n * answers


def _apart(writer: AnswerWriter, prompt_index: int, output: RequestOutput, tally: Tally) -> bytes:
    """Write an event for each choice: clients look at the first choice of an event only."""
    each = (replace(output, outputs=[choice]) for choice in output.outputs)
    return b"".join(writer.events(prompt_index, one, tally) for one in each)


def adapter_of(
    model: str, served_names: frozenset[str], engine: EngineClient
) -> LoRARequest | None:
    """Return the adapter of this name; None for the model itself, whose names come first. Raises
    `InvalidRequestError` for an unknown name."""
    if model in served_names:
        return None
    adapter = engine.adapters.get(model)
    if adapter is None:
        raise unknown_model(model, served_names | engine.adapters.keys())
    return adapter


def unknown_model(name: str, served_names: frozenset[str]) -> InvalidRequestError:
    served = ", ".join(sorted(served_names))
    return InvalidRequestError(
        f"the model {name[:200]!r} does not exist; served here: {served}",
        param="model",
        status=404,
        code="model_not_found",
    )


Item = tuple[int, RequestOutput]


def run(
    engine: EngineClient,
    job: Job,
    exchange: Exchange,
    metrics: ServerMetrics,
    take_at_once: Callable[[RequestOutput], bool] | None = None,
) -> AsyncGenerator[Item, None]:
    """Yield every output of the job with the index of its prompt. Leaving early aborts all prompts.
    take_at_once: as for `EngineClient.generate`, if there is one prompt.

    Raises what `EngineClient.generate` raises. An output that reports a failure, and an engine that
    stops without finishing, raise too.
    """
    if len(job.prompts) == 1:
        return _run_prompt(engine, job, 0, exchange, metrics, take_at_once)
    return _merge([_run_prompt(engine, job, i, exchange, metrics) for i in range(len(job.prompts))])


async def _run_prompt(
    engine: EngineClient,
    job: Job,
    index: int,
    exchange: Exchange,
    metrics: ServerMetrics,
    take_at_once: Callable[[RequestOutput], bool] | None = None,
) -> AsyncGenerator[Item, None]:
    prompt = job.prompts[index]
    finished = is_counted = False
    is_whole = job.params.output_kind is RequestOutputKind.FINAL_ONLY
    num_tokens = len(prompt["prompt_token_ids"]) if job.num_prompt_tokens else 0
    with RequestProgress(
        metrics,
        num_tokens,
        exchange.tenant,
        exchange.bill,
        goes_on=job.num_paid > 0,
        answers=job.params.n,
    ) as progress:

        def take(output: RequestOutput) -> bool:
            nonlocal is_counted
            if take_at_once is not None and take_at_once(output):
                progress.saw(output)
                return True
            if is_whole and not is_counted and any(each.token_ids for each in output.outputs):
                # If its client has left, nobody else sees what was computed for it.
                is_counted = True
                progress.saw(output)
            return False

        outputs = engine.generate(
            prompt, job.params, job.engine_id(index), take_at_once=take, **job.options
        )
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    exchange.admitted = True
                    for choice in output.outputs:
                        if choice.finish_reason == "error":
                            raise EngineGenerateError("the engine could not finish this request")
                    if not is_counted:
                        progress.saw(output)
                    finished = output.finished
                    yield index, output
        except (EngineGenerateError, RefusedByEngineError):
            exchange.admitted = True
            raise
        if not finished:
            raise EngineGenerateError("the engine ended this request without finishing it")


async def _merge(streams: list[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all streams as they come; the first failure ends all of them."""
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
            await queue.put(None)
        except Exception as exc:
            await queue.put(exc)

    pumps: list[asyncio.Task[None]] = []
    try:
        for stream in streams:
            pumps.append(asyncio.create_task(pump(stream)))
            if not len(pumps) % BEGUN_AT_ONCE:
                await asyncio.sleep(0)  # the others' turn
        unfinished = len(pumps)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps, timeout=ABORT_TIMEOUT_S)


_HEADER_NAME = re.compile(r"[a-z0-9-]{1,64}")


def decision_headers(facts: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """Return the router's facts about a request as `x-diptych-*` headers.

    A fact whose name is invalid for a header is left out; characters other than visible ASCII
    become `?`.
    """
    headers = []
    for name, value in facts.items():
        key = name.lower().replace("_", "-")
        if isinstance(value, str) and _HEADER_NAME.fullmatch(key):
            text = value[:512]
            if not (text.isascii() and text.isprintable()):
                text = re.sub(r"[^\x20-\x7e]", "?", text)
            headers.append((f"x-diptych-{key}".encode(), text.strip().encode()))
    return headers
