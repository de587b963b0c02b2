"""/v1/chat/completions: turns messages into a prompt, and outputs into the answer's bytes."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from starlette.types import Scope

from diptych_frontend.confined.json_cost import check_json_cost
from diptych_frontend.openai.api_types import (
    CalledTool,
    ChatCompletionRequest,
    ChatMessage,
    ImagePart,
    TextPart,
)
from diptych_frontend.openai.exchange import exchange_of
from diptych_frontend.openai.generation import Sound
from diptych_frontend.openai.kv_hints import TURN_S, turn_options
from diptych_frontend.openai.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Envelope,
    FunctionCall,
    ResponseWriter,
    Tally,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    by_likelihood,
    encode,
    logprob_value,
    prompt_logprobs,
    token_name,
    transfer_params,
)
from diptych_frontend.reasoning.parser import AnswerReaders, ReasoningParser
from diptych_frontend.reasoning.request_options import Effort, effort_kwargs, effort_variables
from diptych_frontend.text.answer_tokens import AnswerToken, AnswerTokens
from diptych_frontend.text.templates.confined_templates import Arguments
from diptych_frontend.tool_calls.calls import Pieces
from diptych_frontend.tool_calls.formats import HERMES, ToolCallFormat, check_takes_tools
from diptych_frontend.tool_calls.parser import ToolCallParser
from diptych_protocol import (
    UNREADABLE,
    UNSAID,
    CompletionOutput,
    InvalidRequestError,
    Logprob,
    Renderer,
    RequestOptions,
    RequestOutput,
    SamplingDefaults,
    SamplingParams,
    TokensPrompt,
)
from diptych_protocol.wire import MAX_PIN_S

ASSISTANT = "assistant"
Chat = TypeVar("Chat", bound=ChatCompletionRequest)

T = TypeVar("T", bound=TopLogprob)


def plain_message(message: ChatMessage, index: int) -> dict[str, Any]:
    """Return a message for a renderer: with one text, unless it has images, and without roles newer
    than the templates.

    Raises `InvalidRequestError` for an empty message, or one that calls a tool in invalid JSON.
    """
    content: Any = message.content
    if content is None and not message.tool_calls:
        raise InvalidRequestError(f"messages[{index}] has no content", param="messages")
    if isinstance(content, list):
        content = joined(content)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content or ""}
    if message.reasoning_content is not None:
        if role != ASSISTANT:
            raise InvalidRequestError(
                f"messages[{index}].reasoning_content: only an assistant's message has one",
                param="messages",
            )
        # Templates call it one or the other.
        plain["reasoning_content"] = plain["thinking"] = message.reasoning_content
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [plain_call(call, index) for call in message.tool_calls]
    return plain


def joined(parts: list[TextPart | ImagePart]) -> str | list[dict[str, Any]]:
    """Join the texts; return parts if there are images among them."""
    if any(isinstance(part, ImagePart) for part in parts):
        return [msgspec.to_builtins(part) for part in parts]
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))


def plain_call(call: CalledTool, index: int) -> dict[str, Any]:
    """Return a call as chat templates expect it: its arguments are an object instead of JSON."""
    written = call.function.arguments or "{}"
    try:
        check_json_cost(written.encode())
        arguments = msgspec.json.decode(written)
    except UNREADABLE as exc:
        raise InvalidRequestError(
            f"messages[{index}].tool_calls: the arguments of {call.function.name[:64]!r} are not "
            f"JSON: {exc}",
            param="messages",
        ) from exc
    if isinstance(arguments, dict):
        arguments = Arguments(arguments, written)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


class ChatApi:
    """The `Api` of /v1/chat/completions."""

    body_type = ChatCompletionRequest
    image_word = b"image_url"
    prompt_field = "messages"

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        calls: ToolCallFormat = HERMES,
        sampling: SamplingDefaults = UNSAID,
        template: str | None = None,
    ) -> None:
        """reasoning: separates the model's reasoning from its answers; None: it is not separated.

        calls: the model's format of tool calls.

        sampling: values for the fields that a request leaves out.

        template: the source of the model's chat template.
        """
        self._effort_variables = effort_variables(template)
        self.sampling = sampling
        self.reasoning = reasoning
        self._calls = calls

    def request(self, body: Chat, scope: Scope) -> Chat:
        if body.reasoning_effort is not None:
            self._set_effort(body.reasoning_effort, body, scope)
        return body

    def _set_effort(self, effort: Effort, chat: ChatCompletionRequest, scope: Scope) -> None:
        """Tell the chat template, if it has a variable for that; else tell the client."""
        if self._effort_variables:
            said = chat.chat_template_kwargs or {}
            chat.chat_template_kwargs = effort_kwargs(effort, self._effort_variables) | said
        elif self.reasoning is not None or effort != "none":
            exchange_of(scope).warn({chat.effort_field: "the chat template has no switch for it"})

    def params(self, request: ChatCompletionRequest) -> SamplingParams:
        request.check(num_prompts=1)
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        # max_tokens is the older name of max_completion_tokens.
        max_tokens = request.max_completion_tokens
        params = request.to_sampling_params(
            self.sampling,
            max_tokens=request.max_tokens if max_tokens is None else max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        if not request.tools:
            return params
        if self._format_of(request).has_special_markers and request.callable_tools:
            params.skip_special_tokens = False
        if self._calls is HERMES and not request.must_call:
            params.structured_outputs = request.with_calls(params.structured_outputs)
        return params

    def render(self, request: ChatCompletionRequest, renderer: Renderer) -> list[TokensPrompt]:
        messages = [plain_message(message, index) for index, message in enumerate(request.messages)]
        tools = request.callable_tools
        if tools and not request.must_call:
            remedy = "leave tools out, or force a call with tool_choice"
            check_takes_tools(renderer.chat_template, request.model or "this model", remedy)
        declared = msgspec.to_builtins(tools)
        prompt = renderer.render_chat(
            self._calls.prepared(messages, declared, renderer.chat_template),
            add_generation_prompt=request.add_generation_prompt is not False
            and not request.continue_final_message,
            continue_final_message=request.continue_final_message is True,
            tools=declared or None,
            template_kwargs=request.chat_template_kwargs,
        )
        return [prompt]

    def options(self, request: ChatCompletionRequest) -> RequestOptions:
        options: RequestOptions = {}
        if self.reasoning is not None:
            told = {"chat_template_kwargs": request.chat_template_kwargs or {}}
            options["reasoning_parser_kwargs"] = told
        session = request.session_id or request.prompt_cache_key
        stays = request.prompt_cache_retention
        if session or stays or request.kv_hints:
            seconds = MAX_PIN_S if stays == "24h" else TURN_S if session or stays else 0
            options.update(turn_options(session, request.kv_hints, seconds))
        return options

    def parts(self, request: ChatCompletionRequest, prompt: TokensPrompt) -> AnswerParts:
        """Return a reader of the answers to a request."""
        readers, callable_tools = None, request.callable_tools
        kwargs = None
        if self.reasoning is not None:
            kwargs = self.options(request).get("reasoning_parser_kwargs")
        if self.reasoning is not None and kwargs is not None:
            readers = self.reasoning.readers(
                prompt["prompt_token_ids"],
                kwargs,
                shown=request.include_reasoning is not False,
                calls=bool(callable_tools) and not request.must_call,
            )
        if not callable_tools:
            return AnswerParts(None, readers)
        functions = [tool.function for tool in callable_tools]
        tools = {function.name: function.parameters or {} for function in functions}
        style, parallel = self._format_of(request), request.parallel_calls
        return AnswerParts(lambda: ToolCallParser(style, tools, parallel=parallel), readers)

    def _format_of(self, request: ChatCompletionRequest) -> ToolCallFormat:
        """How an answer calls tools: one that must has the form of `forced_call`."""
        return HERMES if request.must_call else self._calls

    def writer(
        self,
        sound: Sound[ChatCompletionRequest, ChatCompletionRequest],
        request_id: str,
        created: int,
    ) -> ResponseWriter:
        request = sound.request
        envelope = Envelope(
            f"chatcmpl-{request_id}", created, request.model, request.n or 1, request.stream_options
        )
        [prompt] = sound.prompts
        return ChatWriter(envelope, request.top_logprobs or 0, self.parts(request, prompt))


class AnswerParts:
    """Splits the answers to one request, output by output: into reasoning, text and calls."""

    def __init__(
        self, calls: Callable[[], ToolCallParser] | None, reasoning: AnswerReaders | None
    ) -> None:
        """calls: creates a parser for the calls of tools in one answer; None if no calls are
        allowed.

        reasoning: separates the model's reasoning; None if the answers are all of the text.
        """
        self._new_parser = calls
        self._reasoning = reasoning
        self.are_whole = reasoning is None and calls is None
        """Whether the answers consist of text only."""
        self._parsers: dict[int, ToolCallParser] = {}
        """By the answer's index."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of reasoning in all answers so far; None if reasoning is not separated."""
        return None if self._reasoning is None else self._reasoning.num_tokens

    def num_calls(self, index: int) -> int:
        """Return the number of calls in the answer of this index so far."""
        parser = self._parsers.get(index)
        return 0 if parser is None else parser.num_calls

    def read(self, output: CompletionOutput) -> tuple[str, Pieces, str | None]:
        """Return the reasoning in an output, its text with the calls that it completes, and why it
        ended, if it did."""
        finish_reason = output.finish_reason
        reasoning, text = "", output.text
        if self._reasoning is not None:
            reasoning, text = self._reasoning.read(output)
        if self._new_parser is None:
            return reasoning, [text] if text else [], finish_reason
        parser = self._parsers.get(output.index)
        if parser is None:
            parser = self._parsers[output.index] = self._new_parser()
        is_cut = finish_reason != "stop" or isinstance(output.stop_reason, str)
        pieces = parser.push(text, last=output.finished, cut=is_cut)
        if finish_reason == "stop" and parser.num_calls:
            finish_reason = "tool_calls"
        return reasoning, pieces, finish_reason


