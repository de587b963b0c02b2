"""Adds to the API's description what the server's own checks require beyond the types.

These checks name field and remedy, which a decoder's errors do not, so they are not in the types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from diptych_frontend.anthropic.api_types import MessagesRequest
from diptych_frontend.openai.api_types import MAX_MESSAGES, ChatCompletionRequest, CompletionRequest
from diptych_frontend.openai.embeddings import MAX_INPUTS, EmbeddingRequest
from diptych_frontend.responses_api.api_types import ResponsesRequest
from diptych_frontend.vllm_api import scoring
from diptych_frontend.vllm_api.tokenization import TokenizeRequest
from diptych_protocol import StructuredOutputsParams, sampling

Schema = dict[str, Any]
Narrower = Mapping[str, Schema]
"""The type of a value -> further conditions on it."""

_FILLED: Final[Schema] = {"minLength": 1}
_STOP: Final[Schema] = {"minLength": 1, "maxLength": sampling.MAX_STOP_CHARS}
_STOPS: Final[Schema] = {"maxItems": sampling.MAX_STOPS, "items": {"type": "string", **_STOP}}
_SAMPLING: Final[Mapping[str, Narrower]] = {
    "n": {"integer": {"minimum": 1, "maximum": sampling.MAX_N}},
    "temperature": {"number": {"minimum": 0, "maximum": 100}},
    "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
    "top_k": {"integer": {"minimum": -1}},
    "min_p": {"number": {"minimum": 0, "maximum": 1}},
    "presence_penalty": {"number": {"minimum": -2, "maximum": 2}},
    "frequency_penalty": {"number": {"minimum": -2, "maximum": 2}},
    "repetition_penalty": {"number": {"exclusiveMinimum": 0, "maximum": 100}},
    "max_tokens": {"integer": {"minimum": 1}},
    "min_tokens": {"integer": {"minimum": 0}},
    "stop": {"string": _STOP, "array": _STOPS},
    "bad_words": {"array": _STOPS},
    "stop_token_ids": {"array": {"maxItems": sampling.MAX_STOP_IDS}},
    "logit_bias": {
        "object": {
            "maxProperties": sampling.MAX_BIASED,
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    },
}
_INT64: Final[Schema] = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_TEXTS: Final[Narrower] = {"array": {"minItems": 1, "maxItems": MAX_INPUTS}}


def _prompts(most: Schema) -> Schema:
    """One text, one list of token ids, or a list of either."""
    ids = {"type": "array", "items": _INT64, "minItems": 1}
    lists = [
        {"type": "array", "items": of, "minItems": 1, **most} for of in ({"type": "string"}, ids)
    ]
    return {"anyOf": [{"type": "string"}, ids, *lists]}


NARROWER: Final[Mapping[type, Mapping[str, Narrower]]] = MappingProxyType(
    {
        ChatCompletionRequest: _SAMPLING,
        CompletionRequest: {**_SAMPLING, "max_tokens": {"integer": {"minimum": 0}}},
        MessagesRequest: {name: _SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
        ResponsesRequest: {
            "temperature": _SAMPLING["temperature"],
            "top_p": _SAMPLING["top_p"],
            "input": {"array": {"minItems": 1, "maxItems": MAX_MESSAGES}},
        },
        scoring.ScoreRequest: dict.fromkeys((*scoring.FIRST, *scoring.SECOND), _TEXTS),
        scoring.RerankRequest: {"documents": _TEXTS},
        StructuredOutputsParams: {
            "json": {"string": _FILLED},
            "regex": {"string": _FILLED},
            "grammar": {"string": _FILLED},
            "choice": {"array": {"minItems": 1, "items": {"type": "string", **_FILLED}}},
        },
    }
)
"""The conditions, by the fields of requests."""
REPLACED: Final[Mapping[type, Mapping[str, Schema]]] = MappingProxyType(
    {
        CompletionRequest: {"prompt": _prompts({})},
        EmbeddingRequest: {"input": _prompts({"maxItems": MAX_INPUTS})},
    }
)
"""Fields whose values all have one type."""
EXACTLY_ONE: Final[Mapping[type, Sequence[Sequence[str]]]] = MappingProxyType(
    {
        StructuredOutputsParams: (sampling.FORMS,),
        scoring.ScoreRequest: (scoring.FIRST, scoring.SECOND),
        TokenizeRequest: (("prompt", "messages"),),
    }
)
"""Exactly one field of each group must be given."""


def narrow(schemas: Mapping[type, Schema]) -> None:
    """Add the conditions to each type's schema, in place."""
    for kind, schema in schemas.items():
        properties = schema["properties"]
        for field, by_type in NARROWER.get(kind, {}).items():
            for member in _members(properties[field]):
                member.update(by_type.get(member.get("type", ""), {}))
        properties.update(REPLACED.get(kind, {}))
        groups = EXACTLY_ONE.get(kind, ())
        if groups:
            schema["allOf"] = [{"anyOf": _one_of(properties, names)} for names in groups]


def _members(schema: Schema) -> list[Schema]:
    members: list[Schema] = schema.get("anyOf", [schema])
    return members


def _one_of(properties: Schema, names: Sequence[str]) -> list[Schema]:
    absent = {"enum": [None, False]}
    return [
        {
            "required": [name],
            "properties": {**dict.fromkeys(names, absent), name: _given(properties[name])},
        }
        for name in names
    ]


def _given(schema: Schema) -> Schema:
    kinds = [kind for kind in _members(schema) if kind.get("type") != "null"]
    return {"const": True} if kinds == [schema] else {"anyOf": kinds}
