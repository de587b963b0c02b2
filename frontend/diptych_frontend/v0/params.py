"""Converts V0's parameters to this project's."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self, TypeVar

import msgspec

import diptych_protocol
from diptych_frontend.core_client.foreign_options import Foreign, foreign_fields, judge_foreign
from diptych_frontend.reasoning.formats import name_of
from diptych_protocol import EngineConfig, InvalidRequestError, StructuredOutputsParams

Base = TypeVar("Base", bound=msgspec.Struct)
FORMS: Final = "use structured_outputs, or logit_bias"
BACKENDS: Final = (None, "auto", "guidance")
"""The accepted names of what compiles grammars, which is llguidance; `auto` takes what there is."""


class Device(enum.Enum):
    """Where V0 held blocks of KV: on the device that computes, or swapped out to the host."""

    GPU = enum.auto()
    CPU = enum.auto()


@dataclass(frozen=True)
class DecodingConfig:
    """How grammars are compiled. There is only one way, so there is nothing to set."""

    backend: str = "guidance"
    reasoning_backend: str = ""
    """What separates reasoning, which may precede a form; empty for nothing."""

    @classmethod
    def of(cls, config: EngineConfig, template: str | None) -> Self:
        """template: the source of the model's chat template."""
        parser = name_of(config.reasoning_parser, template)
        return cls(reasoning_backend="" if parser == "none" else parser)


@dataclass(frozen=True)
class PromptAdapterRequest:
    """Names a prompt adapter. No engine here has any."""

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int


PROMPT_ADAPTER: Final = Foreign("prompt adapters are not supported; use lora_request")


class GuidedDecodingParams(StructuredOutputsParams, omit_defaults=True):
    """V0's name of `StructuredOutputsParams`, with the library that compiles the form."""

    backend: str | None = None
    """None, `auto` or `guidance`."""

    def form(self) -> StructuredOutputsParams:
        """Return the form by its present name. Raises `InvalidRequestError` for another backend."""
        if self.backend not in BACKENDS:
            raise InvalidRequestError(
                f"guided_decoding.backend {self.backend!r} is not here; leave it out, or use "
                "`guidance`",
                param="guided_decoding",
            )
        return _copied(self, StructuredOutputsParams)


class SamplingParams(
    diptych_protocol.SamplingParams, omit_defaults=True, forbid_unknown_fields=True
):
    """`SamplingParams` with the fields that V0 had and V1 does not have.

    Clients of V1 accept it too, but refuse `guided_decoding` unless it is None. V0's client accepts
    functions as `logits_processors`, and sends the engine their names.
    """

    guided_decoding: GuidedDecodingParams | None = None
    """V0's name of `structured_outputs`."""
    allowed_token_ids: Annotated[Any, Foreign(FORMS)] = None
    best_of: Annotated[Any, Foreign("use n, and choose among the answers", (1,))] = None
    use_beam_search: Annotated[Any, Foreign("there is no beam search", (False,))] = None
    truncate_prompt_tokens: Annotated[
        Any, Foreign("use tokenization_kwargs={'truncation': True, 'max_length': ...}")
    ] = None
    spaces_between_special_tokens: Annotated[
        Any, Foreign("text is what the tokens say", (True, False))
    ] = None
    skip_reading_prefix_cache: Annotated[Any, Foreign("use a cache_salt of its own", (False,))] = (
        None
    )
    flat_logprobs: Annotated[Any, Foreign("log probabilities are dictionaries", (False,))] = None
    repetition_detection: Annotated[Any, Foreign("use a penalty, or max_tokens")] = None
    thinking_token_budget: Annotated[Any, Foreign("limit the answer with max_tokens")] = None

    def __post_init__(self) -> None:
        judge_foreign(self)
        for name in foreign_fields(type(self)):
            setattr(self, name, None)  # so that it does not travel


def params_of_today(params: Any) -> Any:
    """Return sampling parameters without V0's fields; others are returned unchanged. The caller's
    object stays as it is.

    Raises:
        InvalidRequestError: `guided_decoding` is not what its field declares, or stands beside
            `structured_outputs`.
    """
    if not isinstance(params, diptych_protocol.SamplingParams):
        return params
    plain = _copied(params, diptych_protocol.SamplingParams)
    if isinstance(plain.logits_processors, list):
        plain.logits_processors = [_name_of(each) for each in plain.logits_processors]
    if not isinstance(params, SamplingParams):
        return plain
    guided = params.guided_decoding
    if guided is None:
        return plain
    if not isinstance(guided, GuidedDecodingParams):
        raise InvalidRequestError(
            f"guided_decoding must be GuidedDecodingParams, not {type(guided).__name__}",
            param="guided_decoding",
        )
    if plain.structured_outputs is not None:
        raise InvalidRequestError(
            "guided_decoding is the older name of structured_outputs: set one of them",
            param="guided_decoding",
        )
    plain.structured_outputs = guided.form()
    return plain


def _name_of(processor: Any) -> Any:
    """What a configuration calls a function, which is all that travels of it."""
    module, name = getattr(processor, "__module__", ""), getattr(processor, "__qualname__", "")
    return f"{module}:{name}" if module and name else processor


def _copied(params: msgspec.Struct, base: type[Base]) -> Base:
    return base(**{name: getattr(params, name) for name in base.__struct_fields__})
