"""/v1/completions: turns a request into prompts and SamplingParams, and outputs into the answer's
bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Final

from msgspec import Raw
from starlette.types import Scope

from diptych_frontend.openai.api_types import CompletionRequest
from diptych_frontend.openai.exchange import split_prompts
from diptych_frontend.openai.generation import Sound
from diptych_frontend.openai.kv_hints import TURN_S, turn_options
from diptych_frontend.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Envelope,
    ResponseWriter,
    Tally,
    by_likelihood,
    encode,
    logprob_value,
    prompt_logprobs,
    token_name,
    transfer_params,
)
from diptych_frontend.text.answer_tokens import AnswerTokens, is_continuation
from diptych_protocol import (
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

DEFAULT_MAX_TOKENS = 16
MAX_PROMPT_LOGPROBS: Final = 2 << 20
"""Limit on the log-probabilities of prompts in one answer, which has them once for each choice:
100 MB."""
BYTES: Final = "bytes:"
"""Begins the name of a token that is only a part of a character."""


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
        request.check(len(split_prompts(request.prompt, "prompt")))
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        params = request.to_sampling_params(
            # No engine answers nothing: the writer leaves the only token out.
            self._sampling,
            max_tokens=max_tokens or 1,
            logprobs=request.logprobs,
        )
        if request.echo and params.prompt_logprobs is None:
            params.prompt_logprobs = request.logprobs
        return params

    def render(self, request: CompletionRequest, renderer: Renderer) -> list[TokensPrompt]:
        given = split_prompts(request.prompt, "prompt")
        prompts = [renderer.render_prompt(prompt) for prompt in given]
        _check_logprobs(request, sum(len(prompt["prompt_token_ids"]) for prompt in prompts))
        if request.echo:
            skipped = request.skip_special_tokens is not False
            for said, prompt in zip(given, prompts, strict=True):
                ids = prompt["prompt_token_ids"]
                prompt["prompt"] = (
                    said
                    if isinstance(said, str)
                    else renderer.decode(ids, skip_special_tokens=skipped)
                )
        return prompts

    def options(self, request: CompletionRequest) -> RequestOptions:
        # Completions do not separate reasoning, so a form applies to the whole text.
        seconds = TURN_S if request.session_id else 0
        told = turn_options(request.session_id, request.kv_hints, seconds)
        return {"reasoning_ended": True, **told}

    def writer(
        self, sound: Sound[CompletionRequest, CompletionRequest], request_id: str, created: int
    ) -> ResponseWriter:
        request = sound.request
        envelope = Envelope(
            f"cmpl-{request_id}", created, request.model, request.n or 1, request.stream_options
        )
        return CompletionWriter(
            envelope,
            [prompt["prompt"] for prompt in sound.prompts] if request.echo else [],
            echoes_logprobs=request.logprobs is not None,
            says_nothing=request.max_tokens == 0,
            shows_prompt_logprobs=request.prompt_logprobs is not None,
        )


def _check_logprobs(request: CompletionRequest, num_tokens: int) -> None:
    """Refuse more log-probabilities of the prompts' tokens than an answer may have."""
    echoed = request.logprobs if request.echo else None
    for field, asked in (("logprobs", echoed), ("prompt_logprobs", request.prompt_logprobs)):
        wanted = 0 if asked is None else num_tokens * (request.n or 1) * (asked + 1)
        if wanted > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"{field}={asked} asks for {wanted} log-probabilities of prompt tokens, and "
                f"{MAX_PROMPT_LOGPROBS} are the most: lower it, or n",
                param=field,
            )


