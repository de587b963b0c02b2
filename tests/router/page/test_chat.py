"""The chat in a real browser, in front of an engine that echoes what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, Pages, chromium
from page_kit import Echo, served_echo
from page_scenes import PHONE, Scene
from playwright.sync_api import Browser, Route, expect
from waits import wait_until

from diptych_protocol import InvalidRequestError

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_CHROMIUM)
REFUSED = "the engine says that it does not want this"


@pytest.fixture(scope="module")
def served() -> Iterator[Echo]:
    with served_echo() as echo:
        yield echo


@pytest.fixture
def echo(served: Echo) -> Iterator[Echo]:
    """The server, which refuses nothing."""
    yield served
    served.hold(False)
    served.engine.refusal = served.engine.failure = None


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def pages(served: Echo, browser: Browser) -> Pages:
    return Pages(browser, served.url, "Failed to load resource")


Open = Callable[..., Scene]


@pytest.fixture
def open_page(echo: Echo, pages: Pages) -> Iterator[Open]:
    """Open the page in a browser that has kept nothing. What it complains about fails the test."""
    with pages.watched() as open_one:

        def opened(**options: Any) -> Scene:
            scene = Scene(open_one(**options))
            scene.set_numbers(max_tokens=40)
            return scene

        yield opened


def asked_and_answered(scene: Scene, words: str) -> None:
    scene.ask(words)
    expect(scene.page.locator(".message.user .text").last).to_have_text(words)
    scene.wait_for_end()


def messages(scene: Scene) -> list[str]:
    """What stands in the conversation, each cut to its first words."""
    return [text[:9].rstrip() for text in scene.page.locator(".message .text").all_inner_texts()]


def act(scene: Scene, label: str, at: int = -1) -> None:
    """Press a button of a message; of the last one that has it unless said otherwise."""
    scene.page.get_by_role("button", name=label).nth(at).click()


def sent_after(scene: Scene, action: Callable[[], None]) -> list[str]:
    """The contents of the messages that an action sends."""
    with scene.page.expect_request("**/v1/chat/completions") as sent:
        action()
    scene.wait_for_end()
    body: Any = sent.value.post_data_json
    return [message["content"] for message in body["messages"]]


def test_an_answer_of_markup_is_drawn_and_harmless(open_page: Open) -> None:
    scene = open_page()
    asked_and_answered(scene, "**bold** <img src=x onerror=alert(1)>")
    expect(scene.answer.locator("strong")).to_have_text("bold")
    expect(scene.answer).to_contain_text("<img src=x")
    expect(scene.page.locator("#log img")).to_have_count(0)


def test_a_question_asked_before_the_models_are_known_is_asked_once_and_answered(
    open_page: Open, echo: Echo
) -> None:
    scene = open_page(once=True)
    held: list[Route] = []
    scene.page.route("**/v1/models", lambda route: held.append(route))
    with scene.page.expect_request("**/v1/models"):
        scene.page.reload()
    scene.set_numbers(max_tokens=40)
    before = len(echo.engine.seen)
    scene.ask("early")
    scene.page.press("#words", "Enter")
    expect(scene.page.locator(".message")).to_have_count(0)
    held[0].continue_()
    expect(scene.answer).to_contain_text("early")
    scene.wait_for_end()
    assert len(echo.engine.seen) == before + 1


def test_a_question_is_shown_as_it_was_written(open_page: Open) -> None:
    scene = open_page()
    asked_and_answered(scene, "# no *title*\n\n<b>x</b>")
    question = scene.page.locator(".message.user .text")
    assert question.inner_text() == "# no *title*\n\n<b>x</b>"


def test_a_field_with_a_wrong_value_keeps_the_question(open_page: Open, echo: Echo) -> None:
    scene = open_page()
    page = scene.page
    scene.set_numbers(temperature=9, top_k=1.5)
    page.locator("#settings").evaluate("settings => { settings.open = false; }")
    before = len(echo.engine.seen)
    scene.ask("one")
    expect(page.locator("#temperature")).to_be_focused()
    expect(page.locator("#temperature")).to_have_accessible_description(
        "Temperature is at most 2, not 9."
    )
    expect(page.locator("#top_k-problem")).to_have_text("Top k is a whole number, not 1.5.")
    expect(page.locator("#words")).to_have_value("one")
    expect(page.locator(".message")).to_have_count(0)
    scene.set_numbers(temperature=0.15, top_k=2)
    expect(page.locator("#settings .problem:not(:empty)")).to_have_count(0)
    asked_and_answered(scene, "one")
    assert len(echo.engine.seen) == before + 1


def test_a_failed_question_says_so_beside_it_and_is_asked_again(
    open_page: Open, echo: Echo
) -> None:
    scene = open_page()
    page = scene.page
    asked_and_answered(scene, "one")
    echo.engine.refusal = InvalidRequestError(REFUSED)
    asked_and_answered(scene, "two")
    expect(page.locator(".message.user").last.locator(".problem")).to_contain_text(REFUSED)
    expect(page.locator("#problem")).to_be_empty()
    assert messages(scene) == ["one", "user: one", "two"]
    echo.engine.refusal = None
    sent = sent_after(scene, lambda: act(scene, "Retry this question"))
    assert sent[-1] == "two"
    expect(page.locator(".message .problem")).to_have_count(0)
    assert messages(scene) == ["one", "user: one", "two", "user: one"]


def test_a_question_without_an_answer_is_not_sent_with_the_next(
    open_page: Open, echo: Echo
) -> None:
    scene = open_page()
    echo.engine.refusal = InvalidRequestError(REFUSED)
    asked_and_answered(scene, "one")
    echo.engine.refusal = None
    assert sent_after(scene, lambda: scene.ask("two")) == ["two"]
    act(scene, "The version before")
    assert messages(scene) == ["one"]
    expect(scene.page.locator(".message .problem")).to_contain_text(REFUSED)


def test_an_answer_that_broke_off_keeps_its_words_and_says_so(open_page: Open, echo: Echo) -> None:
    scene = open_page()
    echo.engine.failure = RuntimeError("the engine is gone")
    asked_and_answered(scene, "one")
    expect(scene.page.locator(".message .problem")).to_contain_text("internal error")
    echo.engine.failure = None
    act(scene, "Retry this question")
    scene.wait_for_end()
    expect(scene.page.locator(".message .problem")).to_have_count(0)


def test_an_edited_question_begins_a_branch_and_the_old_one_stays(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    asked_and_answered(scene, "one")
    asked_and_answered(scene, "two")
    act(scene, "Edit this question", 0)
    page.get_by_label("The question in other words").fill("three")

    sent = sent_after(scene, lambda: page.keyboard.press("Enter"))
    assert sent == ["three"]
    assert messages(scene) == ["three", "user: thr"]
    expect(page.locator(".versions")).to_have_text("‹2 of 2›")
    act(scene, "The version before", 0)
    assert messages(scene)[0::2] == ["one", "two"]
    sent = sent_after(scene, lambda: scene.ask("four"))
    assert sent[0::2] == ["one", "two", "four"]


def test_escape_leaves_a_question_as_it_was(open_page: Open) -> None:
    scene = open_page()
    asked_and_answered(scene, "one")
    act(scene, "Edit this question")
    scene.page.get_by_label("The question in other words").fill("three")
    scene.page.keyboard.press("Escape")
    expect(scene.page.get_by_role("button", name="Edit this question")).to_be_focused()
    assert messages(scene)[0] == "one"


@pytest.mark.parametrize("opened", ["Edit this question", "Tour"])
def test_escape_in_what_was_opened_does_not_stop_an_answer(
    open_page: Open, echo: Echo, opened: str
) -> None:
    scene = open_page()
    page = scene.page
    asked_and_answered(scene, "one")
    act(scene, opened)
    echo.hold(True)
    scene.ask("two")
    expect(page.locator(".message.answering")).to_have_count(1)
    inside = page.locator(".edit textarea, #tour-next").locator("visible=true")
    inside.press("Escape")
    expect(inside).to_have_count(0)
    echo.hold(False)
    scene.wait_for_end()
    expect(page.locator(".message.assistant")).to_have_count(2)
    expect(page.locator(".message .problem")).to_have_count(0)


def test_the_focus_stays_with_a_message_that_is_changed(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    for words in ("one", "two", "three"):
        if words == "one":
            asked_and_answered(scene, words)
        else:
            act(scene, "Edit this question")
            page.get_by_label("The question in other words").fill(words)
            page.keyboard.press("Enter")
            scene.wait_for_end()
            expect(page.locator(".message.user")).to_be_focused()
    back = page.get_by_role("button", name="The version before")
    back.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".message.user .text")).to_have_text("two")
    expect(back).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".message.user .text")).to_have_text("one")
    expect(page.locator(".message.user")).to_be_focused()
    page.get_by_role("button", name="Retry this question").focus()
    page.keyboard.press("Enter")
    scene.wait_for_end()
    expect(page.locator(".message.assistant")).to_be_focused()


def test_both_answers_to_a_question_stay(open_page: Open) -> None:
    scene = open_page()
    asked_and_answered(scene, "one")
    scene.set_numbers(max_tokens=9)
    act(scene, "Retry this question")
    scene.wait_for_end()
    expect(scene.answer).to_have_text("user: one")
    act(scene, "The version before")
    expect(scene.answer).not_to_have_text("user: one")


def test_a_reload_keeps_the_conversation_its_branches_and_settings(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    page.fill("#system", "Be brief.")
    asked_and_answered(scene, "one")
    act(scene, "Edit this question")
    page.get_by_label("The question in other words").fill("two")
    page.keyboard.press("Enter")
    scene.wait_for_end()
    page.reload()
    expect(page.locator(".message.user .text")).to_have_text("two")
    expect(scene.answer).to_contain_text("Be brief")
    expect(page.locator("#max_tokens")).to_have_value("40")
    act(scene, "The version before")
    expect(page.locator(".message.user .text")).to_have_text("one")
    scene.set_numbers(max_tokens=12)
    sent = sent_after(scene, lambda: scene.ask("three"))
    assert (sent[0], sent[1], sent[3]) == ("Be brief.", "one", "three")


def test_a_reload_in_an_answer_keeps_what_came(open_page: Open, echo: Echo) -> None:
    scene = open_page()
    scene.set_numbers(max_tokens=1500)
    echo.hold(True)
    scene.ask("one")
    expect(scene.page.locator(".message.answering")).to_have_count(1)
    echo.hold(False)
    expect(scene.answer).to_contain_text("user: one")
    scene.page.reload()
    expect(scene.answer).to_contain_text("user: one")


def test_chats_are_listed_opened_and_deleted(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    for words in ("one", "two", "three"):
        asked_and_answered(scene, words)
        page.click("#clear")
    expect(page.locator(".message")).to_have_count(0)
    page.click("#open-chats")
    titles = page.locator("#chats-list .title")
    expect(titles).to_have_text(["three", "two", "one"])
    page.get_by_role("button", name="Delete two").click()
    expect(titles).to_have_text(["three", "one"])
    titles.last.click()
    expect(page.locator("#chats")).to_be_hidden()
    assert messages(scene) == ["one", "user: one"]
    page.click("#open-chats")
    page.click("#forget-all")
    expect(titles).to_have_count(2)
    page.get_by_role("button", name="Delete all 2?").click()
    expect(titles).to_have_count(0)
    page.click("#chats-close")
    expect(page.locator(".message")).to_have_count(0)
    assert page.evaluate("() => Object.keys(localStorage)") == []


def test_a_deleted_chat_does_not_come_back_with_its_answer(open_page: Open, echo: Echo) -> None:
    scene = open_page()
    echo.hold(True)
    scene.ask("one")
    expect(scene.page.locator(".message.answering")).to_have_count(1)
    scene.page.click("#open-chats")
    scene.page.get_by_role("button", name="Delete one").click()
    scene.page.click("#chats-close")
    echo.hold(False)
    scene.wait_for_end()
    expect(scene.page.locator(".message")).to_have_count(0)
    assert scene.page.evaluate("() => Object.keys(localStorage)") == []


FILL = """async ([count, characters]) => {
  const { Conversation } = await import("/ui/conversation.js");
  const { keepChat, keptChats } = await import("/ui/history.js");
  const kept = [];
  for (let at = 0; at < count; at += 1) {
    const made = new Conversation();
    made.ask(`${at} ${"x".repeat(characters)}`, undefined);
    made.changed = at;
    kept.push(keepChat(made));
  }
  return [kept.every(Boolean), keptChats().map(({ title }) => Number.parseInt(title, 10))];
}"""


@pytest.mark.parametrize(("count", "characters", "left"), [(60, 10, 50), (9, 900_000, 4)])
def test_what_a_browser_keeps_is_bounded_and_the_oldest_goes(
    open_page: Open, count: int, characters: int, left: int
) -> None:
    all_kept, titles = open_page().page.evaluate(FILL, [count, characters])
    assert all_kept
    assert titles == list(range(count - 1, count - 1 - left, -1))


ROOM = 5_000_000
"""Characters that browsers keep for all of a site, about."""


def test_a_chat_that_is_too_long_to_keep_displaces_no_other(open_page: Open) -> None:
    scene = open_page()
    scene.page.evaluate(FILL, [3, 10])
    assert scene.page.evaluate(FILL, [1, ROOM]) == [False, [2, 1, 0]]


def test_the_oldest_chat_goes_where_the_browser_has_no_room(open_page: Open) -> None:
    page = open_page().page
    page.evaluate("most => localStorage.setItem('x', 'x'.repeat(most))", ROOM - 2_500_000)
    assert page.evaluate(FILL, [9, 500_000]) == [True, [8, 7, 6, 5, 4]]


def test_two_tabs_of_one_chat_keep_what_both_have_asked(open_page: Open) -> None:
    scene = open_page()
    asked_and_answered(scene, "one")
    name = scene.page.evaluate("() => sessionStorage['diptych.open-chat']")
    other = Scene(scene.page.context.new_page())
    other.page.add_init_script(f"sessionStorage['diptych.open-chat'] ??= '{name}'")
    other.page.goto(scene.page.url)
    expect(other.answer).to_contain_text("user: one")
    asked_and_answered(other, "two")
    asked_and_answered(scene, "three")
    asked_and_answered(other, "four")
    for tab, words in ((scene, ["one", "three"]), (other, ["one", "two", "four"])):
        tab.page.reload()
        expect(tab.page.locator(".message.user .text")).to_have_text(words)


def test_the_open_chat_is_chosen_again_during_its_answer(open_page: Open, echo: Echo) -> None:
    scene = open_page()
    scene.set_numbers(max_tokens=1500)
    echo.hold(True)
    scene.ask("one")
    expect(scene.page.locator(".message.answering")).to_have_count(1)
    scene.page.click("#open-chats")
    scene.page.locator("#chats-list .title").click()
    echo.hold(False)
    scene.wait_for_end()
    expect(scene.answer).to_contain_text("user: one")
    asked_and_answered(scene, "two")
    assert messages(scene)[:3] == ["one", "user: one", "two"]


MALFORMED = [
    "", "null", "[]", "{", '{"messages": [], "shown": 7}', '{"messages": [null], "shown": []}',
    '{"messages": [{"id": 0, "parent": 0, "role": "user", "text": "x"}], "shown": [[0, 0]]}',
    '{"messages": [{"id": 1, "parent": 0, "role": "system", "text": 7}], "shown": [[0, 1]]}',
    '{"id": "8", "title": "x", "changed": "x", "messages": [], "shown": []}',
    '{"id": "9", "title": 7, "changed": 7, "messages": [], "shown": []}',
    '{"id": "other", "title": "x", "changed": 7, "messages": [], "shown": []}',
    '{"id": "11", "title": "x", "changed": 1e300, "messages": [], "shown": []}',
]  # fmt: skip


def test_what_is_no_conversation_is_not_opened(open_page: Open) -> None:
    scene = open_page()
    for number, text in enumerate(MALFORMED):
        scene.page.evaluate(
            "([key, text]) => localStorage.setItem(key, text)", [f"diptych.chat.{number}", text]
        )
        scene.page.evaluate("id => sessionStorage.setItem('diptych.open-chat', id)", str(number))
        scene.page.reload()
        expect(scene.page.locator("#model")).to_have_value("echo")
        expect(scene.page.locator(".message")).to_have_count(0)
        expect(scene.page.locator("#problem")).to_be_empty()
    scene.page.click("#open-chats")
    expect(scene.page.locator("#chats-list li")).to_have_count(0)
    scene.page.click("#chats-close")
    asked_and_answered(scene, "one")


@pytest.mark.parametrize(
    "storage",
    [
        "Storage.prototype.setItem = () => { throw new DOMException('full'); };",
        """for (const name of ["localStorage", "sessionStorage"]) {
          Object.defineProperty(window, name, { get() { throw new DOMException("denied"); } });
        }""",
    ],
    ids=["full", "forbidden by its user"],
)
def test_a_browser_that_keeps_nothing_says_so_and_still_answers(
    open_page: Open, storage: str
) -> None:
    scene = open_page(once=True)
    scene.page.add_init_script(storage)
    scene.page.reload()
    asked_and_answered(scene, "one")
    expect(scene.answer).to_contain_text("user: one")
    expect(scene.page.locator("#problem")).to_have_text(
        "This browser has no room to keep this chat."
    )


def test_system_prompts_are_saved_chosen_and_deleted(open_page: Open) -> None:
    scene = open_page()
    page = scene.page
    expect(page.locator("#keep-prompt")).to_be_disabled()
    for prompt in ("Be brief.", "Be kind.\nAlways."):
        page.fill("#system", prompt)
        page.click("#keep-prompt")
    page.reload()
    scene.set_numbers()
    expect(page.locator("#prompts option")).to_have_text(["Saved prompts", "Be kind.", "Be brief."])
    page.select_option("#prompts", label="Be kind.")
    expect(page.locator("#system")).to_have_value("Be kind.\nAlways.")
    page.click("#forget-prompt")
    expect(page.locator("#prompts option")).to_have_text(["Saved prompts", "Be brief."])


def test_reasoning_is_folded_and_kept(browser: Browser) -> None:
    with served_echo(thinks=True) as echo, Scene.opened(browser, echo.url) as scene:
        scene.set_numbers(max_tokens=40)
        asked_and_answered(scene, "<think>hm</think>yes")
        thoughts = scene.page.locator(".thoughts")
        expect(thoughts).to_be_hidden()
        scene.page.reload()
        scene.page.locator("summary", has_text="Reasoning").click()
        expect(thoughts).to_contain_text("hm")
        expect(scene.answer).to_contain_text("yes")


def test_the_pace_is_shown_while_an_answer_comes(open_page: Open, echo: Echo) -> None:
    scene = open_page()
    seen = """() => { window.paces = []; new MutationObserver(() => {
        const pace = document.querySelector(".pace");
        if (pace?.textContent) window.paces.push(pace.textContent);
    }).observe(document.getElementById("log"), { subtree: true, childList: true }); }"""
    scene.page.evaluate(seen)
    asked_and_answered(scene, "one")
    paces = scene.page.evaluate("() => window.paces")
    assert any("tokens/s" in pace for pace in paces)
    expect(scene.page.locator(".pace")).to_have_count(0)


def test_nothing_is_changed_while_an_answer_comes(open_page: Open, echo: Echo) -> None:
    scene = open_page()
    asked_and_answered(scene, "one")
    echo.hold(True)
    scene.ask("two")
    expect(scene.page.locator(".message.answering")).to_have_count(1)
    for button in scene.page.locator(".tools button:not(:has-text('Copy'))").all():
        expect(button).to_be_disabled()
    echo.hold(False)
    scene.wait_for_end()
    expect(scene.page.get_by_role("button", name="Edit this question").last).to_be_enabled()


def test_wide_answers_and_long_names_fit_a_phone(open_page: Open) -> None:
    scene = open_page(viewport=PHONE)
    scene.page.locator("#model").evaluate("m => m.append(new Option('adapter-'.repeat(20)))")
    scene.set_numbers(max_tokens=400)
    asked_and_answered(
        scene, f"x\n\n```\n{'long ' * 30}\n```\n\n|{'wide|' * 20}\n|{'-|' * 20}\n|{'cell|' * 20}"
    )
    expect(scene.answer.locator("figure")).not_to_have_count(0)
    wait_until(
        lambda: scene.page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]
    )


def test_deeply_nested_blocks_and_the_tour_leave_a_phone_its_width_and_send(
    open_page: Open,
) -> None:
    scene = open_page(viewport=PHONE)
    nested = "".join(f"{'  ' * depth}- a\n" for depth in range(24)) + f"\n{'> ' * 24}b"
    scene.page.evaluate(NEST, nested)
    expect(scene.page.locator("#log blockquote")).to_have_count(24)
    assert scene.page.locator("#log").evaluate("log => log.scrollWidth - log.clientWidth") == 0
    scene.page.click("#tour-open")
    scene.page.fill("#words", "one")
    scene.page.click("#send")
    expect(scene.page.locator(".message.user")).to_have_count(1)


NEST = """async (text) => {
  const { Shown } = await import("/ui/transcript.js");
  document.getElementById("log").append(
    new Shown({ id: 2, parent: 1, role: "assistant", text }).box);
}"""


DISTANCE = (
    "() => { const { scrollHeight, scrollTop, clientHeight } = document.getElementById('log');"
)
DISTANCE += " return scrollHeight - scrollTop - clientHeight; }"


def test_a_long_answer_is_followed_unless_its_reader_is_elsewhere(
    open_page: Open, echo: Echo
) -> None:
    scene = open_page()
    scene.set_numbers(max_tokens=900)
    asked_and_answered(scene, "line\n\n" * 30)
    wait_until(lambda: scene.page.evaluate(DISTANCE) < 10)
    echo.hold(True)
    scene.ask("more")
    expect(scene.page.locator(".message.answering")).to_have_count(1)
    scene.page.locator("#log").evaluate("log => { log.scrollTop = 0; }")
    scene.page.evaluate("() => new Promise(requestAnimationFrame)")
    echo.hold(False)
    scene.wait_for_end()
    assert scene.page.locator("#log").evaluate("log => log.scrollTop") == 0
