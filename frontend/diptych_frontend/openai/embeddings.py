"""/v1/embeddings, and the route of all requests that turn texts or token ids into vectors."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol, TypeVar

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

    def texts(self) -> dict[str, list[str | list[int]]]:
        """See `PoolingRequest`, also for what follows."""
        prompts = split_prompts(self.input, "input")
        if len(prompts) > MAX_INPUTS:
            raise InvalidRequestError(
                f"input holds {len(prompts)} prompts; at most {MAX_INPUTS} go into one request",
                param="input",
            )
        return {"input": prompts}

    def params(self) -> PoolingParams:
        return PoolingParams(dimensions=self.dimensions)

    def kept(self, vector: Array) -> msgspec.Raw:
        """Return the vector as JSON, so that numbers do not lie around as Python objects."""
        if self.encoding_format == "base64":
            return msgspec.Raw(b'"' + base64.b64encode(vector.data) + b'"')
        return msgspec.Raw(encode(vector.tolist()))

    def answer(self, kept: list[msgspec.Raw], tokens: int, exchange: Exchange) -> bytes:
        embeddings = [Embedding(index, vector) for index, vector in enumerate(kept)]
        body = EmbeddingList(self.model, embeddings, EmbeddingUsage(tokens, tokens))
        body.warnings = exchange.warnings or UNSET
        return encode(body)


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


class PoolingRequest(Protocol):
    """A request whose answer is made of the vectors of prompts."""

    model: str
    priority: int | None
    cache_salt: str | None

    def texts(self) -> Mapping[str, Sequence[str | list[int]]]:
        """Return the prompts, by the field that they come from. Raises `InvalidRequestError` naming
        the field."""

    def params(self) -> PoolingParams: ...

    def kept(self, vector: Array) -> Any:
        """Return what the answer needs of a vector. It is called as soon as the vector is there, so
        that no answer blocks the others for long."""

    def answer(self, kept: list[Any], tokens: int, exchange: Exchange) -> bytes:
        """Return the body of the answer. kept: of each prompt, in their order. tokens: the number
        of tokens of all prompts."""


class PoolingRoute:
    """The ASGI endpoint of one kind of request."""

    def __init__(
        self,
        kind: type[PoolingRequest],
        engine: EngineClient,
        served_names: frozenset[str],
        metrics: ServerMetrics,
        workers: RequestWorkers,
    ) -> None:
        self._engine = engine
        self._served_names = served_names
        self._metrics = metrics
        self._workers = workers
        self._decoder = msgspec.json.Decoder(kind)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        body = exchange.body
        if len(body) > INLINE_BYTES:
            self._engine.check_admission()
        request, prompts, fields = await self._workers.read(
            scope, body, lambda: self._read(scope, body)
        )
        adapter = adapter_of(request.model, self._served_names, self._engine)
        with UntilDisconnect(receive, exchange) as client:
            options = prompt_options(scope, exchange, adapter, request.priority)
            job = Job(prompts, request.params(), options, exchange, fields)
            kept = await self._embed(job, request.kept)
            tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
            await send_bytes(send, 200, request.answer(kept, tokens, exchange), [])
        if client.gone:
            logger.info("%s: the client left; request aborted", exchange.request_id)

    def _read(
        self, scope: Scope, body: bytes
    ) -> tuple[PoolingRequest, list[TokensPrompt], list[str]]:
        """The request, its prompts, and which field each is from."""
        max_values = most_values(self._engine.max_model_len)
        request = decode_body(scope, body, self._decoder, max_values)
        fields, prompts = list[str](), list[TokensPrompt]()
        for field, texts in request.texts().items():
            try:
                prompts += map(self._engine.renderer.render_prompt, texts)
            except InvalidRequestError as exc:
                raise called(exc, field) from exc
            fields += [field] * len(texts)
        if request.cache_salt is not None:
            for prompt in prompts:
                prompt["cache_salt"] = request.cache_salt
        return request, prompts, fields

    async def _embed(self, job: Job, take: Callable[[Array], T]) -> list[T]:
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
            prompt, job.params, f"{job.exchange.request_id}-{index}", **job.options
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
