"""Turns a caller's request into the `EngineCoreRequest` for an engine core."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Collection
from copy import copy
from functools import cache
from typing import Any, Self

import msgspec

from diptych_frontend.images.features import check_features
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.reasoning.formats import format_of
from diptych_frontend.reasoning.request_options import check_options
from diptych_frontend.text.renderer import TextRenderer, tokenization
from diptych_frontend.text.structured_outputs import check_structured_outputs
from diptych_protocol import (
    EngineConfig,
    EngineCoreRequest,
    InvalidRequestError,
    KVTransferParams,
    PoolingParams,
    PromptType,
    ReasoningParserName,
    SamplingParams,
    SchedulingPolicy,
    StructuredOutputsParams,
    TokensPrompt,
)
from diptych_protocol.as_sent import check_id, params_as_sent, request_as_sent
from diptych_protocol.sampling import MAX_BAD_SEQUENCES
from diptych_protocol.wire import steady_time

log = logging.getLogger(__name__)


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def warn_of_truncation() -> None:
    """Warn once that `encode` does not truncate as the caller asked."""
    _warn_once(
        "truncate_prompt_tokens of encode() is deprecated and ignored; use tokenization_kwargs "
        "with truncation and max_length."
    )


def warn_of_made_requests(client: object, request_id: str, request: EngineCoreRequest) -> None:
    """Warn once callers who make their own `EngineCoreRequest`.

    The text is vLLM's, which users search for, except for the names of the renderer's methods.
    """
    name = type(client).__name__
    _warn_once(
        f"Passing EngineCoreRequest to {name}.generate() and .add_requests() is deprecated. You "
        "should instead pass the outputs of the renderer's render_prompt() or render_chat()."
    )
    if request_id != request.request_id:
        _warn_once(
            f"{name}.add_request() was passed a request_id parameter that does not match the "
            "EngineCoreRequest.request_id attribute. The latter will be used, and the former will "
            "be ignored."
        )


class InputProcessor:
    """Validates, tokenises and completes requests. It checks everything that an engine core may
    rely on, so no request fails there because of its form."""

    def __init__(
        self,
        renderer: TextRenderer,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        scheduling_policy: SchedulingPolicy = "fcfs",
        logits_processors: Collection[str] = (),
        reasoning_parser: ReasoningParserName = "auto",
    ) -> None:
        self.renderer = renderer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.scheduling_policy = scheduling_policy
        self.logits_processors = logits_processors
        self.reasoning_parser = reasoning_parser

    @classmethod
    def of(cls, config: EngineConfig, *, reads_texts: bool = True) -> Self:
        """Return the processor for the model of one engine.

        reads_texts: False for one that gets tokens only; it has no tokenizer in memory. Raises
        `InvalidRequestError` for a configuration or a model that cannot work.
        """
        config.check()
        source = resolve_model(config.model, vocabulary=True)
        model = source.config
        skips_tokenizer = config.skip_tokenizer_init or not reads_texts
        model_limit = model.max_position_embeddings
        return cls(
            TextRenderer(source, skip_tokenizer_init=skips_tokenizer),
            max_model_len=min(config.max_model_len or model_limit, model_limit),
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            scheduling_policy=config.scheduling_policy,
            logits_processors=config.logits_processors,
            reasoning_parser=config.reasoning_parser,
        )

    def process(
        self,
        request_id: str,
        prompt: EngineCoreRequest | PromptType,
        params: SamplingParams | PoolingParams,
        **options: Any,
    ) -> EngineCoreRequest:
        """Build the request for the core, with an internal id. Otherwise the same as
        `process_inputs`."""
        request = self.process_inputs(request_id, prompt, params, **options)
        self.assign_request_id(request)
        return request

    def process_inputs(
        self,
        request_id: str,
        prompt: EngineCoreRequest | PromptType,
        params: SamplingParams | PoolingParams,
        supported_tasks: Collection[str] | None = None,
        arrival_time: float | None = None,
        *,
        tokenization_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> EngineCoreRequest:
        """Build the request for the core. The caller's objects stay as they are.

        The prompt may be an `EngineCoreRequest` made elsewhere. Then its prompt, salt, parameters
        and routing are used, and its id counts as the caller's. `params` are for one without any.

        supported_tasks: refuse a pooling task that is not among them, as the core would.

        options: the others of `RequestOptions`, which are fields of the request.

        Raises `InvalidRequestError`, naming the field, for a prompt or a parameter that can never
        succeed; for an id that is not a string, the error is also a `TypeError`.
        """
        wanted = tokenization(tokenization_kwargs)
        if isinstance(prompt, EngineCoreRequest):
            return self._finish(self._adopt(request_as_sent(prompt), params), supported_tasks)
        check_id(request_id)
        if not isinstance(params, (SamplingParams, PoolingParams)):
            params = _as_sent(params)
        rendered = self.renderer.render_prompt(prompt, tokenization=wanted)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=rendered["prompt_token_ids"],
            mm_features=rendered.get("mm_features"),
            sampling_params=params if isinstance(params, SamplingParams) else None,
            pooling_params=params if isinstance(params, PoolingParams) else None,
            eos_token_id=None,
            arrival_time=steady_time() if arrival_time is None else arrival_time,
            cache_salt=rendered.get("cache_salt"),
            prompt_embeds=rendered.get("prompt_embeds"),
            # These two have no default on the wire.
            **{"lora_request": None, "data_parallel_rank": None, **options},
        )
        return self._finish(request_as_sent(request), supported_tasks)

    @staticmethod
    def assign_request_id(request: EngineCoreRequest) -> None:
        """Keep the caller's id as `external_req_id`, and give the request an internal id.

        Raises `InvalidRequestError` for a request that has both already.
        """
        if request.external_req_id is not None:
            raise InvalidRequestError(
                f"external_req_id of request {request.request_id} is set already; "
                "it is given together with the internal id",
                param="external_req_id",
            )
        request.external_req_id = request.request_id
        request.request_id = f"{request.request_id}-{secrets.token_hex(4)}"

    def _adopt(self, request: EngineCoreRequest, params: object) -> EngineCoreRequest:
        given = request.prompt_token_ids
        prompt = TokensPrompt(prompt_token_ids=[] if given is None else given)
        if request.prompt_embeds is not None:
            prompt = TokensPrompt(prompt_embeds=request.prompt_embeds)
        elif request.mm_features is not None:
            prompt["mm_features"] = request.mm_features
        rendered = self.renderer.render_prompt(prompt)
        adopted = msgspec.structs.replace(
            request,
            prompt_token_ids=rendered["prompt_token_ids"],
            prompt_embeds=rendered.get("prompt_embeds"),
        )
        if request.sampling_params is None and request.pooling_params is None:
            wanted = _as_sent(params)
            if isinstance(wanted, PoolingParams):
                adopted.pooling_params = wanted
            else:
                adopted.sampling_params = wanted
        return adopted

    def _finish(
        self, request: EngineCoreRequest, supported_tasks: Collection[str] | None
    ) -> EngineCoreRequest:
        if request.priority and self.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority {request.priority} needs an engine whose scheduling_policy is "
                f"`priority`; here it is `{self.scheduling_policy}`, which serves in the order of "
                "arrival",
                param="priority",
            )
        if not math.isfinite(request.arrival_time):
            raise InvalidRequestError(
                "arrival_time must be finite: requests are ordered by it", param="arrival_time"
            )
        if request.reasoning_ended is False or request.reasoning_parser_kwargs is not None:
            style = format_of(self.reasoning_parser, self.renderer.chat_template)
            check_options(
                style is not None, request.reasoning_ended, request.reasoning_parser_kwargs
            )
        num_prompt_tokens = len(request.prompt_token_ids or ())
        if request.mm_features is not None:
            self._check_images(request)
        if request.pooling_params is not None:
            _check_task(request.pooling_params.task, supported_tasks)
            self._check_pooling(request, request.pooling_params, num_prompt_tokens)
        else:
            params = request.sampling_params = self._complete(request, num_prompt_tokens)
            if request.prompt_embeds is not None and params.prompt_logprobs is not None:
                raise InvalidRequestError(
                    "prompt_logprobs are of tokens; prompt_embeds have none",
                    param="prompt_logprobs",
                )
        if request.eos_token_id is None and self.eos_token_ids:
            request.eos_token_id = self.eos_token_ids[0]
        return request

    def _check_images(self, request: EngineCoreRequest) -> None:
        check_features(request.mm_features, request.prompt_token_ids or (), self.renderer.vision)
        if request.pooling_params is not None or request.prompt_embeds is not None:
            raise InvalidRequestError(
                "images are for generate, and for prompts of tokens: leave out pooling_params and "
                "prompt_embeds",
                param="mm_features",
            )

    def _check_pooling(
        self, request: EngineCoreRequest, params: PoolingParams, num_prompt_tokens: int
    ) -> None:
        """The prompt of a pooling request may fill the whole context: nothing follows it."""
        params.check()
        if request.sampling_params is not None:
            raise InvalidRequestError(
                "a request generates or pools: it has sampling_params or pooling_params",
                param="pooling_params",
            )
        if (params.dimensions or 0) > self.renderer.hidden_size:
            raise InvalidRequestError(
                f"dimensions must be at most {self.renderer.hidden_size}, "
                f"which is what this model has, not {params.dimensions}",
                param="dimensions",
            )
        if num_prompt_tokens > self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens, but this model's limit is "
                f"{self.max_model_len}",
                param="prompt",
                code="context_length_exceeded",
            )

    def _complete(self, request: EngineCoreRequest, num_prompt_tokens: int) -> SamplingParams:
        """A checked copy of the parameters in which nothing is left open."""
        params = request.sampling
        params.check()
        params.check_vocabulary(self.vocab_size)
        if params.logits_processors:
            params.check_processors(self.logits_processors)
        if params.stop:
            self._check_stops(params)
        if params.structured_outputs is not None:
            self._check_form(params.structured_outputs)
        if params.extra_args:
            _check_kv_transfer(params.extra_args, params.n)
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens, but this model's limit is "
                f"{self.max_model_len} for prompt and output together",
                param="prompt",
                code="context_length_exceeded",
            )
        params = copy(params)
        params.max_tokens = 1 if request.prefetches else min(params.max_tokens or room, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        # The core knows one EOS; a model's other ones become stop tokens.
        others = () if params.ignore_eos else self.eos_token_ids[1:]
        params.stop_token_ids = list(dict.fromkeys((*params.stop_token_ids, *others)))
        if params.bad_words:
            params.bad_words_token_ids = self._bad_words(params)
        return params

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each bad word as it is tokenised at the start of a text, and after a space."""
        tokenizer = self.renderer.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "this model has no tokenizer; use bad_words_token_ids", param="bad_words"
            )
        sequences = list(params.bad_words_token_ids or ())
        for word in params.bad_words:
            text = word.lstrip()
            for spelling in (text, f" {text}"):
                token_ids = tokenizer.encode(spelling, add_special_tokens=False)
                if token_ids and token_ids not in sequences:
                    sequences.append(token_ids)
        if len(sequences) > MAX_BAD_SEQUENCES:
            raise InvalidRequestError(
                f"bad_words and bad_words_token_ids make more than {MAX_BAD_SEQUENCES} sequences",
                param="bad_words",
            )
        return sequences

    def _check_form(self, form: StructuredOutputsParams) -> None:
        if self.renderer.tokenizer is None:
            raise InvalidRequestError(
                "structured_outputs: this model has no tokenizer", param="structured_outputs"
            )
        check_structured_outputs(form)

    def _check_stops(self, params: SamplingParams) -> None:
        if self.renderer.tokenizer is None or not params.detokenize:
            raise InvalidRequestError(
                "stop strings are found in the text, and this request makes none; "
                "use stop_token_ids",
                param="stop",
            )


