"""What LiteLLM gets from a server through several of its providers: `python litellm_calls.py URL`.

Runs in an environment that has litellm, and prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
RAIN = {
    "type": "object",
    "properties": {"rain": {"type": "boolean"}},
    "required": ["rain"],
    "additionalProperties": False,
}


def calls(url: str, question: str) -> dict[str, Any]:
    """The results of calls, by what was called."""
    server: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "timeout": 120}
    greedy: dict[str, Any] = {**server, "temperature": 0, "max_tokens": 100}
    messages = [{"role": "user", "content": question}]
    told: dict[str, Any] = {}
    for provider in ("openai", "hosted_vllm"):
        chat = {"model": f"{provider}/smollm2", "messages": messages, **greedy}
        whole = litellm.completion(**chat)
        told[f"{provider} chat"] = whole.choices[0].message.content
        counted = litellm.completion(**chat, stream=True, stream_options={"include_usage": True})
        chunks = list(counted)
        summed = litellm.stream_chunk_builder(chunks).usage
        told[f"{provider} usage"] = [usage.model_dump() for usage in (whole.usage, summed)]
        told[f"{provider} stream"] = [
            chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
        ]
    # For hosted_vllm LiteLLM leaves `additionalProperties: false` out of schemas, and a small model
    # then goes on writing properties of its own.
    told["calls"] = called("openai/smollm2", greedy)
    # The route of Anthropic's API begins below the URL itself.
    claude = {"model": "anthropic/smollm2", "messages": messages, **greedy, "api_base": url}
    told["anthropic chat"] = litellm.completion(**claude).choices[0].message.content
    awaited = litellm.acompletion(model="openai/smollm2", messages=messages, **greedy)
    told["async chat"] = asyncio.run(awaited).choices[0].message.content
    form = {"type": "json_schema", "json_schema": {"name": "rain", "schema": RAIN}}
    weather = [{"role": "user", "content": "Will it rain?"}]
    formed = litellm.completion(
        model="openai/smollm2", messages=weather, response_format=form, **greedy
    )
    told["schema"] = json.loads(formed.choices[0].message.content)
    text = litellm.text_completion(
        model="text-completion-openai/smollm2", prompt="One, two,", **greedy
    )
    told["text"] = text.choices[0].text
    embedded = litellm.embedding(model="openai/smollm2", input=["a", "b"], **server)
    told["embeddings"] = [len(each["embedding"]) for each in embedded.data]
    documents = ["1, 2, 3", "The ocean is calm."]
    ranked = litellm.rerank(
        model="hosted_vllm/smollm2", query="The sea is calm.", documents=documents, **server
    )
    told["rerank"] = [result["index"] for result in ranked.results]
    return told


def called(model: str, greedy: dict[str, Any]) -> list[list[str]]:
    """A forced call, whole and streamed, and how many tokens are said after its result."""
    asked: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    forced: dict[str, Any] = {"model": model, "tools": [WEATHER], **greedy}
    whole = litellm.completion(messages=asked, tool_choice="required", **forced).choices[0].message
    chunks = list(litellm.completion(messages=asked, tool_choice="required", stream=True, **forced))
    streamed = litellm.stream_chunk_builder(chunks).choices[0].message
    result = {"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "sunny"}
    litellm.completion(messages=[*asked, whole, result], **forced)
    functions = [call.function for call in [*whole.tool_calls, *streamed.tool_calls]]
    return [[function.name, function.arguments] for function in functions]


if __name__ == "__main__":
    print(json.dumps(calls(*sys.argv[1:])))
