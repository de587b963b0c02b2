"""What OpenAI's Agents SDK gets from a server: `python openai_agents_calls.py URL QUESTION`.

Runs in an environment that has openai-agents, and prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from client_kit.asked import OF_PARIS, WILL_IT_RAIN, Rain, weather


async def calls(url: str, question: str) -> dict[str, Any]:
    """The results of calls through both APIs, by what was called."""
    set_tracing_disabled(disabled=True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    told = {
        name: await of_model(kind, client, question)
        for name, kind in (
            ("chat", OpenAIChatCompletionsModel),
            ("responses", OpenAIResponsesModel),
        )
    }
    plain: Any = Agent("plain", model=OpenAIResponsesModel("smollm2", client))
    first = await Runner.run(plain, question)
    second = await Runner.run(plain, question, previous_response_id=first.last_response_id)
    told["tokens"] = [run.raw_responses[0].usage.input_tokens for run in (first, second)]
    return told


async def of_model(kind: Any, client: openai.AsyncOpenAI, question: str) -> dict[str, Any]:
    model = kind("smollm2", client)
    greedy = ModelSettings(temperature=0, max_tokens=100, include_usage=True)
    forced = greedy.resolve(ModelSettings(tool_choice="required"))
    plain: Any = Agent("plain", model=model, model_settings=greedy)
    whole = await Runner.run(plain, question)
    told: dict[str, Any] = {"whole": whole.final_output}
    streamed = Runner.run_streamed(plain, question)
    told["stream"] = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    told["tokens"] = [run.context_wrapper.usage.output_tokens for run in (whole, streamed)]
    formed: Any = Agent("formed", model=model, model_settings=greedy, output_type=Rain)
    told["form"] = (await Runner.run(formed, WILL_IT_RAIN)).final_output.rain
    tool = function_tool(weather)
    caller: Any = Agent("caller", model=model, model_settings=forced, tools=[tool])
    told["calls"] = [item.type for item in (await Runner.run(caller, OF_PARIS)).new_items]
    session = SQLiteSession("of both runs")
    streamed = Runner.run_streamed(caller, OF_PARIS, session=session)
    events = [event async for event in streamed.stream_events()]
    told["streamed calls"] = [
        event.item.type for event in events if event.type == "run_item_stream_event"
    ]
    told["after calls"] = (await Runner.run(plain, "And tomorrow?", session=session)).final_output
    both: Any = Agent(
        "both", model=model, model_settings=forced, tools=[tool], output_type=Rain,
        tool_use_behavior="stop_on_first_tool",
    )  # fmt: skip
    told["call with a form"] = (await Runner.run(both, OF_PARIS)).final_output
    router: Any = Agent("router", model=model, model_settings=forced, handoffs=[plain])
    told["hand-off"] = (await Runner.run(router, question)).last_agent.name
    try:
        await Runner.run(Agent("wrong", model=kind("other", client)), question)
    except openai.NotFoundError as error:
        told["error"] = error.status_code
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(calls(*sys.argv[1:]))))
