"""/v1/embeddings: turns texts or token ids into vectors."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from diptych_frontend.observability.metrics import RequestProgress, ServerMetrics
from diptych_frontend.openai.api_types import NOBODY_ASKS, CacheSalt, Int64
from diptych_frontend.openai.asgi import UntilDisconnect
from diptych_frontend.openai.exchange import (
    Exchange,
    decode_body,
    exchange_of,
    most_values,
    prompt_options,
    send_bytes,
    split_prompts,
)
from diptych_frontend.openai.field_rules import Rules, ignored, refused, taken
from diptych_frontend.openai.generation import ABORT_TIMEOUT_S, adapter_of
from diptych_frontend.openai.request_workers import INLINE_BYTES, RequestWorkers
from diptych_frontend.openai.responses import Warnings, encode
from diptych_protocol import (
    Array,
    EngineClient,
    EngineGenerateError,
    InvalidRequestError,
    PoolingParams,
    PoolingRequestOutput,
    PromptOptions,
    TokensPrompt,
)

logger = logging.getLogger("diptych.openai")
T = TypeVar("T")

MAX_INPUTS: Final = 2048
"""The most prompts of one request, as in the OpenAI API."""
MAX_AT_ONCE: Final = 64
"""The most prompts of one request at the engine at a time, so that it cannot fill the queue."""


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings."""

    RULES: ClassVar[Rules] = {
        "user": taken(NOBODY_ASKS),
        "truncate_prompt_tokens": refused("prompts are not cut"),
        "add_special_tokens": refused("use /tokenize", True),
        "kv_transfer_params": refused("no hand-off"),
        "request_id": ignored("use X-Request-Id"),
        "truncation_side": ignored("prompts are not cut"),
        "padding": refused("not padded", "do_not_pad"),
        "use_activation": refused("vectors have length 1", True),
        "embed_dtype": refused("vectors are float32", "float32"),
        "endianness": refused("vectors are little-endian", "native", "little"),
        "mm_processor_kwargs": refused("prompts are texts", {}),
    }

    model: str
    input: str | list[str | Int64 | list[Int64]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None
    priority: Int64 | None = None
    cache_salt: CacheSalt | None = None

    user: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts. Raises `InvalidRequestError` for too many inputs."""
        prompts = split_prompts(self.input, "input")
        if len(prompts) > MAX_INPUTS:
            raise InvalidRequestError(
                f"input holds {len(prompts)} prompts; at most {MAX_INPUTS} go into one request",
                param="input",
            )
        return prompts


class Embedding(msgspec.Struct):
    index: int
    embedding: msgspec.Raw
    """A list of numbers, or base64 of float32, little-endian."""
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: str = "list"
    warnings: Warnings = UNSET


@dataclass(frozen=True, slots=True)
class Job:
    """The prompts of one request at work."""

    prompts: list[TokensPrompt]
    params: PoolingParams
    options: PromptOptions
    exchange: Exchange
    fields: Sequence[str]
    """The names of the request's fields that the prompts come from, one for each."""


class Embedder:
    """Lets an engine embed the prompts of a request."""

    def __init__(self, engine: EngineClient, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def embed(self, job: Job, take: Callable[[Array], T]) -> list[T]:
        """Return the results of `take` for each vector, in the order of the prompts. The first
        failure ends all of them."""
        if job.exchange.tenant:
            await job.exchange.reserve(sum(len(p["prompt_token_ids"]) for p in job.prompts))
        todo = iter(enumerate(job.prompts))
        made: dict[int, T] = {}
        workers = [
            asyncio.create_task(self._work(job, take, todo, made))
            for _ in range(min(MAX_AT_ONCE, len(job.prompts)))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers, timeout=ABORT_TIMEOUT_S)
        return [made[index] for index in range(len(job.prompts))]

    async def _work(
        self,
        job: Job,
        take: Callable[[Array], T],
        todo: Iterator[tuple[int, TokensPrompt]],
        made: dict[int, T],
    ) -> None:
        """Take prompts until there are none left."""
        for index, prompt in todo:
            output = await self._encode(job, index, prompt)
            made[index] = take(output.outputs.data)

    async def _encode(self, job: Job, index: int, prompt: TokensPrompt) -> PoolingRequestOutput:
        outputs = self._engine.encode(
            prompt,
            job.params,
            f"{job.exchange.request_id}-{index}",
            **job.options,
        )
        num_tokens, exchange = len(prompt["prompt_token_ids"]), job.exchange
        progress = RequestProgress(self._metrics, num_tokens, exchange.tenant, exchange.bill)
        with progress:
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        job.exchange.admitted = True
                        progress.saw_vectors(output)
                        return output
            except InvalidRequestError as exc:
                raise called(exc, job.fields[index]) from exc
            raise EngineGenerateError("the engine ended this request without an answer")


def called(exc: InvalidRequestError, field: str) -> InvalidRequestError:
    """Name the request's own field in errors about a prompt."""
    if exc.param in (None, "prompt"):
        exc.param = field
    return exc


class EmbeddingRoute:
    """The ASGI endpoint."""

    def __init__(
        self,
        engine: EngineClient,
        served_names: frozenset[str],
        metrics: ServerMetrics,
        workers: RequestWorkers,
    ) -> None:
        self._engine = engine
        self._served_names = served_names
        self._embedder = Embedder(engine, metrics)
        self._workers = workers
        self._decoder = msgspec.json.Decoder(EmbeddingRequest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        request, prompts = await self._read(scope, exchange.body)
        adapter = adapter_of(request.model, self._served_names, self._engine)
        async with UntilDisconnect(receive, exchange) as client:
            params = PoolingParams(dimensions=request.dimensions)
            options = prompt_options(scope, exchange, adapter, request.priority)
            job = Job(prompts, params, options, exchange, ["input"] * len(prompts))
            # Each is written as soon as it is there, so that no answer blocks the others for long,
            # and numbers do not lie around as Python objects.
            write = partial(_written, encoding_format=request.encoding_format or "float")
            vectors = await self._embedder.embed(job, write)
            embeddings = [Embedding(index, vector) for index, vector in enumerate(vectors)]
            num_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
            usage = EmbeddingUsage(num_tokens, num_tokens)
            body = EmbeddingList(request.model, embeddings, usage)
            body.warnings = exchange.warnings or UNSET
            await send_bytes(send, 200, encode(body), [])
        if client.gone:
            logger.info("%s: the client left; request aborted", exchange.request_id)

    async def _read(self, scope: Scope, body: bytes) -> tuple[EmbeddingRequest, list[TokensPrompt]]:
        """As for generation: large bodies by turns in a thread, and only if there is room."""

        def read() -> tuple[EmbeddingRequest, list[TokensPrompt]]:
            max_values = most_values(self._engine.max_model_len)
            request = decode_body(scope, body, self._decoder, max_values)
            return request, self._render(request)

        if len(body) <= INLINE_BYTES:
            return read()
        self._engine.check_admission()
        return await self._workers.run(scope, len(body), read)

    def _render(self, request: EmbeddingRequest) -> list[TokensPrompt]:
        try:
            renderer = self._engine.renderer
            prompts = [renderer.render_prompt(prompt) for prompt in request.prompts()]
        except InvalidRequestError as exc:
            raise called(exc, "input") from exc
        if request.cache_salt is not None:
            for prompt in prompts:
                prompt["cache_salt"] = request.cache_salt
        return prompts


def _written(vector: Array, encoding_format: str) -> msgspec.Raw:
    """A vector as JSON."""
    if encoding_format == "base64":
        return msgspec.Raw(b'"' + base64.b64encode(vector.data) + b'"')
    return msgspec.Raw(encode(vector.tolist()))