def name_alike(prompt: EngineCoreRequest, request: EngineCoreRequest) -> None:
    """Give a request made elsewhere the ids of the request made from it, so that its maker can
    abort it."""
    prompt.request_id, prompt.external_req_id = request.request_id, request.external_req_id


def params_of(request: EngineCoreRequest, params: Any) -> Any:
    """Return the parameters of a request: those that it was made with elsewhere, or else these."""
    return request.sampling_params or request.pooling_params or params


def _as_sent(params: object) -> SamplingParams | PoolingParams:
    if isinstance(params, PoolingParams):
        return params_as_sent(params, PoolingParams)
    return params_as_sent(params, SamplingParams)


def _check_task(task: str | None, supported_tasks: Collection[str] | None) -> None:
    if task is not None and supported_tasks is not None and task not in supported_tasks:
        known = ", ".join(sorted(supported_tasks))
        raise InvalidRequestError(f"task must be one of {known}, not {task!r}", param="task")


def _check_kv_transfer(extra_args: dict[str, Any], num_answers: int) -> None:
    raw: Any = extra_args.get("kv_transfer_params")
    if raw is None:
        return
    KVTransferParams.parse(raw)
    if num_answers > 1:
        raise InvalidRequestError(
            "a hand-off belongs to one sequence: n must be 1 with kv_transfer_params", param="n"
        )
