"""The requests of clients, as strict msgspec structs.

Their fields are honoured, but for those that `RULES` calls taken. `RULES` also has the known fields
that are ignored or refused; see `field_rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from diptych_frontend.openai.field_rules import Rules, ignored, refused, taken
from diptych_frontend.openai.kv_hints import KvHints
from diptych_frontend.openai.response_format import ResponseFormat, check_format, form_of
from diptych_frontend.reasoning.request_options import Effort
from diptych_frontend.tool_calls.tools import (
    MAX_TOOLS,
    Tool,
    ToolChoice,
    arguments_of,
    called_tools,
    calls_or_form,
    forced_call,
    free_calls,
    strict_tools,
)
from diptych_protocol import (
    InvalidRequestError,
    JsonSchemas,
    KVTransferParams,
    RequestOutputKind,
    SamplingDefaults,
    SamplingParams,
    StructuredOutputsParams,
)
from diptych_protocol.kv_transfer_params import PARAM
from diptych_protocol.sampling import MAX_LOGPROBS

MAX_MESSAGES = 4096
"""Limit on the messages of one conversation; a chat template takes about 10 us for each."""
MAX_METADATA: Final = 16
"""Limit on the entries of what clients note about something that is kept for them."""
MetadataText = Annotated[str, msgspec.Meta(max_length=512)]
MAX_SEQUENCES = 1024
"""Limit on the sequences of one request: its number of prompts times `n`."""
PLAIN: Final = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "min_tokens", "prompt_logprobs",
    "bad_words", "skip_special_tokens",
)  # fmt: skip
"""Fields of requests that `SamplingParams` has under the same names; what a request leaves out
has its value from there."""

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Wider integers do not fit into a message to the engine."""
AlternativesCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
NOBODY_ASKS: Final = "not needed"
ALL_CACHED: Final = "every prefix is cached"
ONE_TIER: Final = "there is one tier"
LLGUIDANCE: Final = "llguidance decides"
RENDERED: Final = "/tokenize renders"
PROCESSOR: Final = "the model's processor decides"
NO_VERBOSITY: Final = "tell the model in words"
"""Reasons why several requests do not need or have a field."""
CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Forms = list[tuple[str, StructuredOutputsParams]]
"""Forms, by the fields of a body."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """A last chunk with the usage of the whole answer."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""
    include_obfuscation: bool | None = None
    """Ignored: chunks are never padded."""


class VllmRequest(msgspec.Struct):
    """What vLLM adds to all requests for texts."""

    RULES: ClassVar[Rules] = {
        "request_id": ignored("use X-Request-Id"),
        "vllm_xargs": ignored("no plugins", {}),
        "mm_payload": ignored(RENDERED, "tensors"),
        "return_mm_kwargs": ignored(RENDERED),
        "ec_transfer_params": refused("no hand-off"),
        "watermarking": refused("not offered", False),
    }


class SharedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chats, completions and responses ask for under the same names."""

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[Int64, float] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    json_schemas: JsonSchemas | None = None
    """Whether keywords of a schema that cannot be enforced are refused or ignored; by default, the
    service's setting."""
    priority: Int64 | None = None
    cache_salt: CacheSalt | None = None
    session_id: str | None = None
    """If it is set, a next turn is expected."""
    kv_hints: KvHints | None = None
    user: str | None = None


