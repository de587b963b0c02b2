"""/v1/responses, /v1/responses/ID for stored responses, and the pages of their `input_items`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from diptych_frontend.openai.chat import ChatApi
from diptych_frontend.openai.exchange import decode_query, exchange_of
from diptych_frontend.openai.generation import Sound
from diptych_frontend.openai.responses import AnswerWriter, json_response
from diptych_frontend.responses_api.answers import Keep, ResponsesWriter, new_response
from diptych_frontend.responses_api.answers import Response as ResponseBody
from diptych_frontend.responses_api.api_types import Item, Message, ResponsesRequest, as_items
from diptych_frontend.responses_api.conversation import ResponseChat, as_chat
from diptych_frontend.responses_api.output import NewIds, Output
from diptych_frontend.responses_api.store import ResponseStore, StoredResponse
from diptych_protocol import InvalidRequestError, Renderer, TokensPrompt


class ResponsesApi:
    """The `Api` of /v1/responses, which translates to and from chats."""

    body_type = ResponsesRequest
    image_word = b"input_image"
    prompt_field = "input"

    def __init__(self, chat: ChatApi, store: ResponseStore) -> None:
        self._chat, self._store = chat, store
        self.params, self.options = chat.params, chat.options

    def request(self, body: ResponsesRequest, scope: Scope) -> ResponseChat:
        exchange = exchange_of(scope)
        before = self._before(body, exchange.tenant)
        chat = as_chat(body, () if before is None else before.items)
        if body.is_stored:
            chat.tenant = exchange.tenant
            chat.size = len(exchange.body) + (0 if before is None else before.size)
        return self._chat.request(chat, scope)

    def render(self, request: ResponseChat, renderer: Renderer) -> list[TokensPrompt]:
        try:
            return self._chat.render(request, renderer)
        except InvalidRequestError as exc:
            if not (exc.param or "").startswith("messages"):
                raise
            # The client sent items, which share messages.
            said = re.sub(r"^messages[\w.\[\]]*", "a message of input", str(exc))
            raise InvalidRequestError(said, param=self.prompt_field) from exc

    def _before(self, body: ResponsesRequest, tenant: str) -> StoredResponse | None:
        if body.previous_response_id is None:
            return None
        kept = self._store.get(tenant, body.previous_response_id)
        if kept is None:
            raise InvalidRequestError(
                f"there is no stored response {body.previous_response_id[:100]!r}; send the whole "
                "conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return kept

    def counted(self, renderer: Renderer, body: ResponsesRequest, scope: Scope) -> InputTokens:
        """Count the tokens of a prompt. Raises `InvalidRequestError`."""
        [prompt] = self.render(self.request(body, scope), renderer)
        return InputTokens(len(prompt["prompt_token_ids"]))

    def writer(
        self, sound: Sound[ResponsesRequest, ResponseChat], request_id: str, created: int
    ) -> AnswerWriter:
        [prompt] = sound.prompts
        parts = self._chat.parts(sound.request, prompt)
        ids = NewIds(sound.kept_as)
        response = new_response(sound.body, sound.params, created, ids)
        return ResponsesWriter(response, Output(ids), parts, self._keep(sound))

    def _keep(self, sound: Sound[ResponsesRequest, ResponseChat]) -> Keep | None:
        store, request = self._store, sound.request
        if not sound.body.is_stored:
            return None

        def keep(response: ResponseBody, body: bytes) -> None:
            items = [*request.items, *as_items(msgspec.to_builtins(response.output))]
            size = request.size + len(body)
            kept = StoredResponse(body, items, len(request.items), size)
            store.put(request.tenant, response.id, kept)

        return keep


class StoredResponses:
    """The endpoint that returns and deletes stored responses."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def one(self, request: Request) -> Response:
        """GET or DELETE. Raises `InvalidRequestError` for a response that does not exist."""
        response_id = request.path_params["response_id"]
        if request.query_params.get("stream") == "true":
            raise InvalidRequestError("a stored response is not streamed", param="stream")
        tenant = exchange_of(request.scope).tenant
        if request.method == "DELETE" and self._store.delete(tenant, response_id):
            deleted = {"id": response_id, "object": "response", "deleted": True}
            return json_response(deleted)
        return Response(self._kept(request).body, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """GET a response's input, with the conversation before. Raises `InvalidRequestError`."""
        kept = self._kept(request)
        query = decode_query(request.query_params, ItemQuery, most=100)
        items = kept.items[: kept.num_input]
        return json_response(page_of(request.path_params["response_id"], items, query))

    def _kept(self, request: Request) -> StoredResponse:
        response_id = request.path_params["response_id"]
        kept = self._store.get(exchange_of(request.scope).tenant, response_id)
        if kept is None:
            raise InvalidRequestError(
                f"there is no stored response {response_id[:100]!r}", status=404, code="not_found"
            )
        return kept


class InputTokens(msgspec.Struct):
    """The answer of /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


class ItemQuery(msgspec.Struct):
    """The query parameters of a list of input items."""

    after: str | None = None
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"


class InputItems(msgspec.Struct, kw_only=True):
    """A page of input items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(response_id: str, items: Sequence[Item], query: ItemQuery) -> InputItems:
    """Return the items that a client asks for. Raises `InvalidRequestError` for an unknown one."""
    told = [_told(response_id, number, item) for number, item in enumerate(items)]
    if query.order == "desc":
        told.reverse()
    begin = _begin(query.after, [item["id"] for item in told])
    shown = told[begin : begin + query.limit]
    return InputItems(
        data=shown,
        first_id=shown[0]["id"] if shown else None,
        last_id=shown[-1]["id"] if shown else None,
        has_more=len(told) > begin + query.limit,
    )


def _told(response_id: str, number: int, item: Item) -> dict[str, Any]:
    """An item as plain values, with an id and with content in parts."""
    value: dict[str, Any] = msgspec.to_builtins(item)
    own = f"{_PREFIXES[value['type']]}_{response_id.removeprefix('resp_')}_{number}"
    value = {name: each for name, each in value.items() if each is not None} | {"id": own}
    if isinstance(item, Message):
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            value["content"] = [{"type": kind, "text": item.content}]
        value["status"] = item.status or "completed"
    return value


def _begin(after: str | None, ids: Sequence[str]) -> int:
    if after is None:
        return 0
    if after not in ids:
        raise InvalidRequestError(f"after: there is no item {after[:100]!r}", param="after")
    return ids.index(after) + 1
