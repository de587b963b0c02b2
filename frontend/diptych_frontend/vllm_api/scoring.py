"""/score and /rerank: compares texts by the cosine of their embeddings."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.api_types import NOBODY_ASKS, CacheSalt, Int64
from diptych_frontend.openai.asgi import UntilDisconnect
from diptych_frontend.openai.embeddings import MAX_INPUTS, Embedder, EmbeddingUsage, Job, called
from diptych_frontend.openai.exchange import (
    decode_body,
    exchange_of,
    most_values,
    prompt_options,
    send_bytes,
)
from diptych_frontend.openai.field_rules import Rules, refused, taken
from diptych_frontend.openai.generation import adapter_of
from diptych_frontend.openai.request_workers import INLINE_BYTES, RequestWorkers
from diptych_frontend.openai.responses import encode
from diptych_protocol import (
    Array,
    EngineClient,
    InvalidRequestError,
    PoolingParams,
    TokensPrompt,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]

logger = logging.getLogger("diptych.openai")

SCORE_PATHS: Final = ("/score", "/v1/score")
RERANK_PATHS: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
"""The paths with a version are those of Jina's and Cohere's clients."""
Texts = str | list[str]
FIRST: Final = ("queries", "text_1", "data_1")
SECOND: Final = ("documents", "text_2", "data_2", "items")


class _Scoring(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both requests share."""

    RULES: ClassVar[Rules] = {
        "user": taken(NOBODY_ASKS),
        "truncate_prompt_tokens": refused("prompts are not cut"),
        "max_tokens_per_query": refused("prompts are not cut", 0),
        "max_tokens_per_doc": refused("prompts are not cut", 0),
        "instruction": refused("write it into the texts"),
        "chat_template_kwargs": refused("texts are no chats", {}),
    }

    model: str
    priority: Int64 | None = None
    cache_salt: CacheSalt | None = None

    user: str | None = None


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    """The answer of /score."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: str = "list"


class RerankDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankList(msgspec.Struct):
    """The answer of /rerank: the nearest documents first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class ScoreRequest(_Scoring, kw_only=True):
    """Body of POST /score: the first texts and the second, each under one of their names."""

    queries: Texts | None = None
    text_1: Texts | None = None
    data_1: Texts | None = None
    documents: Texts | None = None
    text_2: Texts | None = None
    data_2: Texts | None = None
    items: Texts | None = None

    def texts(self) -> tuple[list[str], list[str]]:
        """Return pairs: as many first texts as second ones, or a single first one.

        Raises `InvalidRequestError` naming the field.
        """
        first, second = (_listed(getattr(self, name), name) for name in self.fields())
        if len(first) not in (1, len(second)):
            raise InvalidRequestError(
                f"{len(first)} and {len(second)} texts: send one first text, or as many as second "
                "ones",
                param=FIRST[0],
            )
        return first, second

    def fields(self) -> tuple[str, str]:
        """Return the names of the fields of both. Raises `InvalidRequestError`."""
        return self._only(FIRST), self._only(SECOND)

    def _only(self, names: Sequence[str]) -> str:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(f"send exactly one of {', '.join(names)}", param=names[0])
        return given[0]

    def answer(self, request_id: str, scores: list[float], tokens: int) -> bytes:
        """Return the body of the answer."""
        data = [Score(index, score) for index, score in enumerate(scores)]
        usage = EmbeddingUsage(tokens, tokens)
        return encode(ScoreList(f"score-{request_id}", int(time.time()), self.model, data, usage))


class RerankRequest(_Scoring, kw_only=True):
    """Body of POST /rerank."""

    query: str
    documents: Texts
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The most results; 0 means all."""
    return_documents: bool | None = None
    """False omits the texts from the results."""

    def fields(self) -> tuple[str, str]:
        """See `ScoreRequest.fields`."""
        return "query", "documents"

    def texts(self) -> tuple[list[str], list[str]]:
        """Return the query and the documents. Raises `InvalidRequestError` naming the field."""
        return [self.query], _listed(self.documents, "documents")

    def answer(self, request_id: str, scores: list[float], tokens: int) -> bytes:
        """Return the body of the answer."""
        documents = _listed(self.documents, "documents")
        nearest = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            RerankResult(index, scores[index]) for index in nearest[: self.top_n or len(nearest)]
        ]
        if self.return_documents is not False:
            for result in results:
                result.document = RerankDocument(documents[result.index])
        usage = EmbeddingUsage(tokens, tokens)
        return encode(RerankList(f"rerank-{request_id}", self.model, usage, results))


Scoring = ScoreRequest | RerankRequest


def _listed(texts: Texts, field: str) -> list[str]:
    listed = [texts] if isinstance(texts, str) else texts
    if not 0 < len(listed) <= MAX_INPUTS:
        raise InvalidRequestError(
            f"{field} has {len(listed)} texts; send 1 to {MAX_INPUTS}", param=field
        )
    return listed


def cosines(first: Sequence[Vector], second: Sequence[Vector]) -> list[float]:
    """Return the cosine of each second vector with its first one, or with the only first one. The
    vectors have length 1."""
    import numpy as np  # here, as in `prompt_embeds`

    products = np.stack(first) * np.stack(second)
    scores: list[float] = products.sum(axis=1, dtype=np.float64).tolist()
    return scores


class ScoringRoute:
    """The ASGI endpoint of one kind of request."""

    def __init__(
        self,
        kind: type[ScoreRequest] | type[RerankRequest],
        engine: EngineClient,
        served_names: frozenset[str],
        metrics: ServerMetrics,
        workers: RequestWorkers,
    ) -> None:
        self._engine = engine
        self._served_names = served_names
        self._embedder = Embedder(engine, metrics)
        self._workers = workers
        self._decoder: msgspec.json.Decoder[Scoring] = msgspec.json.Decoder(kind)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        body = exchange.body
        if len(body) > INLINE_BYTES:
            self._engine.check_admission()
        request, prompts, fields = await self._workers.read(
            scope, body, lambda: self._read(scope, body)
        )
        adapter = adapter_of(request.model, self._served_names, self._engine)
        options = prompt_options(scope, exchange, adapter, request.priority)
        job = Job(prompts, PoolingParams(), options, exchange, fields)
        async with UntilDisconnect(receive, exchange) as client:
            vectors = await self._embedder.embed(job, _as_vector)
            first = fields.count(fields[0])
            scores = cosines(vectors[:first], vectors[first:])
            tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
            answer = request.answer(exchange.request_id, scores, tokens)
            await send_bytes(send, 200, answer, [])
        if client.gone:
            logger.info("%s: the client left; request aborted", exchange.request_id)

    def _read(self, scope: Scope, body: bytes) -> tuple[Scoring, list[TokensPrompt], list[str]]:
        """The request, its prompts, and which field each is from."""
        max_values = most_values(self._engine.max_model_len)
        request = decode_body(scope, body, self._decoder, max_values)
        fields, prompts = list[str](), list[TokensPrompt]()
        for field, texts in zip(request.fields(), request.texts(), strict=True):
            try:
                prompts += map(self._engine.renderer.render_prompt, texts)
            except InvalidRequestError as exc:
                raise called(exc, field) from exc
            fields += [field] * len(texts)
        if request.cache_salt is not None:
            for prompt in prompts:
                prompt["cache_salt"] = request.cache_salt
        return request, prompts, fields


def _as_vector(array: Array) -> Vector:
    import numpy as np

    return np.frombuffer(array.data, np.float32)
