"""The engine: scheduler, block pool, model runner, and the process that runs them.

The names below are loaded at their first use, so that nobody imports what is not needed: an
`AsyncLLM` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych_engine.serving.llm import LLM
    from diptych_engine.serving.llm_engine import LLMEngine
    from diptych_frontend.core_client.async_llm import AsyncLLM
    from diptych_frontend.core_client.engine_args import EngineArgs
    from diptych_frontend.v0.mq_client import MQLLMEngineClient

__all__ = ["LLM", "AsyncLLM", "EngineArgs", "LLMEngine", "MQLLMEngineClient"]

_HOMES = {
    "LLM": "diptych_engine.serving.llm",
    "LLMEngine": "diptych_engine.serving.llm_engine",
    "AsyncLLM": "diptych_frontend.core_client.async_llm",
    "EngineArgs": "diptych_frontend.core_client.engine_args",
    "MQLLMEngineClient": "diptych_frontend.v0.mq_client",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
