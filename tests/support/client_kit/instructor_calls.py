"""What instructor gets from a server in its modes: `python instructor_calls.py URL QUESTION`.

Runs in an environment that has instructor, and prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import instructor
import openai
from client_kit.asked import WILL_IT_RAIN, Rain

MODES: Final = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")
"""The other modes only ask the model for JSON in words, and one this small writes none."""


def calls(url: str, question: str) -> dict[str, Any]:
    """The results of calls, by what was called."""
    server: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    greedy: dict[str, Any] = {
        "model": "smollm2", "messages": [{"role": "user", "content": WILL_IT_RAIN}],
        "temperature": 0, "max_tokens": 100, "max_retries": 0,
    }  # fmt: skip
    told: dict[str, Any] = {}
    for mode in MODES:
        client = instructor.from_openai(openai.OpenAI(**server), mode=instructor.Mode[mode])
        rain = client.chat.completions.create(response_model=Rain, **greedy)
        *_, partly = client.chat.completions.create_partial(response_model=Rain, **greedy)
        told[mode] = [rain.rain, partly.rain]
    client = instructor.from_openai(openai.OpenAI(**server))
    rain, completion = client.chat.completions.create_with_completion(response_model=Rain, **greedy)
    told["usage"] = completion.usage.model_dump()
    text = client.chat.completions.create(
        response_model=None, **greedy | {"messages": [{"role": "user", "content": question}]}
    )
    told["text"] = text.choices[0].message.content
    return told


if __name__ == "__main__":
    print(json.dumps(calls(*sys.argv[1:])))
