"""A chat template renders here as it does in transformers, whose own renderer is the measure."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import transformers  # its classes are imported when they are used
from cases import each
from client_kit.environment import FOLDER, needs_client

from diptych_frontend.reasoning.formats import name_of
from diptych_frontend.text.templates.chat_template import ChatTemplate
from diptych_frontend.tool_calls.formats import format_of, takes_tools
from diptych_protocol import InvalidRequestError

Conversation = tuple[list[dict[str, Any]], dict[str, Any]]

USER = {"role": "user", "content": "Hi <b> é & 'x'  "}
ANSWER = {"role": "assistant", "content": " Well.  "}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
PARAMETERS = {
    "type": "object",
    "properties": {"z": {"type": "string", "description": "é"}, "a": {"type": "integer"}},
    "required": ["z"],
}
FUNCTION = {"name": "get", "description": "Gets <é> & more", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALLED = {"name": "get", "arguments": {"z": "é", "a": [1, {"b": None, "a": 1.5}]}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": CALLED}],
}
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "get"}
THOUGHT = {**ANSWER, "reasoning_content": "Hm.\n", "thinking": "Hm.\n"}
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}

CONVERSATIONS: dict[str, Conversation] = {
    "a question": ([USER], {}),
    "a system's word": ([SYSTEM, USER], {}),
    "turns": ([USER, ANSWER, USER], {}),
    "turns without a prompt": ([SYSTEM, USER, ANSWER], {"add_generation_prompt": False}),
    "tools": ([USER], {"tools": [TOOL]}),
    "a call": ([USER, CALL, RESULT], {"tools": [TOOL]}),
    "goes on": ([USER, {**ANSWER, "content": "a"}], GOES_ON),
    "goes on after blanks": ([USER, ANSWER], GOES_ON),
    "reasoning": ([USER, THOUGHT, USER], {"enable_thinking": False}),
}

TRIMMED = """{% for message in messages %}
    {%- if loop.first and message.role == 'system' %}{{ bos_token }}{% endif -%}
    <|{{ message['role'] }}|>{{ message.content | trim + eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
STRIPPED = TRIMMED.replace("message.content | trim", "message['content'].strip()")
WHOLE = TRIMMED.replace("message.content | trim", "message.content")
TWICE = WHOLE + "{{ messages[-1].content }}.{{ messages[-1].content | trim }}"
TOOLS = """{%- set ns = namespace(calls=0, names=[]) -%}
{%- macro show(value, depth=0) -%}
  {%- if value is mapping -%}
    {%- for key, inner in value | dictsort -%}
    {{ '  ' * depth }}{{ key }}: {{ show(inner, depth + 1) }}
    {% endfor -%}
  {%- elif value is iterable and value is not string -%}
    {%- for inner in value -%}
    {{ show(inner, depth) }}{% if not loop.last %}, {% endif %}
    {%- endfor -%}
  {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- if tools %}{% for tool in tools %}
{{ tool | tojson(JSON) }}
{{ show(tool.function.parameters) }}
{%- endfor %}{% endif -%}
{%- for message in messages -%}
  {%- if message.role == 'system' %}{% continue %}{% endif -%}
  {%- for call in message.tool_calls or [] -%}
    {%- set ns.calls = ns.calls + 1 -%}
    <call {{ ns.calls }}>{{ call.function.name }}{{ call.function.arguments | tojson(JSON) }}</call>
  {%- endfor -%}
  {% generation %}{{ message.content }}{% endgeneration %}
  {%- if enable_thinking is defined and not enable_thinking %}<nothing>{% endif -%}
  {%- if message.reasoning_content is defined -%}
    {{ message.reasoning_content.split('\\n')[0] }}
  {%- endif -%}
{%- endfor -%}"""
REFUSES = (
    WHOLE + "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
)
FOLDED = """{% set said = messages[0].content if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if said else messages) -%}
  {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('roles must alternate user/assistant') }}
  {%- endif -%}
  {{ m.role + ': ' + (said if loop.first else '') + m.content | trim }}
{% endfor %}"""
"""As Gemma 2 and 3 have no role for the system."""
JSON_ARGUMENTS = (
    "",
    "true",
    "ensure_ascii=False",
    "ensure_ascii=True, sort_keys=True",
    "indent=2",
    "indent='--'",
    "False, 4",
    "separators=(',', ':')",
    "indent=1, separators=(',', ' = '), sort_keys=True",
    "false, none, (', ', ': '), true",
)
TEMPLATES = {
    "trimmed": TRIMMED,
    "stripped": STRIPPED,
    "whole": WHOLE,
    "refuses": REFUSES,
    "folded": FOLDED,
    **{f"tojson({written})": TOOLS.replace("JSON", written) for written in JSON_ARGUMENTS},
}


def ours(template: str, conversation: Conversation) -> str | None:
    """What we render; None if the template refuses."""
    messages, options = conversation
    wanted: dict[str, Any] = {"add_generation_prompt": True} | options
    kwargs = {name: wanted.pop(name) for name in ("enable_thinking",) if name in wanted}
    try:
        return ChatTemplate(template, "<s>", "</s>").render(
            messages, template_kwargs=kwargs, **wanted
        )
    except InvalidRequestError:
        return None


def theirs(template: str, conversation: Conversation) -> str | None:
    messages, options = conversation
    tokens: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    wanted: dict[str, Any] = {"add_generation_prompt": True} | tokens | options
    try:
        render = transformers.utils.chat_template_utils.render_jinja_template
        rendered: Any = render([messages], chat_template=template, **wanted)
    except Exception:  # templates fail in any way
        return None
    return str(rendered[0][0])


@each("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str) -> None:
    for conversation in CONVERSATIONS.values():
        assert ours(TEMPLATES[name], conversation) == theirs(TEMPLATES[name], conversation)


def test_a_message_that_is_shown_twice_leaves_no_mark() -> None:
    """transformers leaves its own mark in the first copy."""
    for name in ("goes on", "goes on after blanks"):
        messages, _ = CONVERSATIONS[name]
        text = ours(TWICE, CONVERSATIONS[name])
        assert text is not None
        assert text.endswith(f"{messages[-1]['content']}.{messages[-1]['content'].strip()}")
        assert text.isascii() or "\ufdd0" not in text


def test_a_model_without_a_role_for_the_system_has_its_words_in_the_first_turn() -> None:
    assert ours(FOLDED, CONVERSATIONS["a system's word"]) == "user:  Be brief.\nHi <b> é & 'x'\n"
    with pytest.raises(InvalidRequestError, match="refuses these messages: roles must") as refusal:
        ChatTemplate(FOLDED, "", "").render([USER, USER], add_generation_prompt=True)
    assert refusal.value.param == "messages"


def published() -> dict[str, Path]:
    """The templates in the wheel `axolotl`, which `make clients CLIENTS=axolotl` fetches."""
    found = (FOLDER / "axolotl").glob("lib/*/site-packages/axolotl/**/*.jinja")
    return {path.stem: path for path in sorted(found)}


@needs_client("axolotl")
@pytest.mark.slow
def test_published_templates_tell_the_formats_of_their_models() -> None:
    told = {}
    for name, path in published().items():
        template = path.read_text()
        calls = format_of("auto", "auto", template) if takes_tools(template) else "none"
        told[name] = (calls, name_of("auto", template))
    assert told.items() >= {
        "qwen3": ("hermes", "think"), "qwen_25": ("hermes", "none"), "llama3": ("none", "none"),
        "llama3_2_vision": ("llama", "none"), "gemma3": ("none", "none"),
        "phi_35": ("none", "none"), "phi_4": ("none", "think"),
        "mistral_v3_tekken": ("mistral", "none"), "deepseek_v3": ("none", "think"),
    }.items()  # fmt: skip


@needs_client("axolotl")
@pytest.mark.slow
def test_published_templates_render_as_in_transformers() -> None:
    templates = [*published().values()]
    assert len(templates) == 36
    refused = 0
    for path, (name, conversation) in itertools.product(templates, CONVERSATIONS.items()):
        text = ours(path.read_text(), conversation)
        assert text == theirs(path.read_text(), conversation), (path.name, name)
        refused += text is None
    assert refused < 36
