"""Earlier calls in prompts. The templates here make the demands of those that models bring, and say
no more than these demands."""

from __future__ import annotations

from typing import Any

import pytest
from cases import each

from diptych_frontend.text.templates.chat_template import ChatTemplate
from diptych_frontend.text.templates.confined_templates import Arguments
from diptych_frontend.tool_calls.earlier import one_call_each, one_thought_each, short_ids
from diptych_frontend.tool_calls.formats import FORMATS
from diptych_protocol import InvalidRequestError

ARGUMENTS = '{"city": "Zürich", "days": 2}'
COMPACT = ARGUMENTS.replace(": ", ":").replace(", ", ",")


def call(call_id: str, name: str = "f") -> dict[str, Any]:
    arguments = Arguments({"city": "Zürich", "days": 2}, ARGUMENTS)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def called(*calls: dict[str, Any], content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def result(call_id: str, content: str = "sun") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


USER = {"role": "user", "content": "hi"}
TWO = [USER, called(call("a"), call("b", "g")), result("b", "rain"), result("a"), USER]

MISTRAL = """
{%- for m in messages %}
  {%- if m.tool_calls is defined and m.tool_calls is not none %}
    {%- for c in m.tool_calls %}
      {%- if c.id|length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
      {{- '[TOOL_CALLS]' + (c.function|tojson) + c.id }}
    {%- endfor %}
  {%- elif m.role == 'tool' %}
    {%- if m.tool_call_id|length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
    {{- '[RESULT]' + m.content + m.tool_call_id }}
  {%- endif %}
{%- endfor %}"""
LLAMA = """
{%- for m in messages %}
  {%- if 'tool_calls' in m %}
    {%- if not m.tool_calls|length == 1 %}{{ raise_exception('one at once') }}{% endif %}
    {%- set f = m.tool_calls[0].function %}
    {{- 'assistant:{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}}
  {%- elif m.role == 'tool' or m.role == 'ipython' %}
    {{- ' ipython:' + m.content + ' ' }}
  {%- endif %}
{%- endfor %}"""
PHI = """
{%- for m in messages %}
  {{- '<|' + m['role'] + '|>' + m['content'] }}
  {%- if m['role'] == 'system' and 'tools' in m %}
    {{- '<|tool|>' + m['tools'] + '<|/tool|>' }}
  {%- endif %}
  {{- '<|end|>' }}
{%- endfor %}"""
DEEPSEEK_V3 = """
{%- for m in messages %}
  {%- for c in m.tool_calls or [] %}
    {{- c.type + '<sep>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}
  {%- endfor %}
{%- endfor %}"""
DEEPSEEK_V31 = """
{%- for m in messages %}
  {%- for c in m.tool_calls or [] %}
    {%- set a = c.function.arguments %}
    {{- c.function.name }}<sep>{{ a if a is string else a|tojson }}
  {%- endfor %}
{%- endfor %}"""
QWEN3_CODER = """
{%- for m in messages %}
  {%- for c in m.tool_calls or [] %}
    {%- for key, value in c.function.arguments|items %}
      {{- '<parameter=' + key + '>' }}{{ value }}
    {%- endfor %}
  {%- endfor %}
{%- endfor %}"""
HARMONY = """
{%- set last = namespace(name=none) %}
{%- for m in messages %}
  {%- if 'tool_calls' in m %}
    {%- if m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}
    {%- if m.thinking %}{{ '<analysis>' + m.thinking + ' ' }}{% endif %}
    {%- set last.name = m.tool_calls[0].function.name %}
    {{- 'to=functions.' + last.name + ' ' + (m.tool_calls[0].function.arguments|tojson) + ' ' }}
  {%- elif m.role == 'tool' %}
    {{- 'functions.' + last.name + ' ' + (m.content|tojson) + ' ' }}
  {%- endif %}
{%- endfor %}"""


@each(
    ("name", "source", "messages", "prompt"),
    [
        ("hermes", "{{ messages[1].tool_calls[0].function.arguments }}", TWO, ARGUMENTS),
        ("hermes", "{{ messages[1].tool_calls[0].function.arguments | tojson }}", TWO, ARGUMENTS),
        (
            "mistral", MISTRAL, [called(call("abcdef123")), result("abcdef123")],
            f'[TOOL_CALLS]{{"name": "f", "arguments": {ARGUMENTS}}}abcdef123[RESULT]sunabcdef123',
        ),
        (
            "llama", LLAMA, TWO,
            f'assistant:{{"name": "f", "parameters": {ARGUMENTS}}} ipython:sun '
            f'assistant:{{"name": "g", "parameters": {ARGUMENTS}}} ipython:rain ',
        ),
        (
            "phi4_mini", PHI,
            [USER, called(call("a"), call("b", "g"), content="So. "), result("a")],
            f'<|user|>hi<|end|><|assistant|>So. <|tool_call|>[{{"name":"f","arguments":{COMPACT}}},'
            f'{{"name":"g","arguments":{COMPACT}}}]<|/tool_call|><|end|><|tool|>sun<|end|>',
        ),
        (
            "hermes", PHI, [called(call("a"), content="So."), result("a")],
            f'<|assistant|>So.<tool_call>\n{{"name":"f","arguments":{COMPACT}}}\n</tool_call><|end|>'
            '<|tool|>sun<|end|>',
        ),
        (
            "granite", PHI, [called(call("a")), result("a")],
            f'<|assistant|><|tool_call|>[{{"name":"f","arguments":{COMPACT}}}]<|end|>'
            '<|tool|>sun<|end|>',
        ),
        ("deepseek", DEEPSEEK_V3, [called(call("a"))],
         f"function<sep>f\n```json\n{ARGUMENTS}\n```"),
        ("deepseek", DEEPSEEK_V31, [called(call("a"))], f"f<sep>{ARGUMENTS}"),
        ("qwen3_coder", QWEN3_CODER, [called(call("a"))],
         "<parameter=city>Zürich<parameter=days>2"),
        (
            "harmony", HARMONY, TWO,
            f'to=functions.f {ARGUMENTS} functions.f "sun" '
            f'to=functions.g {ARGUMENTS} functions.g "rain" ',
        ),
        (
            "harmony", HARMONY,
            [called(call("a"), content="so", thinking="hm", reasoning_content="hm")],
            f"<analysis>hm\nso to=functions.f {ARGUMENTS} ",
        ),
    ],
)  # fmt: skip
def test_contract_C05_a_template_finds_earlier_calls_as_it_wants_them(
    name: str, source: str, messages: list[Any], prompt: str
) -> None:
    template = ChatTemplate(source, "", "")
    prepared = FORMATS[name].prepared(messages, [], source)
    assert template.render(prepared, add_generation_prompt=True) == prompt


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_contract_C05_phi_learns_of_tools_in_the_message_of_the_system(system: list[Any]) -> None:
    declared = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    prepared = FORMATS["phi4_mini"].prepared([*system, USER], declared, PHI)
    prompt = ChatTemplate(PHI, "", "").render(prepared, add_generation_prompt=True, tools=declared)
    said = "Be brief." if system else ""
    functions = '[{"name":"f","parameters":{"type":"object"}}]'
    assert prompt == f"<|system|>{said}<|tool|>{functions}<|/tool|><|end|><|user|>hi<|end|>"
    assert FORMATS["phi4_mini"].prepared([*system, USER], [], PHI) == [*system, USER]


def test_contract_C05_smollm3_learns_of_tools_under_its_own_name() -> None:
    template = ChatTemplate("{% if xml_tools %}{{ xml_tools[0].function.name }}{% endif %}", "", "")
    declared = [{"type": "function", "function": {"name": "f"}}]
    assert template.render([USER], add_generation_prompt=True, tools=declared) == "f"
    assert template.render([USER], add_generation_prompt=True) == ""


def test_the_templates_of_this_test_refuse_what_is_not_prepared() -> None:
    for source in (MISTRAL, LLAMA):
        with pytest.raises(InvalidRequestError):
            ChatTemplate(source, "", "").render(TWO, add_generation_prompt=True)


def test_ids_become_short_the_same_way_each_time() -> None:
    messages = [called(call("call_1"), call("abcdefgh9")), result("call_1"), result("abcdefgh9")]
    first, *results = short_ids(messages, [])
    ids = [made["id"] for made in first["tool_calls"]]
    assert ids == [message["tool_call_id"] for message in results]
    assert ids[1] == "abcdefgh9"
    assert ids[0].isalnum()
    assert len(ids[0]) == 9
    assert short_ids(messages, []) == [first, *results]
    assert messages[1]["tool_call_id"] == "call_1"


def test_calls_are_parted_with_what_came_of_them_and_nothing_is_lost() -> None:
    several = called(call("a"), call("b"), content="so", thinking="hm")
    messages = [several, result("b"), result("x"), result("a"), USER, called(call("c"))]
    assert one_call_each(messages, []) == [
        called(call("a"), content="so", thinking="hm"), result("a"),
        called(call("b")), result("b"), result("x"), USER, called(call("c")),
    ]  # fmt: skip
    assert one_call_each([USER], []) == [USER]
    assert one_call_each([called(call("a"), call("b"))], []) == [
        called(call("a")),
        called(call("b")),
    ]


def test_thoughts_and_words_join_only_beside_a_call() -> None:
    plain = {"role": "assistant", "content": "so", "thinking": "hm"}
    silent = called(call("a"), thinking="hm")
    assert one_thought_each([plain, silent], []) == [plain, silent]
