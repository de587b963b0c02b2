"""What a model's files say of how to sample from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, get_type_hints

import msgspec

from diptych_protocol import SamplingDefaults

log = logging.getLogger(__name__)

LLAMA_CPP: Final = SamplingDefaults(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05)
"""For a GGUF file that says nothing: what llama.cpp does, for which such files are made and tried.
Their weights are rounded, which lifts the unlikely tokens, and few of them say anything."""
GGUF_KEYS: Final = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_HINTS: Final = get_type_hints(SamplingDefaults, include_extras=True)


def sampling_from_hf(generation: Mapping[str, Any]) -> SamplingDefaults:
    """From generation_config.json, which calls the fields as requests do."""
    return _readable({field: generation.get(field) for field in _HINTS})


def sampling_from_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """From GGUF metadata; `LLAMA_CPP` where that says nothing."""
    said = {field: metadata.get(key) for field, key in GGUF_KEYS.items()}
    return _readable(said).over(LLAMA_CPP)


def _readable(said: Mapping[str, Any]) -> SamplingDefaults:
    """The values that make sense. A model is not refused for advice that nobody can follow."""
    taken = {}
    for field, value in said.items():
        try:
            taken[field] = msgspec.convert(value, _HINTS[field])
        except msgspec.ValidationError as exc:
            log.warning("the model's %s is left out: %s", field, exc)
    return SamplingDefaults(**taken)