class CompletionWriter(ResponseWriter):
    text_field = b"text"
    chunk_type = Completion
    object_name = "text_completion"

    def __init__(
        self,
        envelope: Envelope,
        echoes: Sequence[str] = (),
        *,
        echoes_logprobs: bool = True,
        says_nothing: bool = False,
        shows_prompt_logprobs: bool = True,
    ) -> None:
        """echoes: the texts of the prompts, with which their answers begin.

        echoes_logprobs: so do the answers' log-probabilities. says_nothing: what the engine said is
        left out.
        """
        super().__init__(envelope)
        self._says_nothing = says_nothing
        self._shows_prompt_logprobs = shows_prompt_logprobs
        self._unsaid = {
            prompt * envelope.n + number: text
            for prompt, text in enumerate(echoes)
            for number in range(envelope.n)
        }
        """The echo of each choice that has not begun."""
        self._echo_sizes = [len(text) for text in echoes]
        self._held: dict[int, list[RequestOutput]] = {
            prompt: [] for prompt in range(len(echoes) if echoes_logprobs else 0)
        }
        """A stream's outputs for a prompt whose log-probabilities have not come."""
        self._told: dict[int, CompletionLogprobs] = {}
        """The echoed log-probabilities of each choice that has not begun."""
        self._tokens = defaultdict[int, AnswerTokens](AnswerTokens)

    def _event(self, prompt_index: int, output: RequestOutput, tally: Tally) -> bytes:
        """Hold the outputs for a prompt back until its log-probabilities come with one of them,
        because each choice begins with them."""
        if prompt_index not in self._held:
            return super()._event(prompt_index, output, tally)
        self._held[prompt_index].append(output)
        if output.prompt_logprobs is None and not output.finished:
            return b""
        self._echo_logprobs(prompt_index, output)
        held = self._held.pop(prompt_index)
        return b"".join(self._event(prompt_index, each, tally) for each in held)

    def _choices(
        self, prompt_index: int, output: RequestOutput, tally: Tally
    ) -> list[CompletionChoice]:
        self._silence(output, tally)
        return [self._choice(prompt_index, choice) for choice in output.outputs]

    def _silence(self, output: RequestOutput, tally: Tally) -> None:
        if self._says_nothing:
            tally.completion_tokens = 0
            for choice in output.outputs:
                choice.text, choice.token_ids, choice.logprobs, choice.text_ends = (
                    "",
                    [],
                    None,
                    None,
                )
                choice.finish_reason = choice.finish_reason and "length"
                choice.stop_reason = None

    def answer(self, outputs: Sequence[Sequence[RequestOutput]], tally: Tally) -> bytes:
        for output in chain.from_iterable(outputs):
            self._silence(output, tally)
        choices = [
            choice
            for prompt_index, of_prompt in enumerate(outputs)
            for output in of_prompt
            for choice in self._whole_choices(prompt_index, output)
        ]
        head = self._envelope
        message = Completion(head.response_id, self.object_name, head.created, head.model, choices)
        message.choices.sort(key=lambda choice: choice.index)
        message.kv_transfer_params = transfer_params(outputs[0][-1])
        message.usage, message.warnings = tally.usage(), self.warnings
        return encode(message)

    def _whole_choices(self, prompt_index: int, output: RequestOutput) -> list[CompletionChoice]:
        self._echo_logprobs(prompt_index, output)
        choices = [self._choice(prompt_index, choice) for choice in output.outputs]
        if self._shows_prompt_logprobs:
            shown = prompt_logprobs(output)
            for choice in choices:
                choice.prompt_logprobs = shown
        return choices

    def _echo_logprobs(self, prompt_index: int, output: RequestOutput) -> None:
        """Shape the log-probabilities of a prompt, once for all its choices."""
        first = prompt_index * self._envelope.n
        echo, rows = self._unsaid.get(first), output.prompt_logprobs
        if echo is not None and rows is not None:
            told = echoed(echo, output.prompt_token_ids, rows)
            self._told.update(dict.fromkeys(range(first, first + self._envelope.n), told))

    def _choice(self, prompt_index: int, output: CompletionOutput) -> CompletionChoice:
        index = prompt_index * self._envelope.n + output.index
        self._begun.add(index)
        begin = self._echo_sizes[prompt_index] if self._echo_sizes else 0
        return CompletionChoice(
            index=index,
            text=self._unsaid.pop(index, "") + output.text,
            logprobs=self._logprobs(index, output, begin),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )

    def _logprobs(
        self, index: int, output: CompletionOutput, begin: int
    ) -> CompletionLogprobs | None:
        """begin: where the answer begins in the choice's text."""
        echo = self._told.pop(index, None)
        has_answers = output.logprobs is not None or index in self._tokens
        answered = self._tokens[index].push(output) if has_answers else []
        if echo is None and not answered:
            return None
        shaped = CompletionLogprobs([], [], [], [])
        if echo is not None:
            shaped.tokens += echo.tokens
            shaped.token_logprobs += echo.token_logprobs
            shaped.top_logprobs += echo.top_logprobs
            shaped.text_offset += echo.text_offset
        for token in answered:
            _add_token(shaped, token.token_id, token.candidates, begin + token.offset)
        return shaped


def echoed(
    text: str, token_ids: Sequence[int], rows: Sequence[dict[int, Logprob] | None]
) -> CompletionLogprobs:
    """Return the log-probabilities of a prompt's tokens.

    text: the prompt. rows: see `RequestOutput.prompt_logprobs`.
    """
    _, *known = zip(token_ids, rows, strict=True)
    sizes = [
        sum(not is_continuation(byte) for byte in row[token].token_bytes or b"") if row else 0
        for token, row in known
    ]
    # Nobody tells about the first token, so it has what the others leave.
    offset = max(len(text) - sum(sizes), 0)
    shaped = CompletionLogprobs([text[:offset]], [None], [None], [0])
    for (token, row), size in zip(known, sizes, strict=True):
        if row is not None:
            _add_token(shaped, token, row, offset)
        offset += size
    shaped.top_logprobs = [top and Raw(encode(top)) for top in shaped.top_logprobs]
    return shaped


def _add_token(
    shaped: CompletionLogprobs, token_id: int, candidates: dict[int, Logprob], offset: int
) -> None:
    said = candidates[token_id]
    top: dict[str, float] = {}
    for candidate_id, entry in by_likelihood(candidates):
        # Different tokens may read alike; the likeliest of them keeps the name.
        top.setdefault(_name(candidate_id, entry), logprob_value(entry))
    shaped.tokens.append(_name(token_id, said))
    shaped.token_logprobs.append(logprob_value(said))
    shaped.top_logprobs.append(top)
    shaped.text_offset.append(offset)


def _name(token_id: int, entry: Logprob) -> str:
    return token_name(token_id, entry, before_bytes=BYTES)
