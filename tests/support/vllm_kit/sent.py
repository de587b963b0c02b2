"""Requests as a router sends them to an engine."""

from __future__ import annotations

from typing import Any

from diptych_protocol import EngineCoreRequest, SamplingParams


def request(*done: int, prompt: int = 8, **params: Any) -> EngineCoreRequest:
    """done: tokens that another engine has generated. prompt: its length."""
    return EngineCoreRequest(
        request_id="r/1", prompt_token_ids=list(range(prompt)), mm_features=None,
        sampling_params=SamplingParams(**params), pooling_params=None, eos_token_id=None,
        arrival_time=0.0, lora_request=None, cache_salt="s", data_parallel_rank=None,
        generated_token_ids=list(done) or None,
    )  # fmt: skip
