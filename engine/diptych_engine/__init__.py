"""The engine: scheduler, block pool, model runner, and the process that drives them."""

from diptych_frontend.async_llm import AsyncLLM
from diptych_frontend.engine_args import EngineArgs

__all__ = ["AsyncLLM", "EngineArgs"]
