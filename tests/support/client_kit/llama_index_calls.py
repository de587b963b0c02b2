"""What llama-index gets from a server: `python llama_index_calls.py URL QUESTION`.

Runs in an environment that has llama-index-llms-openai-like, and prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from client_kit.asked import OF_PARIS, WILL_IT_RAIN, Rain, weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses


async def calls(url: str, question: str) -> dict[str, Any]:
    """The results of calls, by what was called."""
    server: dict[str, Any] = {
        "model": "smollm2", "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0,
        "context_window": 8192, "temperature": 0,
    }  # fmt: skip
    greedy: dict[str, Any] = {**server, "max_tokens": 100, "is_chat_model": True}
    chat = OpenAILike(**greedy, is_function_calling_model=True)
    text = OpenAILike(**greedy | {"is_chat_model": False})
    responses = OpenAILikeResponses(**server, max_output_tokens=100)
    forming = OpenAILike(**greedy, should_use_structured_outputs=True)
    asked = [ChatMessage(role="user", content=question)]
    answer = chat.chat(asked)
    told: dict[str, Any] = {
        "whole": [answer.message.content, (await chat.achat(asked)).message.content,
                  responses.chat(asked).message.content],
        "tokens": answer.raw.usage.completion_tokens,
        "stream": [piece.delta for piece in chat.stream_chat(asked)],
        "streamed response": [piece.delta for piece in responses.stream_chat(asked)],
        "text": text.complete("One, two,").text,
        "streamed text": [piece.delta for piece in text.stream_complete("One, two,")],
    }  # fmt: skip
    rain: Any = PromptTemplate(WILL_IT_RAIN)
    told["forms"] = [model.structured_predict(Rain, rain).rain for model in (chat, forming)]
    tool = FunctionTool.from_defaults(weather)
    forced: dict[str, Any] = {"tools": [tool], "user_msg": OF_PARIS, "tool_required": True}
    *_, streamed = chat.stream_chat_with_tools(**forced)
    told["calls"] = [
        [call.tool_name, call.tool_kwargs]
        for each in (chat.chat_with_tools(**forced), streamed)
        for call in chat.get_tool_calls_from_response(each)
    ]
    agent = FunctionAgent(tools=[tool], llm=chat, initial_tool_choice="weather")
    ended = await agent.run(user_msg=OF_PARIS)
    told["agent"] = [str(ended), [call.tool_name for call in ended.tool_calls]]
    try:
        OpenAILike(**greedy | {"model": "other"}).chat(asked)
    except openai.NotFoundError as error:
        told["error"] = error.status_code
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(calls(*sys.argv[1:]))))
