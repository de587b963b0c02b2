"""/v1/chat/completions: messages become a prompt, outputs become the answer's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych_frontend.openai.api_types import ChatCompletionRequest, ChatMessage
from diptych_frontend.openai.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChunkUsage,
    Delta,
    Envelope,
    ResponseWriter,
    Tally,
    TokenLogprob,
    TopLogprob,
    Usage,
    by_likelihood,
    encode,
    logprob_value,
    sse,
    token_text,
    transfer_params,
)
from diptych_protocol import (
    CompletionOutput,
    InvalidRequestError,
    Logprob,
    Renderer,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)

ASSISTANT = "assistant"


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates know it: one text, and no role newer than the templates."""
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    plain = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


class ChatApi:
    """The `Api` of /v1/chat/completions."""

    request_type = ChatCompletionRequest
    prompt_field = "messages"

    def params(self, request: ChatCompletionRequest) -> SamplingParams:
        request.check(num_prompts=1)
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        # max_tokens is the older name of max_completion_tokens.
        max_tokens = request.max_completion_tokens
        return request.to_sampling_params(
            max_tokens=request.max_tokens if max_tokens is None else max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )

    def render(self, request: ChatCompletionRequest, renderer: Renderer) -> list[TokensPrompt]:
        prompt = renderer.render_chat(
            [plain_message(message) for message in request.messages],
            add_generation_prompt=request.add_generation_prompt is not False,
        )
        return [prompt]

    def writer(
        self, request: ChatCompletionRequest, request_id: str, created: int
    ) -> ResponseWriter:
        envelope = Envelope(
            f"chatcmpl-{request_id}", created, request.model, request.n or 1, request.stream_options
        )
        return ChatWriter(envelope, request.top_logprobs or 0)


class ChatWriter(ResponseWriter):
    def __init__(self, envelope: Envelope, top_logprobs: int) -> None:
        super().__init__(envelope)
        self._top_logprobs = top_logprobs
        self._begun: set[int] = set()

    def events(self, prompt_index: int, output: RequestOutput, tally: Tally) -> bytes:
        choices = [self._chunk_choice(choice) for choice in output.outputs]
        chunk = self._chunk(choices, self._chunk_usage(tally))
        chunk.kv_transfer_params = transfer_params(output)
        return sse(chunk)

    def usage_event(self, usage: Usage) -> bytes:
        return sse(self._chunk([], usage))

    def answer(self, outputs: Sequence[Sequence[RequestOutput]], tally: Tally) -> bytes:
        choices = [
            ChatChoice(
                index=choice.index,
                message=AnswerMessage(ASSISTANT, choice.text),
                logprobs=self._logprobs(choice),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for output in outputs[0]
            for choice in output.outputs
        ]
        message = ChatCompletion(
            id=self._envelope.response_id,
            object="chat.completion",
            created=self._envelope.created,
            model=self._envelope.model,
            choices=sorted(choices, key=lambda c: c.index),
            usage=tally.usage(),
            kv_transfer_params=transfer_params(outputs[0][-1]),
        )
        return encode(message)

    def _chunk(self, choices: list[ChatChunkChoice], usage: ChunkUsage) -> ChatChunk:
        head = self._envelope
        return ChatChunk(
            head.response_id, "chat.completion.chunk", head.created, head.model, choices, usage
        )

    def _chunk_choice(self, output: CompletionOutput) -> ChatChunkChoice:
        delta = Delta(output.text)
        if output.index not in self._begun:
            self._begun.add(output.index)
            delta.role = ASSISTANT
        return ChatChunkChoice(
            index=output.index,
            delta=delta,
            logprobs=self._logprobs(output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        content = []
        for token_id, candidates in zip(output.token_ids, output.logprobs, strict=True):
            top = [
                TopLogprob(*_token_facts(candidate_id, entry))
                for candidate_id, entry in by_likelihood(candidates)[: self._top_logprobs]
            ]
            facts = _token_facts(token_id, candidates[token_id])
            content.append(TokenLogprob(*facts, top_logprobs=top))
        return ChatLogprobs(content)


def _token_facts(token_id: int, entry: Logprob) -> tuple[str, float, list[int]]:
    text = token_text(token_id, entry)
    return text, logprob_value(entry), list(text.encode("utf-8", "replace"))
