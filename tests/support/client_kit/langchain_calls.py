"""What LangChain's classes for OpenAI get from a server: `python langchain_calls.py URL`.

Runs in an environment that has langchain-openai, and prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

RAIN = {
    "title": "rain",
    "description": "Whether it rains.",
    "type": "object",
    "properties": {"rain": {"type": "boolean"}},
    "required": ["rain"],
    "additionalProperties": False,
}
WEATHER = {
    "title": "weather",
    "description": "The weather of a city.",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def calls(url: str, question: str) -> dict[str, Any]:
    """The results of calls, by what was called."""
    server: dict[str, Any] = {
        "model": "smollm2", "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0,
    }  # fmt: skip
    greedy: dict[str, Any] = {**server, "temperature": 0, "max_tokens": 100}
    chat = ChatOpenAI(**greedy)
    streaming = ChatOpenAI(**greedy, stream_usage=True)
    responses = ChatOpenAI(**greedy, use_responses_api=True)
    embeddings = OpenAIEmbeddings(**server, check_embedding_ctx_length=False)
    told: dict[str, Any] = {
        "chat": chat.invoke(question).content,
        "batch": [answer.content for answer in chat.batch([question, question])],
        "text": OpenAI(**greedy).invoke("One, two,"),
        "response": responses.invoke(question).text,
        "embeddings": embeddings.embed_documents(["The sea is calm.", "The ocean is calm."]),
        "embedding": embeddings.embed_query("The sea is calm."),
    }
    pieces = list(streaming.stream(question))
    told["stream"] = [str(piece.content) for piece in pieces]
    told["usage"] = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    whole, *others = pieces
    for piece in others:
        whole = whole + piece
    told["sum"] = whole.usage_metadata
    told["whole usage"] = chat.invoke(question).usage_metadata
    for method in ("json_schema", "function_calling"):
        told[method] = chat.with_structured_output(RAIN, method=method).invoke("Will it rain?")
    asked = HumanMessage("What is the weather in Paris?")
    forced = chat.bind_tools([WEATHER], tool_choice="weather")
    answer = forced.invoke([asked])
    told["calls"] = answer.tool_calls
    first, *others = forced.stream([asked])
    for piece in others:
        first = first + piece
    told["streamed calls"] = first.tool_calls
    result = ToolMessage("sunny", tool_call_id=answer.tool_calls[0]["id"])
    told["after a call"] = (
        chat.bind_tools([WEATHER], tool_choice="none")
        .invoke([asked, answer, result])
        .usage_metadata
    )
    return told


if __name__ == "__main__":
    print(json.dumps(calls(*sys.argv[1:])))
