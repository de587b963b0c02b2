"""Turns the tokens from engine cores into the outputs for consumers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

from diptych_frontend.reasoning.formats import format_of
from diptych_frontend.text.collector import (
    Collector,
    ParentRequest,
    PoolingAnswer,
    PromptLogprobs,
    fan_out,
    joined,
    of_output,
)
from diptych_frontend.text.detokenizer import Detokenizer
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import (
    Array,
    CompletionOutput,
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineGenerateError,
    EngineOverloadedError,
    FinishReason,
    Logprob,
    LogprobsLists,
    ReasoningParserName,
    RefusedByEngineError,
    RequestOutput,
    RequestOutputKind,
)
from diptych_protocol.kv_transfer_params import EXPIRY, PARAM
from diptych_protocol.wire import FINISH_REASON_STRINGS, ErrorKind

__all__ = ["Collector", "OutputProcessor", "ParentRequest", "fan_out"]

log = logging.getLogger(__name__)


class OutputProcessor:
    """The open requests of one client. One thread uses it."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stream_interval: int = 1,
        reasoning_parser: ReasoningParserName = "auto",
    ) -> None:
        """Without a tokenizer, answers are token ids and their text stays empty.

        stream_interval, reasoning_parser: as in `EngineConfig`.
        """
        self._tokenizer = tokenizer
        style = format_of(reasoning_parser, tokenizer.chat_template if tokenizer else None)
        self._markers: Collection[str] = () if style is None else style.markers
        """What stands around reasoning; some tokenizers have it as special tokens."""
        self._stream_interval = stream_interval
        self.answers: dict[str, _Answer | PoolingAnswer] = {}
        """The sequences that an engine still works on, by request id; a request with n answers has
        n."""
        self._waiting: dict[str, int] = {}
        """Number of prompt tokens of each request that has had no output yet, by request id."""
        self._by_external_id: dict[str, set[str]] = {}
        self._parents: dict[str, ParentRequest] = {}

    @property
    def open_ids(self) -> Collection[str]:
        """The users' ids of the requests that have not ended."""
        return self._by_external_id.keys()

    def collector_of(self, request_id: str) -> Collector[Any] | None:
        """Return the collector of an open request by its user's id. If several requests have the
        id, it is that of one of them."""
        open_here = self._by_external_id.get(request_id, ())
        return next((self.answers[internal_id].collector for internal_id in open_here), None)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the sequences without any output yet."""
        return sum(self._waiting.values())

    def add(
        self,
        request: EngineCoreRequest,
        prompt_text: str | None,
        collector: Collector[Any],
        parent: ParentRequest | None = None,
        index: int = 0,
    ) -> None:
        """Expect outputs for a request and pass them to the collector: `RequestOutput`s, or the one
        `PoolingRequestOutput`. Raises `ValueError` if its internal id is in use."""
        request_id = request.request_id
        if request_id in self.answers:
            raise ValueError(f"request {request_id} is running already")
        answer = (
            self._answer(request, prompt_text, collector, parent, index, self._tokenizer)
            if request.pooling_params is None
            else PoolingAnswer(request, collector)
        )
        self.answers[request_id] = answer
        self._waiting[request_id] = len(request.prompt_token_ids or ())
        self._by_external_id.setdefault(answer.external_id, set()).add(request_id)
        if parent is not None:
            self._parents[parent.request.request_id] = parent
            parent.open_children.add(request_id)

    def next_piece(self, request: EngineCoreRequest, prompt_text: str | None) -> None:
        """Begin a new answer to an open request whose prompt has grown.

        Raises `KeyError` if it has ended meanwhile.
        """
        collector: Collector[Any] = self.answers[request.request_id].collector
        answer = self._answer(request, prompt_text, collector, None, 0, self._tokenizer)
        self.answers[request.request_id] = answer

    def _answer(
        self,
        request: EngineCoreRequest,
        prompt_text: str | None,
        collector: Collector[RequestOutput],
        parent: ParentRequest | None,
        index: int,
        tokenizer: Tokenizer | None,
    ) -> _Answer:
        """A subclass may know a better tokenizer for the request."""
        # Who says how reasoning is to be parsed will look for its markers in the text.
        kept = () if request.reasoning_parser_kwargs is None else self._markers
        made = _Answer(request, prompt_text, collector, parent, index, tokenizer, kept)
        made.stream_interval = self._stream_interval
        return made

    def process(self, outputs: list[EngineCoreOutput]) -> list[str]:
        """Pass the outputs of a step to their consumers; drop those with unknown ids.

        Returns the requests that have ended here, which the caller has to abort in the core.
        """
        still_running: list[str] = []
        for output in outputs:
            answer = self.answers.get(output.request_id)
            if answer is None:
                continue
            self._waiting.pop(output.request_id, None)
            if output.finish_reason is FinishReason.ERROR:
                self.fail(output.request_id, failure_of(output))
                continue
            try:
                ended = answer.advance(output)
            except Exception as exc:
                # One request's bad tokens must not take the others of the step with it.
                log.exception("request %s: its output cannot be processed", output.request_id)
                error = EngineGenerateError(f"the engine's output cannot be processed: {exc}")
                self.fail(output.request_id, error)
                ended = True
            else:
                if ended:
                    self._forget(answer)
            if ended and output.finish_reason is None:
                still_running.append(output.request_id)
        return still_running

    def abort(self, request_ids: Iterable[str], internal: bool = False) -> list[str]:
        """End requests: their consumers get the rest and the finish reason "abort".

        The ids are the users' or, with `internal`, our own, of which a parent's stands for its
        children. Unknown ids are ignored. Returns the internal ids to abort in the core.
        """
        aborted: list[str] = []
        for request_id in request_ids:
            for internal_id in self._resolve(request_id, internal):
                answer = self.answers[internal_id]
                answer.advance(EngineCoreOutput(internal_id, [], finish_reason=FinishReason.ABORT))
                self._forget(answer)
                aborted.append(internal_id)
        return aborted

    def fail(self, request_id: str, error: BaseException) -> None:
        """End one request (internal id) with an error; an unknown id is ignored.

        Other answers to the same prompt continue until their consumer, which gets the error, aborts
        the parent.
        """
        answer = self.answers.get(request_id)
        if answer is not None:
            self._forget(answer)
            answer.collector.fail(error)

    def fail_all(self, error: BaseException) -> None:
        """End every request with an error."""
        for request_id in list(self.answers):
            self.fail(request_id, error)

    def _resolve(self, request_id: str, internal: bool) -> list[str]:
        if not internal:
            return sorted(self._by_external_id.get(request_id, ()))
        if request_id in self._parents:
            return sorted(self._parents[request_id].open_children)
        return [request_id] if request_id in self.answers else []

    def _forget(self, answer: _Answer | PoolingAnswer) -> None:
        del self.answers[answer.request_id]
        self._waiting.pop(answer.request_id, None)
        same_user_id = self._by_external_id[answer.external_id]
        same_user_id.discard(answer.request_id)
        if not same_user_id:
            del self._by_external_id[answer.external_id]
        if answer.parent is not None:
            answer.parent.open_children.discard(answer.request_id)
            if not answer.parent.open_children:
                del self._parents[answer.parent.request.request_id]


class _Answer:
    """One sequence between the core and its consumer."""

    __slots__ = (
        "_cumulative_logprob",
        "_detokenizer",
        "_index",
        "_kind",
        "_kv_transfer_params",
        "_logprobs",
        "_omitted",
        "_prompt_text",
        "_prompt_token_ids",
        "_routed",
        "_text",
        "_text_ends",
        "_token_ids",
        "_tokenizer",
        "_unsent",
        "_wants_logprobs",
        "collector",
        "external_id",
        "num_cached_tokens",
        "parent",
        "prompt_logprobs",
        "request_id",
        "stream_interval",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt_text: str | None,
        collector: Collector[RequestOutput],
        parent: ParentRequest | None,
        index: int,
        tokenizer: Tokenizer | None,
        markers: Collection[str],
    ) -> None:
        params = request.sampling
        prompt = request.prompt_token_ids or []
        self.request_id = request.request_id
        self.external_id = request.shown_id
        self.collector = collector
        self.parent = parent
        self._index = index
        self._prompt_text = prompt_text
        self._prompt_token_ids = prompt
        self._kind = params.output_kind
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        self._omitted: Collection[int] = ()
        """Special tokens that the text leaves out."""
        if tokenizer is not None and params.detokenize:
            made_elsewhere = request.generated_token_ids or []
            context = [*prompt, *made_elsewhere]
            kept = tokenizer.special_ids_of(markers) if markers else ()
            self._detokenizer = Detokenizer(
                tokenizer, params, context, kept, traced=params.logprobs is not None
            )
            self._detokenizer.num_tokens = len(made_elsewhere)
            if params.skip_special_tokens:
                self._omitted = tokenizer.all_special_ids.difference(kept)
        self._wants_logprobs = params.logprobs is not None
        self._cumulative_logprob = 0.0
        self.stream_interval = 1
        self._unsent: int | None = None
        """Tokens since the last output; None before the first."""
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._text_ends: list[int] = []
        self._routed: list[Array] = []
        self.prompt_logprobs: PromptLogprobs | None = None
        self.num_cached_tokens: int | None = None
        """Number of cached prompt tokens, as reported with the first output by the engine that
        computed the prompt. An engine that continues the request later has its own prefix cache,
        which saved no work on the prompt."""
        self._kv_transfer_params: dict[str, Any] | None = None

    def advance(self, output: EngineCoreOutput) -> bool:
        """Take a step's output and emit what the consumer asked for; True if the answer ended."""
        answer, ended = self._news(output)
        if answer is None:
            return ended
        answers, all_finished, delta = [answer], ended, self._kind is RequestOutputKind.DELTA
        if self.parent is not None and all_finished:
            all_finished = self.parent.finish_child()
            if self._kind is RequestOutputKind.FINAL_ONLY:
                answers = self.parent.gather(answer)
                if not all_finished:
                    return ended
        shared = self.parent or self
        self.collector.put(
            RequestOutput(
                self.external_id,
                self._prompt_text,
                self._prompt_token_ids,
                answers,
                all_finished,
                shared.num_cached_tokens or 0,
                self._kv_transfer_params,
                shared.prompt_logprobs,
            ),
            delta=delta,
        )
        if delta:
            shared.prompt_logprobs = None  # said once
        return ended

    def _news(self, output: EngineCoreOutput) -> tuple[CompletionOutput | None, bool]:
        """What the consumer gets now, and whether the answer ended."""
        token_ids = output.new_token_ids
        piece_finish = output.piece_finish_reason
        finish = piece_finish if output.finish_reason is None else output.finish_reason
        stop_reason = output.stop_reason
        text = ""
        if self._detokenizer is not None:
            text, num_kept, stop = self._detokenizer.push(
                token_ids, finished=finish is not None, stop_token=finish is FinishReason.STOP
            )
            if stop is not None:
                token_ids = token_ids[:num_kept]
                finish, stop_reason = FinishReason.STOP, stop
        logprobs = text_ends = None
        if self._wants_logprobs and output.new_logprobs is not None:
            logprobs, text_ends = self._logprobs_of(output.new_logprobs, token_ids)
        shared = self.parent or self  # what all answers to a prompt have in common
        if output.new_prompt_logprobs_tensors is not None:
            shared.prompt_logprobs = PromptLogprobs(
                output.new_prompt_logprobs_tensors, self._token_words
            )
        if shared.num_cached_tokens is None:
            shared.num_cached_tokens = output.num_cached_tokens
        if output.kv_transfer_params is not None:
            self._kv_transfer_params = output.kv_transfer_params
        if output.routed_experts is not None:
            self._routed.append(output.routed_experts)
        reason = None if finish is None else FINISH_REASON_STRINGS[finish]
        ended = reason is not None and piece_finish is None
        is_delta = self._kind is RequestOutputKind.DELTA
        if not (is_delta and self.stream_interval == 1):
            self._text += text
            self._token_ids += token_ids
            if logprobs is not None:
                self._logprobs += logprobs
                self._text_ends += text_ends or ()
            if reason is None and not self._is_due(len(token_ids)):
                return None, ended
            text, token_ids, text_ends = self._text, self._token_ids, [*self._text_ends] or None
            logprobs = [*self._logprobs] if self._wants_logprobs else None
            if is_delta:
                self._text, self._token_ids, self._logprobs, self._text_ends = "", [], [], []
        answer = CompletionOutput(
            self._index,
            text,
            list(token_ids),
            self._cumulative_logprob if self._wants_logprobs else None,
            logprobs,
            reason,
            stop_reason,
            joined(self._routed) if self._routed and reason is not None else None,
            text_ends,
        )
        return answer, ended

    def _logprobs_of(
        self, told: LogprobsLists, token_ids: list[int]
    ) -> tuple[list[dict[int, Logprob]], list[int] | None]:
        """Those of these tokens, and where their texts end."""
        text_ends = None
        if self._detokenizer is not None and self._detokenizer.text_ends is not None:
            text_ends = self._detokenizer.text_ends[: len(token_ids)]
        logprobs = of_output(told, len(token_ids), self._token_words)
        for token_id, row in zip(token_ids, logprobs, strict=True):
            self._cumulative_logprob += row[token_id].logprob
        return logprobs, text_ends

    def _is_due(self, num_new: int) -> bool:
        """Whether a stream gets an output now, after so many more tokens."""
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return False
        unsent = None if self._unsent is None else self._unsent + num_new
        is_due = unsent is None or self.stream_interval == 1 or unsent >= self.stream_interval
        self._unsent = 0 if is_due else unsent
        return is_due

    def _token_words(self, token_id: int) -> tuple[str, bytes] | tuple[None, None]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return None, None
        added = b"" if token_id in self._omitted else tokenizer.token_bytes(token_id)
        return tokenizer.token_text(token_id), added


def failure_of(output: EngineCoreOutput) -> DiptychError:
    """Return a caller's error for an engine core's last output with an error."""
    reason = output.error or "the engine gave no reason"
    if output.error_kind is ErrorKind.OVERLOADED:
        return EngineOverloadedError(reason)
    if output.error_kind is ErrorKind.REFUSED or output.error_param in (PARAM, EXPIRY):
        return RefusedByEngineError(reason, param=output.error_param)
    return EngineGenerateError(reason)
