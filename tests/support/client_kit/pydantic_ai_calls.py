"""What agents of pydantic-ai get from a server: `python pydantic_ai_calls.py URL QUESTION`.

Runs in an environment that has pydantic-ai-slim[openai], and prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from client_kit.asked import OF_PARIS, WILL_IT_RAIN, Rain, weather
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError, UsageLimitExceeded
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits


async def calls(url: str, question: str) -> dict[str, Any]:
    """The results of calls through both APIs, by what was called."""
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return {
        "chat": await of_model(OpenAIChatModel, provider, question),
        "responses": await of_model(OpenAIResponsesModel, provider, question),
    }


async def of_model(kind: Any, provider: OpenAIProvider, question: str) -> dict[str, Any]:
    model = kind("smollm2", provider=provider)
    greedy: Any = {"temperature": 0, "max_tokens": 100}
    agent: Any = Agent(model, model_settings=greedy)
    whole = await agent.run(question)
    told: dict[str, Any] = {"whole": whole.output, "tokens": whole.usage.output_tokens}
    async with agent.run_stream(question) as streamed:
        pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
        told["stream"], told["streamed tokens"] = pieces, streamed.usage.output_tokens
    for form in (NativeOutput, ToolOutput):
        asked: Any = Agent(model, output_type=form(Rain), model_settings=greedy)
        rain = (await asked.run(WILL_IT_RAIN)).output.rain
        async with asked.run_stream(WILL_IT_RAIN) as streamed:
            told[form.__name__] = [rain, (await streamed.get_output()).rain]
    forced: Any = Agent(model, tools=[weather], output_type=ToolOutput(Rain), model_settings=greedy)
    first = await forced.run(OF_PARIS)
    after = await agent.run("And tomorrow?", message_history=first.all_messages())
    told["after calls"], told["parts"] = after.output, parts(after.all_messages())
    free: Any = Agent(model, tools=[weather], output_type=NativeOutput(Rain), model_settings=greedy)
    try:
        ended = await free.run(WILL_IT_RAIN, usage_limits=UsageLimits(request_limit=2))
        told["free"] = ended.output.rain
    except UsageLimitExceeded:  # it only calls
        told["free"] = "calls"
    told["errors"] = []
    for name, text in (("other", question), ("smollm2", "word " * 9000)):
        try:
            await Agent(kind(name, provider=provider)).run(text)
        except ModelHTTPError as error:
            told["errors"].append([type(error).__name__, error.status_code])
    return told


def parts(messages: list[ModelMessage]) -> list[str]:
    return [type(part).__name__ for message in messages for part in message.parts]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(calls(*sys.argv[1:]))))
