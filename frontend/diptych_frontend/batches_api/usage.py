"""Adds up the tokens of a batch from its answers."""

from __future__ import annotations

from typing import Final

import msgspec


class InputDetails(msgspec.Struct, frozen=True):
    """Tokens of prompts that were in a prefix cache."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Tokens of answers that were reasoning."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True):
    """The tokens of all answers of a batch so far."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


_NO_DETAILS: Final = _Details()


class _Usage(msgspec.Struct):
    """That of any route: chats and completions have one kind of names, responses the other."""

    total_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body | None = None


class Told(msgspec.Struct):
    """The counts in a line of an output or error file."""

    custom_id: str
    response: _Response | None = None


def added(sum_so_far: BatchUsage, told: Told) -> BatchUsage:
    """Return the sum with one more answer."""
    body = None if told.response is None else told.response.body
    if body is None or body.usage is None:
        return sum_so_far
    usage = body.usage
    inputs = usage.prompt_tokens_details or usage.input_tokens_details or _NO_DETAILS
    outputs = usage.completion_tokens_details or usage.output_tokens_details or _NO_DETAILS
    cached = sum_so_far.input_tokens_details.cached_tokens + inputs.cached_tokens
    reasoning = sum_so_far.output_tokens_details.reasoning_tokens + outputs.reasoning_tokens
    return BatchUsage(
        sum_so_far.input_tokens + usage.prompt_tokens + usage.input_tokens,
        InputDetails(cached),
        sum_so_far.output_tokens + usage.completion_tokens + usage.output_tokens,
        OutputDetails(reasoning),
        sum_so_far.total_tokens + usage.total_tokens,
    )
