"""Builds the ASGI application: all routes and layers around one `EngineClient`."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from diptych_frontend.anthropic.answers import ANTHROPIC
from diptych_frontend.anthropic.api_types import CountTokensRequest
from diptych_frontend.anthropic.routes import MessagesApi, counted
from diptych_frontend.api_docs.page import docs_routes
from diptych_frontend.batches_api.in_process import AskedByBatch
from diptych_frontend.batches_api.routes import FILES_PATH, BatchRoutes
from diptych_frontend.batches_api.service import BatchService
from diptych_frontend.browsers import BrowserGate, BrowserRules
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.api_keys import OPEN_PATHS, ApiKeys, KeyGate
from diptych_frontend.openai.asgi import BodyReader, Boundary, unknown_path
from diptych_frontend.openai.chat import ChatApi
from diptych_frontend.openai.completions import CompletionApi
from diptych_frontend.openai.embeddings import EmbeddingRequest, PoolingRoute
from diptych_frontend.openai.generation import GenerationRoute, unknown_model
from diptych_frontend.openai.rejection import RejectRoute, give_back
from diptych_frontend.openai.request_workers import RequestWorkers
from diptych_frontend.openai.responses import ModelCard, ModelList, json_response
from diptych_frontend.probes import NO_SITES, Probes
from diptych_frontend.quotas.quotas import Quotas
from diptych_frontend.reasoning.parser import ReasoningParser
from diptych_frontend.responses_api.api_types import ResponsesRequest
from diptych_frontend.responses_api.routes import ResponsesApi, StoredResponses
from diptych_frontend.responses_api.store import ResponseStore
from diptych_frontend.text.templates import confined_templates
from diptych_frontend.tool_calls.formats import format_for
from diptych_frontend.vllm_api.scoring import RERANK_PATHS, SCORE_PATHS, RerankRequest, ScoreRequest
from diptych_frontend.vllm_api.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    TokenizerRoute,
    detokenized,
    tokenized,
)
from diptych_protocol import UNSAID, EngineClient, OurOptions, SamplingDefaults
from diptych_protocol.router_settings import UnknownFields

OURS: Final[dict[str, frozenset[str]]] = {
    "generate": frozenset({"take_at_once", *OurOptions.__annotations__}),
    "encode": frozenset(OurOptions.__annotations__),
    "check_admission": frozenset({"num_tokens", "tenant"}),
}
"""What these methods of our `EngineClient` accept by name beyond vLLM's parameters."""
MAX_BODY_BYTES = 4 << 20
DIALECTS = {"/v1/messages": ANTHROPIC}
"""The error format of each API, by the beginning of its paths."""


def accepted(engine: EngineClient) -> EngineClient:
    """Return the engine itself, or a wrapper that passes only the arguments that it accepts.

    An engine needs only the members of vLLM's documentation, with the parameters given there. Their
    signatures are read once, here, and not in each call.
    """
    if isinstance(engine, EngineClient) and not any(_foreign(engine, name) for name in OURS):
        return engine
    return cast("EngineClient", _DocumentedEngine(engine))


class _DocumentedEngine:
    """Has all that an `EngineClient` has: what the engine lacks is as in that class."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        for name in OURS:
            setattr(self, name, _without(_foreign(self, name), getattr(self, name)))

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._engine, name):
            return getattr(self._engine, name)
        return inspect.getattr_static(EngineClient, name).__get__(self)


def _foreign(engine: Any, name: str) -> frozenset[str]:
    """Which of our parameters a method of the engine's does not take."""
    parameters = inspect.signature(getattr(engine, name)).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return frozenset()
    return OURS[name].difference(parameters)


