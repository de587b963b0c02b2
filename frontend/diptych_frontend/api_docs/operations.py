"""The server's operations: each route with the types of its requests and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from diptych_frontend.anthropic import answers as anthropic
from diptych_frontend.anthropic.answers import FailureBody, Message
from diptych_frontend.anthropic.api_types import CountTokensRequest, MessagesRequest
from diptych_frontend.anthropic.routes import TokenCount
from diptych_frontend.batches_api.api_types import (
    Batch,
    BatchList,
    BatchRequest,
    FileDeleted,
    FileForm,
    FileList,
    FileObject,
)
from diptych_frontend.openai.api_types import ChatCompletionRequest, CompletionRequest
from diptych_frontend.openai.embeddings import EmbeddingList, EmbeddingRequest
from diptych_frontend.openai.errors import ErrorBody
from diptych_frontend.openai.rejection import LostRequest
from diptych_frontend.openai.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Health,
    ModelCard,
    ModelList,
)
from diptych_frontend.responses_api import answers as responses
from diptych_frontend.responses_api.answers import Response
from diptych_frontend.responses_api.api_types import ResponsesRequest
from diptych_frontend.responses_api.routes import InputItems, InputTokens
from diptych_frontend.vllm_api.scoring import (
    RERANK_PATHS,
    SCORE_PATHS,
    RerankList,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from diptych_frontend.vllm_api.tokenization import DetokenizeRequest, Text, TokenizeRequest, Tokens

Kind = type[msgspec.Struct]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    request: Kind | None = None
    answer: Kind | None = None
    """None: the answer is no JSON object but, for example, a text."""
    takes_form: bool = False
    """Whether the request is multipart/form-data instead of JSON."""
    events: tuple[Kind, ...] = ()
    """The data of the server-sent events of an answer with `stream: true`."""
    query: tuple[str, ...] = ()
    """The query parameters."""
    failure: Kind = ErrorBody
    needs_key: bool = True
    """Whether a server with API keys requires one."""

    @property
    def parameters(self) -> list[str]:
        """The names in braces in the path."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]


OPERATIONS: Final = (
    Operation(
        "post", "/v1/chat/completions", "An answer to a chat.", ChatCompletionRequest,
        ChatCompletion, events=(ChatChunk, ErrorBody),
    ),
    Operation(
        "post", "/v1/completions", "Texts that go on.", CompletionRequest, Completion,
        events=(Completion, ErrorBody),
    ),
    Operation(
        "post", "/v1/responses", "An answer in a conversation, by OpenAI's Responses API.",
        ResponsesRequest, Response, events=responses.EVENTS,
    ),
    Operation("get", "/v1/responses/{response_id}", "A stored response.", answer=Response),
    Operation("delete", "/v1/responses/{response_id}", "Delete a stored response."),
    Operation(
        "get", "/v1/responses/{response_id}/input_items", "What a stored response was asked.",
        answer=InputItems, query=("after", "limit", "order"),
    ),
    Operation(
        "post", "/v1/responses/input_tokens", "The tokens of a response's prompt.",
        ResponsesRequest, InputTokens,
    ),
    Operation(
        "post", "/v1/messages", "An answer in a conversation, by Anthropic's Messages API.",
        MessagesRequest, Message, events=(*anthropic.EVENTS, FailureBody), failure=FailureBody,
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "The tokens of a conversation.", CountTokensRequest,
        TokenCount, failure=FailureBody,
    ),
    Operation("post", "/v1/embeddings", "Vectors of texts.", EmbeddingRequest, EmbeddingList),
    *(
        Operation("post", path, "How near texts are to each other.", ScoreRequest, ScoreList)
        for path in SCORE_PATHS
    ),
    *(
        Operation("post", path, "The documents nearest to a text.", RerankRequest, RerankList)
        for path in RERANK_PATHS
    ),
    Operation(
        "post", "/v1/files", "Upload the requests of a batch.", FileForm, FileObject,
        takes_form=True,
    ),
    Operation(
        "get", "/v1/files", "The files of the client.", answer=FileList,
        query=("after", "limit", "order", "purpose"),
    ),
    Operation("get", "/v1/files/{file_id}", "What is known of a file.", answer=FileObject),
    Operation("delete", "/v1/files/{file_id}", "Delete a file.", answer=FileDeleted),
    Operation("get", "/v1/files/{file_id}/content", "The bytes of a file."),
    Operation(
        "post", "/v1/batches", "Let the requests of a file be answered.", BatchRequest, Batch
    ),
    Operation(
        "get", "/v1/batches", "The batches of the client.", answer=BatchList,
        query=("after", "limit"),
    ),
    Operation("get", "/v1/batches/{batch_id}", "A batch as it is now.", answer=Batch),
    Operation(
        "post", "/v1/batches/{batch_id}/cancel", "Let a batch end with what is done.",
        answer=Batch,
    ),
    Operation(
        "get", "/v1/models", "The model under each of its names, and its adapters.",
        answer=ModelList,
    ),
    Operation("get", "/v1/models/{model}", "One of them.", answer=ModelCard),
    Operation("post", "/tokenize", "The tokens of a text or a chat.", TokenizeRequest, Tokens),
    Operation("post", "/detokenize", "The text of tokens.", DetokenizeRequest, Text),
    Operation(
        "post", "/v1/kv_transfer/reject", "Give back the blocks of a hand-off that will not come.",
        LostRequest,
    ),
    Operation("get", "/health", "Readiness.", answer=Health, needs_key=False),
    Operation("get", "/live", "Liveness.", answer=Health, needs_key=False),
    Operation("get", "/ping", "Readiness.", answer=Health, needs_key=False),
    Operation("post", "/ping", "Readiness.", answer=Health, needs_key=False),
    Operation("get", "/metrics", "Metrics for Prometheus.", needs_key=False),
    Operation("get", "/version", "The version of this server.", needs_key=False),
    Operation("get", "/openapi.json", "This description.", needs_key=False),
    Operation("get", "/docs", "This description as a page.", needs_key=False),
)  # fmt: skip
