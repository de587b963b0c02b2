"""/score and /rerank: compares texts by the cosine of their embeddings."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec
from msgspec import UNSET, UnsetType

from diptych_frontend.openai.api_types import NOBODY_ASKS, CacheSalt, Int64
from diptych_frontend.openai.embeddings import MAX_INPUTS, EmbeddingUsage
from diptych_frontend.openai.exchange import Exchange
from diptych_frontend.openai.field_rules import Rules, refused, taken
from diptych_frontend.openai.responses import encode
from diptych_protocol import Array, InvalidRequestError, PoolingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]

SCORE_PATHS: Final = ("/score", "/v1/score")
RERANK_PATHS: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
"""The paths with a version are those of Jina's and Cohere's clients."""
Texts = str | list[str]
FIRST: Final = ("queries", "text_1", "data_1")
SECOND: Final = ("documents", "text_2", "data_2", "items")


class _Scoring(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both requests share; see `PoolingRequest`."""

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

    def params(self) -> PoolingParams:
        return PoolingParams()

    def kept(self, vector: Array) -> Vector:
        import numpy as np  # here, as in `prompt_embeds`

        return np.frombuffer(vector.data, np.float32)

    @abstractmethod
    def texts(self) -> dict[str, list[str]]:
        """Return the first texts, then the second: as many, or a single first one."""

    def answer(self, kept: list[Vector], tokens: int, exchange: Exchange) -> bytes:
        first = len(next(iter(self.texts().values())))
        scores = cosines(kept[:first], kept[first:])
        return encode(self.scored(scores, EmbeddingUsage(tokens, tokens), exchange.request_id))

    @abstractmethod
    def scored(
        self, scores: list[float], usage: EmbeddingUsage, request_id: str
    ) -> ScoreList | RerankList: ...


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

    def texts(self) -> dict[str, list[str]]:
        names = self._only(FIRST), self._only(SECOND)
        first, second = (_listed(getattr(self, name), name) for name in names)
        if len(first) not in (1, len(second)):
            raise InvalidRequestError(
                f"{len(first)} and {len(second)} texts: send one first text, or as many as second "
                "ones",
                param=FIRST[0],
            )
        return dict(zip(names, (first, second), strict=True))

    def _only(self, names: Sequence[str]) -> str:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(f"send exactly one of {', '.join(names)}", param=names[0])
        return given[0]

    def scored(self, scores: list[float], usage: EmbeddingUsage, request_id: str) -> ScoreList:
        data = [Score(index, score) for index, score in enumerate(scores)]
        return ScoreList(f"score-{request_id}", int(time.time()), self.model, data, usage)


class RerankRequest(_Scoring, kw_only=True):
    """Body of POST /rerank."""

    query: str
    documents: Texts
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The most results; 0 means all."""
    return_documents: bool | None = None
    """False omits the texts from the results."""

    def texts(self) -> dict[str, list[str]]:
        return {"query": [self.query], "documents": _listed(self.documents, "documents")}

    def scored(self, scores: list[float], usage: EmbeddingUsage, request_id: str) -> RerankList:
        nearest = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            RerankResult(index, scores[index]) for index in nearest[: self.top_n or len(nearest)]
        ]
        if self.return_documents is not False:
            documents = self.texts()["documents"]
            for result in results:
                result.document = RerankDocument(documents[result.index])
        return RerankList(f"rerank-{request_id}", self.model, usage, results)


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
