"""Prints the fields of vLLM's requests as JSON, in vLLM's own environment.

`.vllm/bin/python tests/support/vllm_kit/print_fields.py >tests/support/vllm_kit/fields.json`
"""

from __future__ import annotations

import json
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final

REQUESTS: Final = {
    "ChatCompletionRequest": "openai.chat_completion",
    "CompletionRequest": "openai.completion",
    "ResponsesRequest": "openai.responses",
    "EmbeddingCompletionRequest": "pooling.embed",
    "AnthropicMessagesRequest": "anthropic",
    "AnthropicCountTokensRequest": "anthropic",
}
"""Class -> its package below `vllm.entrypoints`."""


def fields_of(name: str) -> str:
    module: Any = import_module(f"vllm.entrypoints.{REQUESTS[name]}.protocol")
    fields = getattr(module, name).model_fields
    return " ".join(sorted(field.alias or own for own, field in fields.items()))


if __name__ == "__main__":
    told = {"version": version("vllm"), "fields": {name: fields_of(name) for name in REQUESTS}}
    print(json.dumps(told, indent=1))
