"""The engine: scheduler, block pool, model runner, and the process that drives them."""

from diptych_frontend.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
