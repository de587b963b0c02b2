"""/tokenize and /detokenize: converts texts and chats to tokens, and tokens to text.

The server's own tokenizer answers, which prompts use too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Generic, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from diptych_frontend.openai.api_types import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    ChatMessage,
    check_continues,
)
from diptych_frontend.openai.chat import ChatApi
from diptych_frontend.openai.exchange import decode_body, exchange_of, most_values, send_bytes
from diptych_frontend.openai.field_rules import Rules
from diptych_frontend.openai.generation import adapter_of
from diptych_frontend.openai.request_workers import RequestWorkers
from diptych_frontend.openai.responses import encode
from diptych_frontend.tool_calls.tools import MAX_TOOLS, Tool
from diptych_protocol import EngineClient, InvalidRequestError

PIECE: Final = 8192
"""The values of a list that are encoded at a time: meanwhile no other thread runs."""


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: `prompt`, or `messages` and its options."""

    OF_CHATS: ClassVar = (
        "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs",
    )  # fmt: skip
    RULES: ClassVar[Rules] = {
        name: ChatCompletionRequest.RULES[name]
        for name in ("chat_template", "media_io_kwargs", "mm_processor_kwargs")
    }

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)] | None
    ) = None
    add_special_tokens: bool | None = None
    """Whether to add the tokens that the model expects at the beginning of a prompt. The default is
    true for a `prompt`; a chat's template adds them itself."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse fields that contradict each other.

        Raises `InvalidRequestError` naming the field.
        """
        check_continues(self)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("send either prompt or messages", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens: the model's chat template writes them; leave it out",
                param="add_special_tokens",
            )
        for field in self.OF_CHATS:
            if self.prompt is not None and getattr(self, field) is not None:
                raise InvalidRequestError(f"{field} needs messages", param=field)


class Tokens(msgspec.Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: msgspec.Raw
    """A list of token ids."""
    token_strs: msgspec.Raw | None = None
    """A list of the tokens' texts, as the vocabulary writes them."""


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]
    model: str | None = None


class Text(msgspec.Struct):
    """The answer of /detokenize."""

    prompt: str


def tokenized(chat: ChatApi, engine: EngineClient, request: TokenizeRequest, _: Scope) -> Tokens:
    """Return the tokens of a prompt or a chat."""
    request.check()
    renderer = engine.renderer
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        ids = renderer.tokenize(request.prompt, add_special_tokens=special)
    else:
        [rendered] = chat.render(_as_chat(request), renderer)
        ids = rendered["prompt_token_ids"]
    strings = in_pieces(renderer.token_names(ids)) if request.return_token_strs else None
    return Tokens(len(ids), engine.max_model_len, in_pieces(ids), strings)


def detokenized(engine: EngineClient, request: DetokenizeRequest, _: Scope) -> Text:
    """Return the text of tokens, including special tokens."""
    ids, vocab_size = request.tokens, engine.model_config.vocab_size
    if len(ids) > engine.max_model_len:
        raise InvalidRequestError(
            f"tokens: {len(ids)} of them; send at most {engine.max_model_len}", param="tokens"
        )
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(
            f"tokens: {bad} is outside the vocabulary of {vocab_size}", param="tokens"
        )
    return Text(engine.renderer.decode(ids, skip_special_tokens=False))


def _as_chat(request: TokenizeRequest) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        model="",
        messages=request.messages or [],
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        tools=request.tools,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def in_pieces(values: Sequence[int] | Sequence[str]) -> msgspec.Raw:
    """Return a list as JSON, encoded piece by piece."""
    pieces = [encode(values[begin : begin + PIECE]) for begin in range(0, len(values), PIECE)]
    return msgspec.Raw(b"[" + b",".join(piece[1:-1] for piece in pieces) + b"]")


class _Body(Protocol):
    @property
    def model(self) -> str | None: ...


Body = TypeVar("Body", bound=_Body)


class TokenizerRoute(Generic[Body]):
    """The ASGI endpoint."""

    def __init__(
        self,
        kind: type[Body],
        answer: Callable[[Body, Scope], msgspec.Struct],
        image_word: bytes | None,
        engine: EngineClient,
        served_names: frozenset[str],
        workers: RequestWorkers,
    ) -> None:
        """kind: the type of requests. answer: returns the answer, or raises `InvalidRequestError`.
        image_word: a word that every body with images contains, if there are any."""
        self._decoder = msgspec.json.Decoder(kind)
        self._answer, self._image_word = answer, image_word
        self._engine = engine
        self._served_names = served_names
        self._workers = workers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = exchange_of(scope).body
        work = partial(self._answered, scope, body)
        answer = await self._workers.read(scope, body, work, self._image_word)
        await send_bytes(send, 200, answer, [])

    def _answered(self, scope: Scope, body: bytes) -> bytes:
        request = decode_body(scope, body, self._decoder, most_values(self._engine.max_model_len))
        if request.model is not None:
            adapter_of(request.model, self._served_names, self._engine)
        return encode(self._answer(request, scope))