class GenerationRequest(SharedFields, kw_only=True):
    """What both generation routes share."""

    FORMAT_FIELD: ClassVar[str] = "response_format"
    """The field of the body that `response_format` stands for."""

    RULES: ClassVar[Rules] = {
        **VllmRequest.RULES,
        "user": taken(NOBODY_ASKS),
        "use_beam_search": refused("answers are sampled", False),
        "length_penalty": refused("answers are sampled", 1.0),
        "truncate_prompt_tokens": refused("prompts are not cut"),
        "allowed_token_ids": refused("use structured_outputs"),
        "guided_decoding_backend": ignored(LLGUIDANCE),
        "guided_whitespace_pattern": ignored(LLGUIDANCE),
        "structural_tag": refused("use structured_outputs"),
        "logits_processors": refused("programs only", []),
        "spaces_between_special_tokens": ignored("the tokenizer decides", True),
        "return_token_ids": refused("use /tokenize", False),
        "return_tokens_as_token_ids": refused("use /tokenize", False),
        "repetition_detection": ignored("not offered"),
        "routed_experts_prompt_start": ignored("not offered", 0),
        "stream_interval": ignored("the service decides"),
        "truncation_side": ignored("prompts are not cut"),
        "thinking_token_budget": ignored("use max_tokens"),
        "logprob_token_ids": refused("use logprobs"),
        "return_token_offsets": ignored(RENDERED, False),
    }

    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    min_tokens: Int64 | None = None
    max_tokens: Int64 | None = None
    kv_transfer_params: dict[str, Any] | None = None

    bad_words: list[str] | None = None
    prompt_logprobs: AlternativesCount | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    """The older names of `structured_outputs`, field by field."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def has_images(self) -> bool:
        """Whether the prompt takes long to prepare, because it has images."""
        return False

    def check(self, num_prompts: int) -> None:
        """Refuse fields that contradict each other.

        Raises `InvalidRequestError` naming the field.
        """
        if self.response_format is not None:
            check_format(self.response_format, self.FORMAT_FIELD)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs come with whole answers only: leave out stream",
                param="prompt_logprobs",
            )
        if num_prompts * (self.n or 1) > MAX_SEQUENCES:
            raise InvalidRequestError(
                f"{num_prompts} prompts with n={self.n or 1} ask for more than {MAX_SEQUENCES} "
                "answers in one request",
                param="prompt" if num_prompts > 1 else "n",
            )
        if self.kv_transfer_params is not None and num_prompts * (self.n or 1) > 1:
            raise InvalidRequestError(
                "kv_transfer_params speaks of one sequence: send one prompt and n=1",
                param="kv_transfer_params",
            )

    def forms(self) -> dict[str, StructuredOutputsParams | None]:
        """Return the forms that the answer must have, by the fields that ask for them."""
        named, own = self.response_format, self.structured_outputs
        if own is not None and self.is_lenient:
            own = msgspec.structs.replace(own, lenient=True)
        return {
            self.FORMAT_FIELD: form_of(named, lenient=self.is_lenient) if named else None,
            "structured_outputs": own,
            **self._guided_forms(),
        }

    def _guided_forms(self) -> dict[str, StructuredOutputsParams | None]:
        asked = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if asked == (None, None, None, None):
            return {}
        lenient = self.is_lenient
        return {
            f"guided_{name}": StructuredOutputsParams(**{name: value}, lenient=lenient)  # type: ignore[arg-type]
            for name, value in zip(("json", "regex", "choice", "grammar"), asked, strict=True)
            if value is not None
        }

    @property
    def is_lenient(self) -> bool:
        """Whether keywords of a schema that cannot be enforced are ignored."""
        return self.json_schemas == "lenient"

    def judged_forms(self, form: StructuredOutputsParams) -> Forms:
        """Return the forms that must be possible, by the fields that ask for them.

        form: what the engine is told, which may have more in it.
        """
        asked = self.form()
        return [] if asked is None else [asked]

    def form(self) -> tuple[str, StructuredOutputsParams] | None:
        """Return the only requested form, and its field. Raises `InvalidRequestError` for two."""
        asked = [(field, form) for field, form in self.forms().items() if form is not None]
        if len(asked) > 1:
            raise InvalidRequestError(
                f"{asked[0][0]} and {asked[1][0]} both say what form the answer must have",
                param=asked[1][0],
            )
        return asked[0] if asked else None

    def to_sampling_params(
        self, defaults: SamplingDefaults, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return range-checked parameters for the engine. `defaults` stand for what the request
        leaves out. Raises `InvalidRequestError`."""
        transfer = self.kv_transfer_params
        form = self.form()
        said = {name: value for name in PLAIN if (value := getattr(self, name)) is not None}
        params = SamplingParams(
            **{**msgspec.to_builtins(defaults), **said},
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=self.logit_bias or None,
            structured_outputs=None if form is None else form[1],
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
            extra_args=None if transfer is None else {PARAM: _said(transfer)},
        )
        try:
            params.check()
        except InvalidRequestError as exc:
            if form is not None and exc.param == "structured_outputs":
                exc.param = form[0]
            raise
        return params


def _said(transfer: dict[str, Any]) -> dict[str, Any]:
    """What a request says of a hand-off, without defaults: to a router, false is not unsaid. Raises
    `InvalidRequestError`."""
    known = KVTransferParams.parse(transfer).to_dict()
    return {name: value for name, value in known.items() if transfer.get(name) is not None}


def check_continues(request: Any) -> None:
    """Raise `InvalidRequestError` for a conversation that is to be continued in two
    ways at once."""
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message goes on with the last message, and add_generation_prompt "
            "begins another one: send one of them",
            param="continue_final_message",
        )


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    RULES: ClassVar[Rules] = {
        **GenerationRequest.RULES,
        "best_of": refused("use n", 1),
        "suffix": refused("not offered", ""),
        "prompt_embeds": refused("programs only"),
        "add_special_tokens": refused("use /tokenize", True),
    }

    prompt: str | list[str | Int64 | list[Int64]]
    logprobs: AlternativesCount | None = None
    echo: bool | None = None
    """Each answer begins with its prompt, and `logprobs` with those of the prompt's tokens."""


