"""Fields of requests that have no effect: those that client libraries add to messages, those of the
known APIs, and unknown ones."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from benchmarks.call_path import path_of
from engine_kit.echo_engine import EchoEngine

from diptych_frontend.app import build_app
from diptych_frontend.openai.api_types import ChatCompletionRequest
from diptych_frontend.openai.field_rules import leave_out
from diptych_frontend.reasoning.request_options import effort_kwargs, effort_variables
from diptych_protocol import StructuredOutputsParams

CALL = {
    "id": "call_1", "type": "function", "index": 0,
    "function": {"name": "look", "arguments": "{}", "parsed_arguments": {}},
}  # fmt: skip
CONVERSATIONS: dict[str, tuple[str, dict[str, Any], int]] = {
    "pieces of a streamed call, and a parsed answer": (
        "/v1/chat/completions",
        {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "annotations": []}]},
            {"role": "assistant", "parsed": None, "provider_specific_fields": {"refusal": None},
             "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "x", "is_error": False},
        ]},
        6,
    ),
    "a block of Anthropic's": (
        "/v1/messages",
        {"max_tokens": 4, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "stop_reason": None}]},
        ]},
        1,
    ),
    "an item of Responses'": (
        "/v1/responses",
        {"input": [{"role": "user", "content": "hi", "created_by": "me"}]},
        0,
    ),
}  # fmt: skip
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"max_tokens": 4},
    "/v1/completions": {"model": "echo", "prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"model": "echo", "input": "hi", "max_output_tokens": 4},
    "/v1/messages": CHAT | {"max_tokens": 4},
}
TOOL = {"type": "function", "function": {"name": "f"}}


async def num_ignored(http: httpx.AsyncClient) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    [line] = [each for each in lines if each.startswith("diptych:ignored_fields_total")]
    return float(line.split()[1])


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_what_clients_add_to_messages_is_left_out(
    http: httpx.AsyncClient, engine: EchoEngine, name: str
) -> None:
    path, body, number = CONVERSATIONS[name]
    answer = await http.post(path, json={"model": "echo", **body})
    assert answer.status_code == 200, answer.text
    # Items of Responses are read later, and not counted.
    assert await num_ignored(http) == number
    assert "warnings" not in answer.json()
    assert len(engine.seen) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_names_the_unknown_fields_of_its_request(
    http: httpx.AsyncClient, path: str
) -> None:
    sent = BODIES[path] | {"tempratur": 1, "nö\n": 2}
    answer = await http.post(path, json=sent)
    assert answer.status_code == 200, answer.text
    told = answer.json()["warnings"]
    assert [each.split(" ", 1)[0] for each in told] == ["tempratur", "n??"]
    assert answer.headers["x-diptych-ignored"] == "tempratur, n??"
    assert await num_ignored(http) == 2


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_names_them_in_its_header_and_at_first(
    http: httpx.AsyncClient, path: str
) -> None:
    answer = await http.post(path, json=BODIES[path] | {"stream": True, "tempratur": 1})
    assert answer.headers["x-diptych-ignored"] == "tempratur"
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    first = json.loads(events[0])
    told = first.get("response", first.get("message", first))
    assert told["warnings"] == ["tempratur is ignored: nobody here knows it"]
    if "response" not in first:  # whose last event is the whole response once more
        assert not any("warnings" in event for event in events[1:])


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    "change", [{"response_format": FORM}, {"response_format": FORM, "reasoning_effort": "low"}]
)
async def test_a_body_with_a_form_is_warned_of_once(
    http: httpx.AsyncClient, change: dict[str, Any]
) -> None:
    """Such a body is read twice."""
    path = "/v1/chat/completions"
    answer = await http.post(path, json=BODIES[path] | change | {"odd": 1})
    named = ["odd", *(name for name in change if name == "reasoning_effort")]
    assert answer.headers.get_list("x-diptych-ignored") == named
    assert [line.split(" ", 1)[0] for line in answer.json()["warnings"]] == named
    assert await num_ignored(http) == 1


async def test_the_types_of_fields_are_looked_up_once() -> None:
    async def read() -> None:
        body = {**CHAT, "store": False, "user": None}
        assert len(leave_out(body, ChatCompletionRequest, refuses_unknown=True)) == 0

    await read()
    assert (await path_of(read())).total < 200, "it would be thousands"


async def test_other_answers_have_them_in_their_header(http: httpx.AsyncClient) -> None:
    body = {"model": "echo", "prompt": "hi", "odd": 1}
    answer = await http.post("/tokenize", json=body)
    assert (answer.status_code, answer.headers["x-diptych-ignored"]) == (200, "odd")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"tools": [TOOL | {"odd": 1}]}, "tools[0].odd"),
        ({"stream_options": {"odd": 1}, "stream": True}, "stream_options.odd"),
        ({"store": True, "user": "me", "metadata": {"a": "b"}}, "store"),
        ({"verbosity": "low", "prediction": {"type": "content", "content": ""}},
         "verbosity, prediction"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"thinking_token_budget": 7, "reasoning_effort": "low"},
         "thinking_token_budget, reasoning_effort"),
        ({f"field{n}": 1 for n in range(99)}, ", ".join(f"field{n}" for n in range(16))),
    ],
)  # fmt: skip
async def test_fields_without_an_effect_are_named_with_their_place(
    http: httpx.AsyncClient, change: dict[str, Any], where: str
) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT | change)
    assert (answer.status_code, answer.headers.get("x-diptych-ignored")) == (200, where)


@pytest.mark.parametrize(
    "change",
    [
        {"store": False, "verbosity": "medium", "service_tier": "auto", "functions": []},
        {"user": "me", "safety_identifier": "x", "prompt_cache_key": "k", "metadata": {"a": "b"}},
        {"prediction": None, "audio": None, "reasoning_effort": "none"},
    ],
)
async def test_what_asks_for_nothing_needs_no_warning(
    http: httpx.AsyncClient, change: dict[str, Any]
) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT | change)
    assert answer.status_code == 200, answer.text
    assert "x-diptych-ignored" not in answer.headers
    assert await num_ignored(http) == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": [{"role": "user", "content": "", "odd": 1}], "stop": 5}, "stop"),
        ({"messages": [{"role": "judge", "content": "hi", "odd": 1}]}, "messages"),
        ({"messages": [{"content": "hi", "odd": 1}]}, "messages"),
        ({"messages": [{"role": "user", "content": "hi", "odd": 10**40}], "seed": 10**40}, "seed"),
        ({"functions": [{}], "odd": 1}, "functions"),
    ],
)  # fmt: skip
async def test_what_would_change_the_answer_is_still_refused(
    http: httpx.AsyncClient, change: dict[str, Any], field: str
) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_a_service_may_refuse_unknown_fields(strict_http: httpx.AsyncClient) -> None:
    for path, body in BODIES.items():
        known = await strict_http.post(path, json=body)
        assert known.status_code == 200, known.text
        answer = await strict_http.post(path, json=body | {"tempratur": 1})
        assert answer.status_code == 400, answer.text
        assert "tempratur" in answer.json()["error"]["message"]
    # Those that are known to have no effect are ignored all the same.
    answer = await strict_http.post("/v1/chat/completions", json=CHAT | {"store": True})
    assert answer.headers["x-diptych-ignored"] == "store"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "form", [{"json": {"type": "integer"}}, {"regex": "a+"}, {"choice": ["a", "b"]},
             {"grammar": 'start: "a"'}], ids=lambda form: next(iter(form)),
)  # fmt: skip
async def test_vllms_older_names_of_forms_mean_the_same(
    http: httpx.AsyncClient, engine: EchoEngine, path: str, form: dict[str, Any]
) -> None:
    guided = {f"guided_{name}": value for name, value in form.items()}
    answer = await http.post(path, json=BODIES[path] | guided)
    assert answer.status_code == 200, answer.text
    [(_, params, _, _)] = engine.seen
    assert params.structured_outputs == StructuredOutputsParams(**form)
    assert "x-diptych-ignored" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_marks_of_anthropics_cache_are_taken_everywhere(
    http: httpx.AsyncClient, path: str
) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    text = {"type": "text", "text": "hi", **mark}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}, **mark}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text], **mark}
    sent: dict[str, Any] = {
        "model": "echo", "system": [text], **mark,
        "tools": [{"name": "f", "input_schema": {"type": "object"}, **mark}],
        "messages": [
            {"role": "user", "content": [text]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    }  # fmt: skip
    if "count" not in path:
        sent["max_tokens"] = 1
    answer = await http.post(path, json=sent)
    assert answer.status_code == 200, answer.text
    assert await num_ignored(http) == 0
    assert "x-diptych-ignored" not in answer.headers


MARKED = [{"role": "user", "content": [
    {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
]}]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "change", "seconds"),
    [
        ("/v1/chat/completions", {}, 0),
        ("/v1/chat/completions", {"prompt_cache_key": "k"}, 300),
        ("/v1/chat/completions", {"prompt_cache_retention": "24h"}, 3600),
        ("/v1/chat/completions", {"session_id": "s"}, 300),
        ("/v1/completions", {"session_id": "s"}, 300),
        ("/v1/completions", {}, 0),
        ("/v1/responses", {"prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}, 300),
        ("/v1/responses", {"session_id": "s"}, 300),
        ("/v1/messages", {"cache_control": {"type": "ephemeral"}}, 300),
        ("/v1/messages", {"messages": MARKED}, 3600),
        ("/v1/messages", {"cache_control": "x", "session_id": "s"}, 300),
        ("/v1/messages", {}, 0),
    ],
)
async def test_who_says_that_a_next_turn_will_come_is_remembered_for_longer(
    http: httpx.AsyncClient, engine: EchoEngine, path: str, change: dict[str, Any], seconds: int
) -> None:
    answer = await http.post(path, json=BODIES[path] | change)
    assert answer.status_code == 200, answer.text
    assert engine.kept == [seconds]
    assert "x-diptych-ignored" not in answer.headers


@pytest.mark.parametrize("path", BODIES)
async def test_a_session_ends_with_the_turn_that_says_so(
    http: httpx.AsyncClient, engine: EchoEngine, path: str
) -> None:
    action = {"action_id": "a", "action_type": "kv.deref", "action_version": "1.0"}
    hints = {"protocol_version": "0.1", "message_id": "m"}
    later = [{**action, "action_version": "2.0"}, {**action, "action_type": "kv.demote"}]
    for actions in ([], later, [*later, action]):
        said = {"session_id": "s" * 1000, "kv_hints": {**hints, "actions": actions}}
        answer = await http.post(path, json=BODIES[path] | said)
        assert answer.status_code == 200, answer.text
        assert "x-diptych-ignored" not in answer.headers
    assert engine.kept == [300, 300, 0]
    assert len(set(engine.sessions)) == 1
    assert 0 < len(engine.sessions[0]) < 100, "names are kept as long as sessions last"


@pytest.mark.parametrize("path", BODIES)
async def test_a_prefetch_is_no_turn_and_is_billed_what_is_there(
    http: httpx.AsyncClient, engine: EchoEngine, path: str
) -> None:
    ahead = {"action_id": "a", "action_type": "kv.prefetch", "action_version": "1.0"}
    ends = ahead | {"action_type": "kv.deref"}
    used = []
    for actions in ([ahead], [ahead, ends], [ahead | {"action_version": "2.0"}]):
        hints = {"protocol_version": "0.1", "message_id": "m", "actions": actions}
        answer = await http.post(path, json=BODIES[path] | {"kv_hints": hints})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        used.append(usage.get("prompt_tokens", usage.get("input_tokens")) + cached)
    assert engine.prefetches == [True, False, False]
    assert used[0] == used[1] // 2, "half of its prompt is in this engine's cache"
    assert used[1] == used[2]


def test_openais_client_shows_warnings(base_url: str) -> None:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "echo", "messages": CHAT["messages"], "max_tokens": 3}
    whole = client.chat.completions.create(**asked, store=True, verbosity="low")
    assert [each.split()[0] for each in (whole.model_extra or {})["warnings"]] == [
        "store", "verbosity",
    ]  # fmt: skip
    with client.chat.completions.create(**asked, stream=True, store=True) as stream:
        extras = [chunk.model_extra or {} for chunk in stream]
    assert [bool(extra.get("warnings")) for extra in extras] == [True, *[False] * (len(extras) - 1)]


@pytest.mark.parametrize(
    ("template", "low", "none"),
    [
        ("{%- if enable_thinking is defined and not enable_thinking %}x{% endif %}",
         {"enable_thinking": True}, {"enable_thinking": False}),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}",
         {"thinking": True}, {"thinking": False}),
        ("Reasoning: {{ reasoning_effort | default('medium') }}",
         {"reasoning_effort": "low"}, {"reasoning_effort": "none"}),
        ("thinking {{ message.thinking }} {{ message['thinking'] }} {{ \"enable_thinking\" }}",
         {}, {}),
        ("{% if no_thinking %}{{ thinking_budget }}{% endif %}", {}, {}),
        (None, {}, {}),
    ],
)  # fmt: skip
def test_an_effort_is_what_the_template_has_a_variable_for(
    template: str | None, low: dict[str, Any], none: dict[str, Any]
) -> None:
    variables = effort_variables(template)
    assert effort_kwargs("low", variables) == low
    assert effort_kwargs("none", variables) == none


EFFORTS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"reasoning_effort": "low"}, "reasoning_effort"),
    "/v1/responses": ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    "/v1/messages": ({"output_config": {"effort": "low"}}, "output_config.effort"),
}


@pytest.mark.parametrize("path", EFFORTS)
@pytest.mark.parametrize("template", ["{{ enable_thinking }}", "{{ messages }}"])
async def test_an_effort_reaches_the_template_or_is_said_not_to(
    engine: EchoEngine, monkeypatch: pytest.MonkeyPatch, path: str, template: str
) -> None:
    monkeypatch.setattr(engine.renderer, "chat_template", template)
    rendered: list[Any] = []
    render = engine.renderer.render_chat

    def noting(*args: Any, **options: Any) -> Any:
        rendered.append(options["template_kwargs"])
        return render(*args, **options)

    monkeypatch.setattr(engine.renderer, "render_chat", noting)
    change, field = EFFORTS[path]
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.post(path, json=BODIES[path] | change)
    assert answer.status_code == 200, answer.text
    has_switch = "enable" in template
    assert rendered == [{"enable_thinking": True} if has_switch else None]
    assert (field in answer.headers.get("x-diptych-ignored", "")) is not has_switch
