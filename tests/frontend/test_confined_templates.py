"""A chat template runs in a process of its own, with what callers give and for what it refuses."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from diptych_frontend.text.templates.chat_template import ChatTemplate
from diptych_frontend.text.templates.confined_templates import Arguments, ConfinedTemplate
from diptych_protocol import InvalidRequestError

USER = {"role": "user", "content": "Hi é \ud800"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": Arguments({"a": 1}, '{"a":  1}')}}],
}
SHOWS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    "{{ 'as text ' + c.function.arguments }} {{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    "{{ tools | tojson }}{{ thinking }}{{ bos_token }}"
)


def test_it_renders_what_the_template_does() -> None:
    options: dict[str, Any] = {
        "add_generation_prompt": True,
        "tools": [{"maximum": 10**30}],
        "template_kwargs": {"thinking": False},
    }
    text = ConfinedTemplate(SHOWS, "<s>", "</s>").render([USER, CALL], **options)
    assert text == ChatTemplate(SHOWS, "<s>", "</s>").render([USER, CALL], **options)
    assert text == 'Hi é \ud800as text {"a":  1} 1[{"maximum": 1' + "0" * 30 + "}]False<s>"


LOOPS = "{% for i in range(99999) %}{% for j in range(9) %}WRITTEN{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "param", "says"),
    [
        ("{{ 'x' * 1000000000 }}", "messages", "takes more than 512 MiB of memory"),
        ("{% set x = messages[0].content * 1000000000 %}", "messages", "512 MiB of memory"),
        (LOOPS.replace("WRITTEN", "x" * 100), "messages", "has more than 64 MiB"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "messages", "refuses these messages"),
        ("{{ raise_exception('roles must alternate') }}", "messages", "roles must alternate"),
        ("{% if %}", "model", "not valid"),
        ("{{ " + "(" * 5000, "model", "not valid"),
    ],
    ids=["a constant", "a product", "much", "itself", "a refusal", "no template", "too deep"],
)  # fmt: skip
def test_what_it_cannot_render_is_the_callers_error(source: str, param: str, says: str) -> None:
    template = ConfinedTemplate(source, "", "")
    with pytest.raises(InvalidRequestError, match=says) as caught:
        template.render([USER], add_generation_prompt=True)
    assert caught.value.param == param


def test_what_belongs_to_a_program_is_refused() -> None:
    template = ConfinedTemplate(SHOWS, "", "")
    with pytest.raises(InvalidRequestError, match="messages that are not JSON"):
        template.render([{"content": lambda: None}], add_generation_prompt=True)


def test_nothing_of_a_template_runs_in_the_process_of_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def runs(*args: Any, **options: Any) -> Any:
        raise RuntimeError("it runs here")

    monkeypatch.setattr(jinja2.Environment, "from_string", runs)
    assert ConfinedTemplate("{{ 1 + 1 }}", "", "").render([], add_generation_prompt=True) == "2"