class TextPart(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    text: str


class ImageUrl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    url: str
    """A `data:` URL."""
    detail: Literal["auto", "low", "high"] | None = None
    """Ignored: the model's own processor decides how many tiles an image has."""


class ImagePart(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"
):
    image_url: ImageUrl


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class CalledTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. The fields from `refusal` on occur when a client sends an answer back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None
    """May be None only beside calls of tools."""
    name: str | None = None
    reasoning_content: str | None = None
    """Only in messages of an assistant."""
    tool_call_id: str | None = None
    tool_calls: list[CalledTool] | None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None
    function_call: None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    TOOL_FIELD: ClassVar[str] = "tools[{}].function.parameters"
    """The path of a tool's schema in the body."""

    RULES: ClassVar[Rules] = {
        **GenerationRequest.RULES,
        "metadata": taken("chats are not stored"),
        "safety_identifier": taken(NOBODY_ASKS),
        "prompt_cache_options": ignored(ALL_CACHED, {}),
        "service_tier": ignored(ONE_TIER, "auto", "default"),
        "store": ignored("only responses are stored", False),
        "prediction": ignored("not needed"),
        "verbosity": ignored(NO_VERBOSITY, "medium"),
        "echo": refused("answers only", False),
        "functions": refused("use tools", []),
        "function_call": refused("use tool_choice", "none", "auto"),
        "audio": refused("answers are texts"),
        "modalities": refused("answers are texts", ["text"]),
        "web_search_options": refused("use tools"),
        "moderation": refused("not offered"),
        "add_special_tokens": refused("the template decides", False),
        "chat_template": refused("the model's is used"),
        "documents": refused("use messages", []),
        "media_io_kwargs": refused(PROCESSOR, {}),
        "mm_processor_kwargs": refused(PROCESSOR, {}),
        "return_prompt_text": refused("use /tokenize", False),
    }

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: AlternativesCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The answer continues the last message, which is the assistant's."""
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    """By default, a model may call tools if there are any."""
    parallel_tool_calls: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template."""
    include_reasoning: bool | None = None
    """False: the answer omits the model's reasoning."""
    reasoning_effort: Effort | None = None

    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """If it is set, a next turn is expected, and so it is with a time that the cache is kept."""
    prompt_cache_retention: str | None = None

    def check(self, num_prompts: int) -> None:
        """See `GenerationRequest.check`."""
        super().check(num_prompts)
        for index, tool in enumerate(self.tools or []):
            tool.function.check(self.TOOL_FIELD.format(index))
        if not self.continue_final_message:
            return
        check_continues(self)
        for name, form in self.forms().items():
            if form is not None:
                raise InvalidRequestError(
                    f"{name} gives a whole answer its form: leave it out where "
                    "continue_final_message is true",
                    param=name,
                )

    @property
    def has_images(self) -> bool:
        return any(
            isinstance(part, ImagePart)
            for message in self.messages
            if isinstance(message.content, list)
            for part in message.content
        )

    @property
    def effort_field(self) -> str:
        """The path of the field that `reasoning_effort` stands for."""
        return "reasoning_effort"

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call, whose form is given."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def parallel_calls(self) -> bool:
        return self.parallel_tool_calls is not False

    def judged_forms(self, form: StructuredOutputsParams) -> Forms:
        """See `GenerationRequest.judged_forms`."""
        tools = self.callable_tools
        called = called_tools(tools, self.tool_choice) or strict_tools(tools)
        schemas = [
            (
                self.TOOL_FIELD.format(index),
                StructuredOutputsParams(json=arguments_of(function), lenient=self.is_lenient),
            )
            for index, function in called
        ]
        own = super().judged_forms(form)
        return [*schemas, *own, *([] if own and own[0][1] == form else [("tools", form)])]

    def forms(self) -> dict[str, StructuredOutputsParams | None]:
        call = None
        if self.must_call:
            call = forced_call(
                self.tools or [],
                self.tool_choice,
                parallel=self.parallel_calls,
                lenient=self.is_lenient,
            )
        forms = {"tools": call, **super().forms()}
        if call is not None:
            forms[self.FORMAT_FIELD] = None  # which is the form of a message, and there is none
        return forms

    def with_calls(self, form: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Return the form of an answer that may call tools.

        form: the answer's form if it must have one.
        """
        tools, parallel, lenient = self.callable_tools, self.parallel_calls, self.is_lenient
        if form is None:
            return free_calls(tools, parallel=parallel, lenient=lenient)
        if not tools or form_of(self.response_format, lenient=lenient) != form:
            return form
        return calls_or_form(tools, form, self.FORMAT_FIELD, parallel=parallel, lenient=lenient)
