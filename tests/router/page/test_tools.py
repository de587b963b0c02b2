"""Tools of the page in a real browser, in front of an engine that says what it was told last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, Pages, chromium
from page_kit import Echo, Thinking, served_echo
from page_scenes import PHONE, Scene
from playwright.sync_api import expect

from diptych_protocol import TokensPrompt

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_CHROMIUM)


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    with served_echo(thinks=True) as served:
        yield served


@pytest.fixture(scope="module")
def pages(echo: Echo) -> Iterator[Pages]:
    with chromium() as browser:
        yield Pages(browser, echo.url, "Failed to load resource")


@pytest.fixture
def scene(echo: Echo, pages: Pages) -> Iterator[Scene]:
    """A page whose model may call tools. What it complains about fails the test."""
    with pages.watched() as open_one:
        scene = Scene(open_one(viewport=PHONE))
        scene.set_numbers(max_tokens=500)
        scene.page.select_option("#tool_choice", "auto")
        yield scene
    echo.engine.renderer = Thinking()


class WithoutTools(Thinking):
    """A template with no place for tools."""

    chat_template = "{{ messages }}"


class Repeating(Thinking):
    """An answer says what was asked first, over and over."""

    def render_chat(self, messages: list[dict[str, Any]], **_: Any) -> TokensPrompt:
        return super().render_chat(messages[:1])


def call_of(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def bodies(scene: Scene) -> list[dict[str, Any]]:
    """What the page asks from now on."""
    sent: list[dict[str, Any]] = []

    def note(request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            sent.append(request.post_data_json)

    scene.page.on("request", note)
    return sent


SUM = call_of("calculator", expression="2 * (3 + 4)")


def test_the_page_answers_a_call_of_its_own_tool_and_the_model_goes_on(scene: Scene) -> None:
    sent = bodies(scene)
    scene.ask(f"<think>I compute it.</think>{SUM}")
    expect(scene.page.locator(".message.assistant")).to_have_count(2)
    scene.wait_for_end()
    expect(scene.page.get_by_label("Call of calculator").locator("pre")).to_have_text(
        '{"expression":"2 * (3 + 4)"}'
    )
    expect(scene.page.locator(".call .result")).to_have_text("14")
    expect(scene.page.locator(".thoughts")).to_be_hidden()
    expect(scene.answer).to_have_text("14")
    names = [tool["function"]["name"] for tool in sent[0]["tools"]]
    assert names == ["calculator", "current_time", "ask_user"]
    _, called, told = sent[1]["messages"]
    assert called["tool_calls"][0]["function"]["name"] == "calculator"
    assert told == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "14"}
    width = scene.page.evaluate("() => document.documentElement.scrollWidth")
    assert width <= PHONE["width"]


def test_what_is_wrong_with_a_call_is_told_to_the_model(scene: Scene) -> None:
    scene.ask(call_of("calculator", expression="alert(1)"))
    expect(scene.page.locator(".message.assistant")).to_have_count(2)
    scene.wait_for_end()
    expect(scene.answer).to_have_text("Error: no number: a")


def test_the_user_answers_by_keyboard_and_a_reload_keeps_it(scene: Scene) -> None:
    page = scene.page
    scene.ask(call_of("ask_user", question="Which town?"))
    field = page.get_by_label("Your answer")
    expect(field).to_be_focused()
    expect(page.locator("#status")).to_contain_text("It calls ask_user.")
    page.reload()
    page.get_by_label("Your answer").focus()
    page.keyboard.type("Paris")
    page.keyboard.press("Enter")
    scene.wait_for_end()
    expect(scene.answer).to_have_text("Paris")
    page.reload()
    expect(page.locator(".call .result")).to_have_text("Paris")
    expect(page.locator("#tool_choice")).to_have_value("auto")


def test_tools_of_ones_own_are_offered_and_their_mistakes_told_first(scene: Scene) -> None:
    page = scene.page
    sent = bodies(scene)
    for wrong, reason in (
        ("[{", "are no JSON"),
        ('[{"description": "x"}]', "lack the name of a function"),
        ('[{"name": "calculator"}]', "describe calculator, which the page has"),
    ):
        page.fill("#own_tools", wrong)
        scene.ask("one")
        expect(page.locator("#own_tools-problem")).to_contain_text(f"Your own tools {reason}")
    assert not sent
    schema = {"type": "object", "properties": {"town": {"type": "string"}}}
    page.fill("#own_tools", json.dumps({"name": "weather", "parameters": schema}))
    page.uncheck("#calculator")
    scene.ask(call_of("weather", town="Paris") + SUM)
    page.get_by_label("What weather answers").fill("rain")
    page.get_by_role("button", name="Answer").first.click()
    expect(page.get_by_label("What calculator answers")).to_have_count(0)
    scene.wait_for_end()
    function = sent[0]["tools"][-1]["function"]
    assert (function["name"], function["parameters"]) == ("weather", schema)
    assert sent[0]["tools"][0]["function"]["name"] == "current_time"
    assert [m["content"] for m in sent[1]["messages"] if m["role"] == "tool"] == ["rain", "14"]


def test_a_call_without_a_result_is_sent_as_one_that_got_none(scene: Scene) -> None:
    scene.ask(call_of("ask_user", question="Which town?"))
    scene.wait_for_end()
    sent = bodies(scene)
    scene.ask("never mind")
    scene.wait_for_end()
    roles = [(m["role"], m["content"]) for m in sent[0]["messages"]]
    assert roles[1:] == [
        ("assistant", None), ("tool", "The user gave no result."), ("user", "never mind"),
    ]  # fmt: skip
    expect(scene.page.locator(".call")).to_contain_text("It has no result.")


def test_a_call_is_forced_once_and_then_the_model_answers(scene: Scene) -> None:
    sent = bodies(scene)
    scene.page.select_option("#tool_choice", "required")
    scene.ask(SUM)
    expect(scene.page.locator(".message.assistant")).to_have_count(2)
    scene.wait_for_end()
    assert [body["tool_choice"] for body in sent] == ["required", "none"]
    assert sent[0]["parallel_tool_calls"] is False, "it must call one"


def test_a_template_without_a_place_for_tools_is_told_in_the_words_of_the_error(
    scene: Scene, echo: Echo
) -> None:
    echo.engine.renderer = WithoutTools()
    scene.ask("one")
    scene.wait_for_end()
    problem = scene.page.locator(".message.user .problem")
    expect(problem).to_contain_text("the chat template of echo has no place for tools")
    scene.page.select_option("#tool_choice", "none")
    scene.page.get_by_role("button", name="Retry this question").click()
    scene.wait_for_end()
    expect(scene.answer).to_have_text("one")


def test_a_model_that_calls_on_and_on_is_asked_about(scene: Scene, echo: Echo) -> None:
    echo.engine.renderer = Repeating()
    scene.ask(SUM)
    answers = scene.page.locator(".message.assistant")
    on = scene.page.get_by_role("button", name="Go on with these results")
    expect(answers).to_have_count(8)
    expect(on).to_be_enabled()
    on.click()
    expect(answers).to_have_count(9)


PIECES = """async (pieces) => {
  const { takeCall } = await import("/ui/answering.js");
  const { ShownCall } = await import("/ui/calls.js");
  const calls = [], seen = [];
  let shown = null;
  for (const piece of pieces) {
    takeCall(calls, piece);
    shown ??= new ShownCall(calls[0]);
    shown.grow();
    seen.push(shown.element.querySelector("pre").textContent);
  }
  return [calls, seen];
}"""


def test_arguments_that_come_in_pieces_are_shown_as_they_grow(scene: Scene) -> None:
    first = {"index": 0, "id": "call_1", "function": {"name": "f", "arguments": ""}}
    more = [{"index": 0, "function": {"arguments": part}} for part in ('{"x"', ": 1}")]
    other = {"index": 1, "id": "call_2", "function": {"name": "g", "arguments": "{}"}}
    calls, seen = scene.page.evaluate(PIECES, [first, *more, other])
    assert seen == ["", '{"x"', '{"x": 1}', '{"x": 1}']
    assert [(call["id"], call["name"], call["arguments"]) for call in calls] == [
        ("call_1", "f", '{"x": 1}'), ("call_2", "g", "{}"),
    ]  # fmt: skip


COMPUTE = """async (expressions) => {
  const { resultOf } = await import("/ui/calculator.js");
  return expressions.map((each) => {
    try { return resultOf(each); } catch (error) { return error.message; }
  });
}"""


def test_the_calculator_knows_arithmetic_and_runs_nothing(scene: Scene) -> None:
    right = {"2*(3+4)": 14, "-2^2": -4, "2**3**2": 512, "7 % 4 * 2": 6, "0.1+0.2": 0.3, "1e3": 1000}
    wrong = {
        "1/0": "the result is no finite number", "(1": "a parenthesis is not closed",
        "": "no number: the end", "2 3": "unexpected 3", "alert(1)": "no number: a",
        "(" * 900: "the expression is nested too deeply", "1" * 1001: "the expression is too long",
    }  # fmt: skip
    expected = right | wrong
    assert scene.page.evaluate(COMPUTE, list(expected)) == list(expected.values())
