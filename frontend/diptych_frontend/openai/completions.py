"""/v1/completions: turns a request into prompts and SamplingParams, and outputs into the answer's
bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from msgspec import UNSET
from starlette.types import Scope

from diptych_frontend.openai.api_types import CompletionRequest
from diptych_frontend.openai.generation import Sound
from diptych_frontend.openai.request_body import split_prompts
from diptych_frontend.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Envelope,
    PlainEvents,
    ResponseWriter,
    Tally,
    Usage,
    by_likelihood,
    encode,
    is_plain,
    logprob_value,
    prompt_logprobs,
    sse,
    token_name,
    transfer_params,
)
from diptych_frontend.text.answer_tokens import AnswerTokens
from diptych_protocol import (
    UNSAID,
    CompletionOutput,
    Logprob,
    Renderer,
    RequestOptions,
    RequestOutput,
    SamplingDefaults,
    SamplingParams,
    TokensPrompt,
)

DEFAULT_MAX_TOKENS = 16
OBJECT = "text_completion"
BYTES: Final = "bytes:"
"""Begins the name of a token that is only a part of a character."""


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of the request: one text, one list of token ids, or a list of either.

    Raises `InvalidRequestError` for an empty or mixed list.
    """
    return split_prompts(request.prompt, "prompt")


class CompletionApi:
    """The `Api` of /v1/completions."""

    body_type = CompletionRequest
    image_word = b"image_url"
    prompt_field = "prompt"

    def __init__(self, sampling: SamplingDefaults = UNSAID) -> None:
        """sampling: values for the fields that a request leaves out."""
        self._sampling = sampling

    def request(self, body: CompletionRequest, scope: Scope) -> CompletionRequest:
        return body

    def params(self, request: CompletionRequest) -> SamplingParams:
        request.check(len(prompts_of(request)))
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        return request.to_sampling_params(
            self._sampling, max_tokens=max_tokens, logprobs=request.logprobs
        )

    def render(self, request: CompletionRequest, renderer: Renderer) -> list[TokensPrompt]:
        return [renderer.render_prompt(prompt) for prompt in prompts_of(request)]

    def options(self, request: CompletionRequest) -> RequestOptions:
        # Completions do not separate reasoning, so a form applies to the whole text.
        return {"reasoning_ended": True}

    def writer(
        self, sound: Sound[CompletionRequest, CompletionRequest], request_id: str, created: int
    ) -> ResponseWriter:
        request = sound.request
        envelope = Envelope(
            f"cmpl-{request_id}", created, request.model, request.n or 1, request.stream_options
        )
        return CompletionWriter(envelope)


class CompletionWriter(ResponseWriter):
    def __init__(self, envelope: Envelope) -> None:
        super().__init__(envelope)
        self._tokens = defaultdict[int, AnswerTokens](AnswerTokens)
        self._plain: dict[int, PlainEvents] = {}
        """By the choice's index."""

    def events(self, prompt_index: int, output: RequestOutput, tally: Tally) -> bytes:
        if self._continuous_usage or self.warnings or not is_plain(output):
            return self._event(prompt_index, output, tally)
        choice = output.outputs[0]
        index = self._index(prompt_index, choice)
        plain = self._plain.get(index)
        if plain is None:
            text, choice.text = choice.text, ""
            plain = PlainEvents(self._event(prompt_index, output, tally), b"text")
            self._plain[index], choice.text = plain, text
        return plain.event(choice.text)

    def _event(self, prompt_index: int, output: RequestOutput, tally: Tally) -> bytes:
        message = self._message(
            [self._choice(prompt_index, choice) for choice in output.outputs], output
        )
        message.usage = self._chunk_usage(tally)
        message.warnings, self.warnings = self.warnings, UNSET
        return sse(message)

    def usage_event(self, usage: Usage) -> bytes:
        message = self._message([], None)
        message.usage = usage
        return sse(message)

    def answer(self, outputs: Sequence[Sequence[RequestOutput]], tally: Tally) -> bytes:
        choices = [
            self._whole_choice(prompt_index, choice, output)
            for prompt_index, of_prompt in enumerate(outputs)
            for output in of_prompt
            for choice in output.outputs
        ]
        message = self._message(sorted(choices, key=lambda c: c.index), outputs[0][-1])
        message.usage, message.warnings = tally.usage(), self.warnings
        return encode(message)

    def _message(self, choices: list[CompletionChoice], output: RequestOutput | None) -> Completion:
        head = self._envelope
        message = Completion(head.response_id, OBJECT, head.created, head.model, choices)
        if output is not None:
            message.kv_transfer_params = transfer_params(output)
        return message

    def _whole_choice(
        self, prompt_index: int, choice: CompletionOutput, output: RequestOutput
    ) -> CompletionChoice:
        shaped = self._choice(prompt_index, choice)
        shaped.prompt_logprobs = prompt_logprobs(output)
        return shaped

    def _index(self, prompt_index: int, output: CompletionOutput) -> int:
        return prompt_index * self._envelope.n + output.index

    def _choice(self, prompt_index: int, output: CompletionOutput) -> CompletionChoice:
        index = self._index(prompt_index, output)
        return CompletionChoice(
            index=index,
            text=output.text,
            logprobs=self._logprobs(index, output),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )

    def _logprobs(self, index: int, output: CompletionOutput) -> CompletionLogprobs | None:
        if output.logprobs is None and index not in self._tokens:
            return None
        told = self._tokens[index].push(output)
        if not told:
            return None
        shaped = CompletionLogprobs([], [], [], [])
        for token in told:
            sampled = token.candidates[token.token_id]
            top: dict[str, float] = {}
            for candidate_id, entry in by_likelihood(token.candidates):
                # Different tokens may read alike; the likeliest of them keeps the name.
                top.setdefault(_name(candidate_id, entry), logprob_value(entry))
            shaped.tokens.append(_name(token.token_id, sampled))
            shaped.token_logprobs.append(logprob_value(sampled))
            shaped.top_logprobs.append(top)
            shaped.text_offset.append(token.offset)
        return shaped


def _name(token_id: int, entry: Logprob) -> str:
    return token_name(token_id, entry, before_bytes=BYTES)
