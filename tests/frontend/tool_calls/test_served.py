"""Calls in the format of each family, through the three APIs of chats."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import httpx2
import openai
import pytest
from engine_kit.echo_engine import EOS, EchoEngine

from diptych_frontend.app import build_app
from diptych_frontend.tool_calls.formats import FORMATS, SIGNS

ARGUMENTS = {"x": "<b>", "n": [1, {"a": None}]}
WRITTEN = json.dumps(ARGUMENTS)
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}, "n": {"type": "array"}}}
ANSWERS = {
    "hermes": f'So. <tool_call>{{"name": "f", "arguments": {WRITTEN}}}</tool_call>',
    "llama": f'So.\n{{"name": "f", "parameters": {WRITTEN}}}',
    "mistral": f"So. [TOOL_CALLS]f[ARGS]{WRITTEN}",
    "granite": f'So. <|tool_call|>[{{"name": "f", "arguments": {WRITTEN}}}]',
    "phi4_mini": f'So. <|tool_call|>[{{"name": "f", "arguments": {WRITTEN}}}]<|/tool_call|>',
    "deepseek": "So. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
    f"```json\n{WRITTEN}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "pythonic": "So.\n[f(x='<b>', n=[1, {'a': None}])]",
    "qwen3_coder": "So. <tool_call>\n<function=f>\n<parameter=x>\n<b>\n</parameter>\n"
    '<parameter=n>\n[1, {"a": null}]\n</parameter>\n</function>\n</tool_call>',
    "harmony": "<|channel|>final<|message|>So. <|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.f json<|message|>{WRITTEN}<|call|>",
}
TEXTS_ONLY = ("granite", "phi4_mini")
"""Their templates show no earlier calls."""
THOUGHT = f"<think>\nhm\n</think>\n\n{ANSWERS['hermes']}"
UNASKED = {
    # family: its template as far as it tells formats, an answer, and whether that reasons
    "Qwen 3": ("{% if tools %}<tool_call>{% endif %}{{ c.split('</think>')[-1] }}", THOUGHT, True),
    "SmolLM3": ("{% if xml_tools %}<tool_call>{% endif %}<think></think>", THOUGHT, True),
    "DeepSeek R1": (
        "{{ tools }}<｜tool▁call▁begin｜>{{ c.split('</think>')[-1] }}<｜Assistant｜><think>\n",
        f"<think>\nhm\n</think>\n\n{ANSWERS['deepseek']}", True,
    ),
    "gpt-oss": (
        "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>",
        f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{ANSWERS['harmony']}", True,
    ),
    "Qwen 2.5": ("{% if tools %}<tool_call>{% endif %}", ANSWERS["hermes"], False),
    "Granite 3": ("{% if tools %}<|tool_call|>{% endif %}", ANSWERS["granite"], False),
    "Granite 4": ("{% if tools %}</tools><tool_call>{% endif %}", ANSWERS["hermes"], False),
    "Llama 3.2": ("{{ tools }}<|start_header_id|>ipython", ANSWERS["llama"], False),
    "Phi-4-mini": ("{{ m['tools'] + '<|tool|>' }}", ANSWERS["phi4_mini"], False),
}  # fmt: skip
USER: Any = [{"role": "user", "content": "hi"}]
FUNCTION: Any = {"name": "f", "parameters": SCHEMA}
STRICT: Any = {"strict": True, "parameters": {**SCHEMA, "additionalProperties": False}}
STRICT["parameters"]["required"] = [*SCHEMA["properties"]]
CHAT: Any = {
    "model": "echo", "max_tokens": 500, "messages": USER,
    "tools": [{"type": "function", "function": FUNCTION}],
}  # fmt: skip
MESSAGES: Any = {**CHAT, "tools": [{"name": "f", "input_schema": SCHEMA}]}
RESPONSES: Any = {
    "model": "echo", "max_output_tokens": 500, "input": "hi",
    "tools": [{"type": "function", **FUNCTION}],
}  # fmt: skip
CONVERSATION: Any = [
    *USER,
    {
        "role": "assistant", "content": None,
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
            for call_id in ("call_1", "call_2")
        ],
    },
    *({"role": "tool", "tool_call_id": f"call_{n}", "content": str(n)} for n in (1, 2)),
]  # fmt: skip


class Family:
    """A server of a model of one family, whose answer is given."""

    def __init__(self, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.answer = ""
        self._change = monkeypatch.setattr
        self.rendered: list[Any] = []
        monkeypatch.setattr(engine.renderer, "render_chat", self._render)

    def _render(self, messages: Any, **_: Any) -> Any:
        self.rendered.append(messages)
        return self.engine.renderer.render_prompt([*self.answer.encode(), EOS])

    def of(self, name: str) -> Family:
        """The template of a model shows its format, but for harmony."""
        sign = next((sign for sign, sign_name in SIGNS if sign_name == name), None)
        shown = "{{ tools }}" if name in TEXTS_ONLY else "{{ tools }}{{ tool_calls }}"
        self._change(self.engine.renderer, "chat_template", f"{shown}{sign or ''}")
        self.engine.reasoning_parser = "harmony" if name == "harmony" else "none"
        self.answer = ANSWERS[name]
        return self

    def saying(self, template: str, answer: str) -> Family:
        """A model of which nothing was said but its template."""
        self._change(self.engine.renderer, "chat_template", template)
        self.engine.reasoning_parser, self.engine.tool_call_parser = "auto", "auto"
        self.answer = answer
        return self

    async def post(self, path: str, body: Any) -> Any:
        transport = httpx.ASGITransport(build_app(self.engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            return response.json()
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture
def family(engine: EchoEngine, monkeypatch: pytest.MonkeyPatch) -> Family:
    return Family(engine, monkeypatch)


@pytest.mark.parametrize("name", FORMATS)
async def test_contract_C05_chats_tell_the_calls_of_every_family(family: Family, name: str) -> None:
    [choice] = (await family.of(name).post("/v1/chat/completions", CHAT))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So."
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS

    if (
        name == "deepseek"
    ):  # the echoing engine streams bytes, and the markers' letters have several
        return
    chunks = await family.post("/v1/chat/completions", CHAT | {"stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta["content"] or "" for delta in deltas).strip() == "So."
    [streamed] = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert streamed["function"] == call["function"]


@pytest.mark.parametrize("name", UNASKED)
async def test_contract_C05_a_template_tells_reasoning_and_calls_unasked(
    family: Family, name: str
) -> None:
    template, answer, reasons = UNASKED[name]
    [choice] = (await family.saying(template, answer).post("/v1/chat/completions", CHAT))["choices"]
    message = choice["message"]
    assert message["content"] == "So."
    assert message.get("reasoning_content", "").strip() == ("hm" if reasons else "")
    [call] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    if "▁" in answer:  # as above
        return
    chunks = await family.post("/v1/chat/completions", CHAT | {"stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta["content"] or "" for delta in deltas).strip() == "So."
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert thought.strip() == message.get("reasoning_content", "").strip()
    [streamed] = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert streamed["function"] == call["function"]


@pytest.mark.parametrize("name", FORMATS)
async def test_contract_C05_messages_and_responses_tell_the_same_calls(
    family: Family, name: str
) -> None:
    message = await family.of(name).post("/v1/messages", MESSAGES)
    assert message["stop_reason"] == "tool_use"
    [use] = [block for block in message["content"] if block["type"] == "tool_use"]
    assert (use["name"], use["input"]) == ("f", ARGUMENTS)
    response = await family.post("/v1/responses", RESPONSES)
    [call] = [item for item in response["output"] if item["type"] == "function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("f", ARGUMENTS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("by", ["max_tokens", "a stop string"])
async def test_contract_C05_no_api_tells_an_unfinished_call(
    family: Family, name: str, by: str
) -> None:
    answer = family.of(name).answer
    length, stop = (
        len(answer[: answer.index("<b>") + 1].encode()),
        [] if by == "max_tokens" else ["b>"],
    )
    limit = length if not stop else 500
    chat = CHAT | {"max_tokens": limit, "stop": stop or None}
    [choice] = (await family.post("/v1/chat/completions", chat))["choices"]
    assert choice["message"]["content"].strip() == "So."
    assert not choice["message"].get("tool_calls")
    assert choice["finish_reason"] == ("stop" if stop else "length")
    if name != "deepseek":  # as above
        chunks = await family.post("/v1/chat/completions", chat | {"stream": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta["content"] or "" for delta in deltas).strip() == "So."
        assert not any(delta.get("tool_calls") for delta in deltas)

    asked = MESSAGES | {"max_tokens": limit, "stop_sequences": stop}
    message = await family.post("/v1/messages", asked)
    assert [block["text"].strip() for block in message["content"]] == ["So."]
    assert message["stop_reason"] == ("stop_sequence" if stop else "max_tokens")
    if stop:  # /v1/responses has none
        return
    response = await family.post("/v1/responses", RESPONSES | {"max_output_tokens": limit})
    [item] = response["output"]
    assert (item["status"], item["content"][0]["text"].strip()) == ("incomplete", "So.")
    assert response["status"] == "incomplete"
    if name != "deepseek":
        events = await family.post(
            "/v1/responses", RESPONSES | {"max_output_tokens": limit, "stream": True}
        )
        assert events[-1]["type"] == "response.incomplete"
        [item] = events[-1]["response"]["output"]
        assert item["content"][0]["text"].strip() == "So."


@pytest.mark.parametrize("name", FORMATS)
async def test_contract_C05_a_forced_call_has_one_form_in_every_family(
    family: Family, name: str
) -> None:
    family.of(name).answer = ANSWERS["hermes"].removeprefix("So. ")
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        body = CHAT | {"tool_choice": choice}
        [told] = (await family.post("/v1/chat/completions", body))["choices"]
        assert told["finish_reason"] == "tool_calls"
        assert json.loads(told["message"]["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
        params = family.engine.seen[-1][1]
        assert params.structured_outputs is not None
        assert params.skip_special_tokens


@pytest.mark.parametrize("name", FORMATS)
async def test_contract_C05_special_tokens_stay_only_where_calls_are_looked_for(
    family: Family, name: str
) -> None:
    for changes in ({}, {"tool_choice": "none"}, {"tools": None}):
        await family.of(name).post("/v1/chat/completions", CHAT | changes)
        keeps = not family.engine.seen[-1][1].skip_special_tokens
        assert keeps == (name in ("mistral", "granite", "phi4_mini") and not changes)


@pytest.mark.parametrize("name", FORMATS)
async def test_contract_C05_without_tools_a_call_is_text(family: Family, name: str) -> None:
    body = CHAT | {"tools": None}
    [choice] = (await family.of(name).post("/v1/chat/completions", body))["choices"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    if name == "harmony":  # what is in another channel is reasoning
        assert choice["message"]["reasoning_content"] == WRITTEN
    else:
        assert choice["message"]["content"] == ANSWERS[name]


async def test_a_call_of_gpt_oss_is_not_counted_as_reasoning(family: Family) -> None:
    answer = await family.of("harmony").post("/v1/chat/completions", CHAT)
    without = await family.post("/v1/chat/completions", CHAT | {"tools": None})
    counted = [
        body["usage"]["completion_tokens_details"]["reasoning_tokens"] for body in (answer, without)
    ]
    assert counted[1] - counted[0] >= len(WRITTEN)


@pytest.mark.parametrize("name", FORMATS)
async def test_earlier_calls_reach_the_template_in_its_familys_shape(
    family: Family, name: str
) -> None:
    body = {"model": "echo", "messages": CONVERSATION}
    await family.of(name).post("/v1/chat/completions", body | {"max_tokens": 1})
    await family.post("/tokenize", body)
    rendered, tokenized = family.rendered
    assert rendered == tokenized
    if name in TEXTS_ONLY:
        written = '<|tool_call|>[{"name":"f","arguments":{}},{"name":"f","arguments":{}}]'
        written += "<|/tool_call|>" if name == "phi4_mini" else ""
        assert [message["content"] for message in rendered[1:]] == [written, "1", "2"]
        assert rendered[1].keys() == {"role", "content"}
        return
    shape = [len(message.get("tool_calls", ())) for message in rendered]
    assert shape == ([0, 1, 0, 1, 0] if name in ("llama", "harmony") else [0, 2, 0, 0])
    ids = [message["tool_call_id"] for message in rendered if message["role"] == "tool"]
    called = [call["id"] for message in rendered for call in message.get("tool_calls", ())]
    assert ids == called
    assert (ids == ["call_1", "call_2"]) == (name != "mistral")


@pytest.mark.parametrize(
    ("path", "body", "forced", "none"),
    [
        ("/v1/chat/completions", CHAT, "required", "none"),
        ("/v1/messages", MESSAGES, {"type": "any"}, {"type": "none"}),
        ("/v1/responses", RESPONSES, "required", "none"),
    ],
)
async def test_tools_that_a_template_cannot_show_are_refused_unless_a_call_is_forced(
    family: Family, path: str, body: Any, forced: Any, none: Any
) -> None:
    family.of("hermes")
    renderer: Any = family.engine.renderer
    renderer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    transport = httpx.ASGITransport(build_app(family.engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        refused = await client.post(path, json=body)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "the chat template of echo has no place for tools" in message
    for choice in (forced, none):
        await family.post(path, body | {"tool_choice": choice})


@pytest.fixture
async def web(family: Family) -> AsyncIterator[httpx2.AsyncClient]:
    """What official clients connect with to a server that always answers the same call."""
    app: Any = build_app(family.of("hermes").engine)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as client:
        yield client


async def test_what_openais_client_makes_of_a_chat_goes_back_as_it_is(
    family: Family, web: httpx2.AsyncClient
) -> None:
    client: Any = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=web)
    create = client.chat.completions.create
    asked = {**CHAT, "tools": [{"type": "function", "function": {**FUNCTION, **STRICT}}]}
    made: list[Any] = []
    whole = (await create(**asked)).choices[0].message
    made += [whole, whole.model_dump(), whole.model_dump(exclude_none=True)]
    async with client.chat.completions.stream(**asked) as stream:
        helped = (await stream.get_final_completion()).choices[0].message
    made += [helped, helped.model_dump()]
    parsed = (await client.chat.completions.parse(**asked)).choices[0].message
    made += [parsed, parsed.model_dump()]
    streamed = [chunk.choices[0].delta async for chunk in await create(**asked, stream=True)]
    pieces = [call for delta in streamed for call in delta.tool_calls or []]
    made.append(
        {"role": "assistant", "content": "", "tool_calls": [c.model_dump() for c in pieces]}
    )
    for message in made:
        calls = message["tool_calls"] if isinstance(message, dict) else message.tool_calls
        call_id = calls[0]["id"] if isinstance(message, dict) else calls[0].id
        result = {"role": "tool", "tool_call_id": call_id, "content": "done"}
        again = await create(**{**asked, "messages": [*USER, message, result]})
        assert "warnings" not in (again.model_extra or {})
        [earlier] = family.rendered[-1][1]["tool_calls"]
        assert (earlier["id"], earlier["function"]["arguments"]) == (call_id, ARGUMENTS)


async def test_what_openais_client_makes_of_a_response_goes_back_as_it_is(
    family: Family, web: httpx2.AsyncClient
) -> None:
    client: Any = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=web)
    whole = await client.responses.create(**RESPONSES)
    async with client.responses.stream(**RESPONSES) as stream:
        helped = await stream.get_final_response()
    for output in (whole.output, helped.output):
        items = [item.model_dump() for item in output]
        [call_id] = [item["call_id"] for item in items if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "done"}
        for earlier in (output, items):
            given = [*USER, *earlier, result]
            again = await client.responses.create(**{**RESPONSES, "input": given})
            assert "warnings" not in (again.model_extra or {})


async def test_what_anthropics_client_makes_of_a_message_goes_back_as_it_is(
    family: Family, web: httpx2.AsyncClient
) -> None:
    import anthropic  # takes two seconds, which each worker of pytest would spend

    client: Any = anthropic.AsyncAnthropic(base_url="http://test", api_key="none", http_client=web)
    whole = await client.messages.create(**MESSAGES)
    async with client.messages.stream(**MESSAGES) as stream:
        helped = await stream.get_final_message()
    for message in (whole, helped):
        for content in (message.content, [block.model_dump() for block in message.content]):
            use = message.content[-1]
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}
            turns = [
                *USER,
                {"role": "assistant", "content": content},
                {"role": "user", "content": [result]},
            ]
            await client.messages.create(**{**MESSAGES, "messages": turns})
            [earlier] = family.rendered[-1][1]["tool_calls"]
            assert earlier["function"]["arguments"] == ARGUMENTS
