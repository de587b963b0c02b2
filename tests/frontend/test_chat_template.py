"""What published chat templates rely on, and what a hostile one cannot reach."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import each

from diptych_frontend.text.templates.chat_template import ChatTemplate
from diptych_protocol import InvalidRequestError


def render(source: str, messages: list[dict[str, Any]] | None = None) -> str:
    template = ChatTemplate(source, "<s>", "</s>")
    return template.render(messages or [], add_generation_prompt=True)


@each(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}", "<s>|</s>|True"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% if true %}\nx\n{% endif %}\ny", "x\ny"),
        ("  {% if true %}x{% endif %}", "x"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("{{ 'none' if tools is none and documents is none }}", "none"),
        ("{{ messages[0]['content'] if messages else 'empty' }}", "empty"),
    ],
)
def test_names_and_filters(source: str, expected: str) -> None:
    assert render(source) == expected


BEGUN = [{"role": "user", "content": "U"}, {"role": "assistant", "content": " a.  "}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content CUT }}</>\n{% endfor %}"


@pytest.mark.parametrize(
    ("filters", "text"),
    [("", "<user>U</>\n<assistant> a.  "), ("| trim", "<user>U</>\n<assistant>a.")],
)
def test_a_last_message_that_goes_on_ends_the_prompt(filters: str, text: str) -> None:
    template = ChatTemplate(TURNS.replace("CUT", filters), "", "")
    begun = template.render(BEGUN, add_generation_prompt=False, continue_final_message=True)
    assert begun == text
    assert BEGUN[-1]["content"] == " a.  "


def test_a_template_that_shows_a_message_twice_ends_with_the_second_time() -> None:
    template = ChatTemplate("{{ messages[-1].content }}|{{ messages[-1].content }}</>", "", "")
    begun = template.render(BEGUN, add_generation_prompt=False, continue_final_message=True)
    assert begun == " a.  | a.  "


@pytest.mark.parametrize(
    ("source", "message", "says"),
    [
        (TURNS.replace("CUT", ""), {"role": "user", "content": "a"}, "last message of the assist"),
        (TURNS.replace("CUT", ""), {"role": "assistant", "content": ""}, "with a text"),
        (TURNS.replace("CUT", ""), {"role": "assistant", "content": None}, "with a text"),
        (
            TURNS.replace("CUT", ""),
            {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]},
            "without calls of tools",
        ),
        ("{{ messages[0].content }}", {"role": "assistant", "content": "a"}, "does not show"),
    ],
)
def test_what_cannot_go_on_is_refused(source: str, message: dict[str, Any], says: str) -> None:
    template = ChatTemplate(source, "", "")
    messages = [{"role": "user", "content": "U"}, message]
    with pytest.raises(InvalidRequestError, match=says) as caught:
        template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "messages"


def test_the_date_can_be_had() -> None:
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.nothing.at_all }}", "no attribute 'nothing'"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_refusal_is_the_callers_error(source: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_parse_is_an_error_of_the_model() -> None:
    with pytest.raises(InvalidRequestError, match="not valid") as caught:
        ChatTemplate("{% if %}", "", "")
    assert caught.value.param == "model"


@pytest.mark.parametrize("beginning", ["{{ " + "(" * 5000, "{{ " + "[" * 5000, "{% if 1 %}" * 5000])
def test_a_template_that_is_nested_too_deeply_is_an_error_of_the_model(beginning: str) -> None:
    with pytest.raises(InvalidRequestError, match="not valid") as caught:
        ChatTemplate(beginning, "", "")
    assert caught.value.param == "model"


def test_a_template_that_calls_itself_for_ever_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


def with_kwargs(source: str, kwargs: Any) -> str:
    template = ChatTemplate(source, "<s>", "</s>")
    return template.render([], add_generation_prompt=True, template_kwargs=kwargs)


def test_contract_C05_a_caller_sets_variables_of_the_template() -> None:
    source = "{{ enable_thinking is defined and enable_thinking is false }} {{ self_made.a[0] }}"
    assert with_kwargs(source, {"enable_thinking": False, "self_made": {"a": ["é"]}}) == "True é"
    assert with_kwargs("{{ bos_token }}", {}) == "<s>"


@each(
    ("kwargs", "reason"),
    [
        ([("a", 1)], "must be an object"),
        ({"messages": []}, "messages is set by the server"),
        ({"add_generation_prompt": False}, "set by the server"),
        ({"documents": ["a"]}, "set by the server"),
        ({"bos_token": ""}, "set by the server"),
        ({"raise_exception": 1}, "set by the server"),
        ({"range": 1}, "set by the server"),
        ({"__class__": 1}, "no name of a variable"),
        ({"a b": 1}, "no name of a variable"),
        ({"": 1}, "no name of a variable"),
        ({1: 1}, "no name of a variable"),
        ({"a": "x" * (17 << 10)}, "at most 16384"),
        ({"a": object()}, "plain values"),
        ({"a": 1 << 70}, "plain values"),
    ],
)
def test_contract_C05_other_variables_are_refused_by_name(kwargs: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(reason)) as refusal:
        with_kwargs("{{ bos_token }}", kwargs)
    assert refusal.value.param == "chat_template_kwargs"