class ChatWriter(ResponseWriter):
    text_field = b"content"
    chunk_type = ChatChunk
    object_name = "chat.completion.chunk"

    def __init__(self, envelope: Envelope, top_logprobs: int, parts: AnswerParts) -> None:
        super().__init__(envelope, is_quick=parts.are_whole)
        self._top_logprobs = top_logprobs
        self._parts = parts
        self._tokens = defaultdict[int, AnswerTokens](AnswerTokens)

    def _choices(
        self, prompt_index: int, output: RequestOutput, tally: Tally
    ) -> list[ChatChunkChoice]:
        choices = []
        for answer in output.outputs:
            reasoning, text, calls, finish_reason = self._parse(answer)
            delta = Delta(text, reasoning_content=reasoning or UNSET)
            if calls:
                first = self._parts.num_calls(answer.index) - len(calls)
                for index, call in enumerate(calls, first):
                    call.index = index
                delta.tool_calls = calls
            if answer.index not in self._begun:
                self._begun.add(answer.index)
                delta.role = ASSISTANT
            logprobs = None
            if answer.logprobs is not None or self._tokens:
                logprobs = self._logprobs(answer)
            choices.append(
                ChatChunkChoice(answer.index, delta, logprobs, finish_reason, answer.stop_reason)
            )
        if not self._parts.are_whole:
            tally.reasoning_tokens = self._parts.num_reasoning_tokens
        return choices

    def answer(self, outputs: Sequence[Sequence[RequestOutput]], tally: Tally) -> bytes:
        choices = [self._choice(choice) for output in outputs[0] for choice in output.outputs]
        tally.reasoning_tokens = self._parts.num_reasoning_tokens
        message = ChatCompletion(
            id=self._envelope.response_id,
            object="chat.completion",
            created=self._envelope.created,
            model=self._envelope.model,
            choices=sorted(choices, key=lambda c: c.index),
            usage=tally.usage(),
            kv_transfer_params=transfer_params(outputs[0][-1]),
            prompt_logprobs=prompt_logprobs(outputs[0][-1]),
            warnings=self.warnings,
        )
        return encode(message)

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        reasoning, text, calls, finish_reason = self._parse(output)
        message = AnswerMessage(ASSISTANT, text, reasoning_content=reasoning or UNSET)
        if calls:
            message.content = text.strip() or None
            message.tool_calls = calls
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=self._logprobs(output),
            finish_reason=finish_reason,
            stop_reason=output.stop_reason,
        )

    def _parse(self, output: CompletionOutput) -> tuple[str, str, list[ToolCall], str | None]:
        """As `AnswerParts.read`, with calls as the API tells them, beside the text."""
        if self._parts.are_whole:
            return "", output.text, [], output.finish_reason
        reasoning, pieces, finish_reason = self._parts.read(output)
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [
            ToolCall(f"call_{secrets.token_hex(12)}", FunctionCall(piece.name, piece.arguments))
            for piece in pieces
            if not isinstance(piece, str)
        ]
        return reasoning, text, calls, finish_reason

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if output.logprobs is None and output.index not in self._tokens:
            return None
        told = self._tokens[output.index].push(output)
        return ChatLogprobs([self._token_logprob(token) for token in told]) if told else None

    def _token_logprob(self, token: AnswerToken) -> TokenLogprob:
        top = [
            _facts(TopLogprob, candidate, entry, token)
            for candidate, entry in by_likelihood(token.candidates)[: self._top_logprobs]
        ]
        shaped = _facts(TokenLogprob, token.token_id, token.candidates[token.token_id], token)
        shaped.top_logprobs = top
        return shaped


def _facts(kind: type[T], candidate: int, entry: Logprob, token: AnswerToken) -> T:
    """What is told of a candidate for the place of a token; it may be the token itself."""
    said = token.said if candidate == token.token_id else entry.token_bytes or b""
    return kind(token_name(candidate, entry), logprob_value(entry), list(said))