def _without(foreign: frozenset[str], method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, called without these parameters."""
    if not foreign:
        return method

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **{k: v for k, v in kwargs.items() if k not in foreign})

    return call


def build_app(
    engine: EngineClient,
    *,
    served_names: Sequence[str] = (),
    api_keys: ApiKeys | None = None,
    metrics: ServerMetrics | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    batches: BatchService | None = None,
    extra_routes: Sequence[BaseRoute] = (),
    extra_open_paths: frozenset[str] = frozenset(),
    browsers: BrowserRules = NO_SITES,
    sampling: SamplingDefaults = UNSAID,
    unknown_fields: UnknownFields = "warn",
    quotas: Quotas | None = None,
) -> ASGIApp:
    """The HTTP server of one engine client.

    Args:
        engine: started and stopped by the caller. Other clients work too: see `accepted`.
        served_names: the names under which clients may ask for the model; the engine's own name
            if there are none.
        api_keys: if given, all routes but probes and metrics want one as a bearer token.
        metrics: one that knows `stats_by_engine` also reports on the engines.
        max_body_bytes: larger request bodies are refused with 413.
        batches: started here with the routes of this app, and closed by the caller; None keeps no
            files.
        extra_routes: further Starlette routes, behind the same layers.
        extra_open_paths: paths of them that want no key.
        browsers: the names of the server and the sites whose pages may use it. With API keys it
            answers under any name.
        sampling: what requests get that leave these fields out; where it says nothing, what the
            model's files say.
        unknown_fields: see `RouterSettings`.
        quotas: the limits of the keys, refreshed and closed by the caller; None: there are none.
    """
    engine = accepted(engine)
    names = tuple(served_names) or (engine.model_name,)
    metrics = metrics or ServerMetrics(engine.model_name)
    known = frozenset(names)
    sampling = sampling.over(getattr(engine.renderer, "sampling", UNSAID))
    models = Models(engine, names, sampling)
    workers = RequestWorkers()
    if engine.renderer.chat_template is not None:
        confined_templates.get_ready()
    completions = GenerationRoute(CompletionApi(sampling), engine, known, metrics, workers)
    chat_api = ChatApi(
        ReasoningParser.of(engine), format_for(engine), sampling, engine.renderer.chat_template
    )
    chat = GenerationRoute(chat_api, engine, known, metrics, workers)
    messages = GenerationRoute(MessagesApi(chat_api), engine, known, metrics, workers)
    store = ResponseStore()
    responses_api = ResponsesApi(chat_api, store)
    responses = GenerationRoute(responses_api, engine, known, metrics, workers)
    input_tokens = TokenizerRoute(
        ResponsesRequest, partial(responses_api.counted, engine.renderer),
        ResponsesApi.image_word, engine, known, workers,
    )  # fmt: skip
    stored = StoredResponses(store)
    count_tokens = TokenizerRoute(
        CountTokensRequest, partial(counted, chat_api, engine.renderer),
        MessagesApi.image_word, engine, known, workers,
    )  # fmt: skip
    embeddings, score, rerank = (
        PoolingRoute(kind, engine, known, metrics, workers)
        for kind in (EmbeddingRequest, ScoreRequest, RerankRequest)
    )
    tokenize = TokenizerRoute(
        TokenizeRequest, partial(tokenized, chat_api, engine),
        ChatApi.image_word, engine, known, workers,
    )  # fmt: skip
    detokenize = TokenizerRoute(
        DetokenizeRequest, partial(detokenized, engine), None, engine, known, workers
    )
    router = Router(
        [
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
            Route("/v1/responses/{response_id}/input_items", stored.input_items),
            Route("/v1/responses/{response_id}", stored.one, methods=["GET", "DELETE"]),
            Route("/v1/messages", messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
            *(Route(path, score, methods=["POST"]) for path in SCORE_PATHS),
            *(Route(path, rerank, methods=["POST"]) for path in RERANK_PATHS),
            *BatchRoutes(batches).routes(),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/v1/kv_transfer/reject", RejectRoute(engine, workers), methods=["POST"]),
            Route("/v1/models", models.list),
            Route("/v1/models/{model:path}", models.one),
            *docs_routes(),
            *Probes(engine, metrics).routes(),
            *extra_routes,
        ],
        redirect_slashes=False,
        default=unknown_path,
    )
    bounded = partial(
        Boundary,
        on_answer=metrics.count_answer,
        on_refusal=partial(give_back, engine),
        refuses_unknown=unknown_fields == "refuse",
        quotas=quotas,
    )
    app: ASGIApp = BodyReader(router, max_body_bytes, frozenset({FILES_PATH}))
    if batches is not None:
        asked = bounded(AskedByBatch(app))
        batches.start(asked)
    if api_keys is not None:
        app = KeyGate(app, api_keys, OPEN_PATHS | extra_open_paths)
    app = BrowserGate(app, browsers, any_host=api_keys is not None)
    return bounded(app, dialects=DIALECTS)


class Models:
    """Answers /v1/models: one model, under each of its names, and its adapters."""

    def __init__(
        self, engine: EngineClient, names: Sequence[str], sampling: SamplingDefaults
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._created = int(time.time())
        self._names = names

    def _cards(self) -> dict[str, ModelCard]:
        card = partial(
            ModelCard,
            created=self._created,
            max_model_len=self._engine.max_model_len,
            sampling=self._sampling,
        )
        cards = {name: card(name) for name in self._names}
        for name in self._engine.adapters:
            cards.setdefault(name, card(name, parent=self._names[0]))
        return cards

    async def list(self, request: Request) -> Response:
        return json_response(ModelList(list(self._cards().values())))

    async def one(self, request: Request) -> Response:
        cards = self._cards()
        name = request.path_params["model"]
        if name not in cards:
            raise unknown_model(name, frozenset(cards))
        return json_response(cards[name])
