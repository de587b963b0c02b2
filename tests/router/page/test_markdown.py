"""Answers as the page draws them, in a real browser: what a model says is never HTML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser_kit import CHROMIUM, WITHOUT_CHROMIUM, chromium
from page_kit import served_echo
from playwright.sync_api import Page, expect
from waits import PATIENCE_S

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_CHROMIUM)


DRAW = """async (pieces) => {
  const { StreamedText } = await import("/ui/streamed.js");
  const box = document.createElement("div");
  box.className = "text";
  document.getElementById("log").replaceChildren(box);
  const text = new StreamedText(box);
  window.changed = 0;
  new MutationObserver(() => { window.changed += 1; }).observe(box, { childList: true });
  for (const piece of pieces) {
    text.append(piece);
    await new Promise(requestAnimationFrame);
  }
  text.finish();
  return box.innerHTML;
}"""


class Drawing:
    """A page that draws answers; and what its browser complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self.complaints.append(said.text))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))

    def draw(self, *pieces: str) -> str:
        """The HTML of an answer that comes in these pieces."""
        return str(self.page.evaluate(DRAW, pieces))

    def count(self, selector: str) -> int:
        return self.page.locator(f"#log {selector}").count()


@pytest.fixture(scope="module")
def opened() -> Iterator[Drawing]:
    with served_echo() as echo, chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        drawing = Drawing(page)
        page.goto(echo.url)
        yield drawing


@pytest.fixture
def drawing(opened: Drawing) -> Iterator[Drawing]:
    opened.complaints.clear()
    yield opened
    assert opened.complaints == []


KINDS = """# A *title*

Some **bold**, _slanted_, ~~struck~~ and `code` words, a [link](https://example.com/a?b&c).
A line[^1]

> A quote
> > in a quote

1. one
   - inner
2. two

- [x] done
- [ ] open

| left | right |
|:-----|------:|
| a | 1 |
| b<br>c | 2 |

---

```python
def f(x):
    return "é"  # comment
```

The area is $\\\\pi r^2$, or \\\\(a < b\\\\):

$$\\\\int_0^1 x\\\\,dx = \\\\frac12$$

It costs $5 and not $10.
""".replace("\\\\", "\\")


def test_every_kind_of_block_has_its_element(drawing: Drawing) -> None:
    drawing.draw(KINDS)
    for selector, count in {
        "h3 > em": 1, "strong": 1, "p > em": 1, "del": 1, "p > code": 1, "hr": 1,
        "blockquote > blockquote": 1, "ol > li": 2, "li > ul > li": 1, "thead th": 2,
        "tbody td": 4, "td > br": 1, "td.right": 2, "figure.code": 1, "math": 3, "math[display]": 1,
    }.items():  # fmt: skip
        expect(drawing.page.locator(f"#log {selector}")).to_have_count(count)
    link = drawing.page.locator("#log a")
    assert link.get_attribute("href") == "https://example.com/a?b&c"
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    expect(drawing.page.locator("#log p", has_text="costs")).to_have_text(
        "It costs $5 and not $10."
    )
    expect(drawing.page.locator("#log .hl-keyword")).to_have_text(["def", "return"])
    expect(drawing.page.locator("#log pre")).to_have_text('def f(x):\n    return "é"  # comment')


HOSTILE = {
    "image": "<img src=x onerror=alert(1)>",
    "script": "a <script>alert(1)</script> b",
    "svg": "<svg/onload=alert(1)>\n\n<svg><script>alert(1)</script></svg>",
    "frame": "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "style": "<style>*{display:none}</style><b style='position:fixed'>x</b>",
    "javascript": "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) <javascript:alert(1)>",
    "entities": "[a](&#106;avascript:alert(1)) [b](java\tscript:alert(1)) &lt;img src=x&gt;",
    "data": "[a](data:text/html,<script>alert(1)</script>) [b](vbscript:x) [c](blob:x) [d](file:///x)",
    "relative": "[a](/ui/api/about) [b](//evil.example) [c](#words)",
    "remote image": "![pixel](https://evil.example/p.png) ![x](x onerror=alert(1))",
    "title": '[a](https://example.com "x\\" onmouseover=alert(1) \\"")',
    "code": "```html\"><img src=x onerror=alert(1)>\n</code></pre><img src=x>\n```",
    "table": "| <img src=x onerror=alert(1)> |\n|---|\n| [a](javascript:alert(1)) |",
    "definition": "[a]\n\n[a]: javascript:alert(1)",
    "prototype": "[constructor] [__proto__][] ![toString]",
    "formula link": r"$\href{javascript:alert(1)}{x}$ $\url{javascript:alert(1)}$",
    "formula image": r"$\includegraphics{https://evil.example/p.png}$",
    "formula style": r"$\class{x}{y} \style{color:red}{y}$",
    "formula id": r"$$\begin{align}a \label{words}\end{align}$$ $\ref{words}$ $\id{log}{x}$",
    "clobber": '<form id="composer"><input name="words"></form><a name="words" id="words">',
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_nothing_that_a_model_says_runs_or_is_fetched(drawing: Drawing, text: str) -> None:
    fetched: list[str] = []
    drawing.page.on("request", lambda request: fetched.append(request.url))
    drawing.draw(*(text[at : at + 5] for at in range(0, len(text), 5)))
    drawing.draw(text)
    drawing.page.wait_for_function("() => !document.head.querySelector('script:not([src])')")
    assert drawing.count(":is(img, script, iframe, svg, style, form, input, object, [id])") == 0
    attributes = drawing.page.evaluate("""() => [...document.querySelectorAll("#log *")].flatMap(
        (element) => [...element.attributes].map(({ name }) => name))""")
    assert not [name for name in attributes if name.startswith("on")]
    links = drawing.page.locator("#log [href]").evaluate_all(
        "all => all.map((link) => link.getAttribute('href'))"
    )
    assert all(href.startswith("https://") for href in links)
    assert all("/ui/" in address for address in fetched), "only files of the page are loaded"


@pytest.mark.parametrize("size", [4, 33])
def test_what_was_streamed_looks_as_what_came_at_once(drawing: Drawing, size: int) -> None:
    text = (
        KINDS
        + "\n\n[later]: https://example.com\n\nSee [later], \r\nand ```a``` b.\n\n```js\nlet a"
    )
    drawing.draw(text)
    whole = drawing.page.locator("#log .hl-keyword")
    expect(whole).to_have_count(3)
    at_once = drawing.page.locator("#log .text").inner_html()
    drawing.draw(*(text[at : at + size] for at in range(0, len(text), size)))
    expect(whole).to_have_count(3)
    assert drawing.page.locator("#log .text").inner_html() == at_once


COUNT = """async (text) => {
  const { partsOf } = await import("/ui/markdown.js");
  const { StreamedText } = await import("/ui/streamed.js");
  const box = document.createElement("div");
  document.getElementById("log").replaceChildren(box);
  let made = 0;
  new MutationObserver((all) => {
    for (const { addedNodes } of all) made += addedNodes.length;
  }).observe(box, { childList: true });
  const streamed = new StreamedText(box);
  for (let at = 0; at < text.length; at += 40) {
    streamed.append(text.slice(at, at + 40));
    await new Promise(requestAnimationFrame);
  }
  streamed.finish();
  await new Promise(requestAnimationFrame);
  return [made, box.childNodes.length];
}"""


def test_blocks_that_are_over_are_made_once(drawing: Drawing) -> None:
    blocks = 60
    text = "".join(f"Block {number} of an answer.\n\n" for number in range(blocks))
    made, shown = drawing.page.evaluate(COUNT, text)
    assert shown == blocks
    assert made < 4 * blocks, "each is made anew while it is the last one, and then left alone"


def test_a_growing_block_of_code_is_not_made_anew(drawing: Drawing) -> None:
    made, shown = drawing.page.evaluate(COUNT, "```\n" + "some line of code\n" * 60)
    assert shown == 1
    assert made < 4


HUGE = {
    "prose": "The quick **brown** fox `jumps`. " * 3000,
    "blocks": "One line.\n\n" * 9000,
    "one word": "a" * 100_000,
    "brackets": "[" * 50_000,
    "stars": "**a" * 30_000,
    "quotes": ">" * 50_000,
    "table": "|a|b|c|\n|-|-|-|\n" + "|1|2|3|\n" * 10_000,
    "list": "- item\n" * 10_000,
    "nested list": "\n".join("  " * depth + "- a" for depth in range(300)),
    "code": "```python\n" + "x = 1\n" * 16_000,
    "dollars": "$a" * 40_000,
    "lines of dollars": "\n$$a" * 300_000,
    "item of lines": "- a\n" + "b\n" * 300_000,
    "open formulas": r"\(" * 40_000,
    "right to left": "שלום עולם " * 9000,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_a_huge_answer_is_shown_whole(drawing: Drawing, text: str) -> None:
    """Its time is not measured: one that were quadratic would not end."""
    drawing.draw(text[: len(text) // 2], text[len(text) // 2 :])
    shown = drawing.page.locator("#log .text").evaluate("box => box.textContent")
    letters = [character for character in text if character.isalnum()]
    assert [character for character in shown if character.isalnum()][-50:] == letters[-50:]


BOMBS = {
    "definitions": r"\def\a{xxxxxxxxxx}\def\b{\a\a\a\a\a\a\a\a}\def\c{\b\b\b\b\b\b\b\b}\c\c\c\c\c",
    "long": r"\def\a{" + "x" * 2000 + "}" + r"\a" * 150,
    "itself": r"\def\a{\a\a}\a",
    "new command": r"\newcommand{\a}{\a}\a",
    "braces": "{" * 3000 + "x" + "}" * 3000,
    "unknown": r"\thereisnosuchthing{x}",
    "open": r"\frac{1}{",
}


@pytest.mark.parametrize("tex", BOMBS.values(), ids=BOMBS)
def test_a_formula_that_cannot_be_drawn_stays_text(drawing: Drawing, tex: str) -> None:
    drawing.draw(r"First $\pi$ loads the library.")
    expect(drawing.page.locator("#log math")).to_have_count(1)
    drawing.draw(f"$$\n{tex}\n$$")
    assert drawing.count("math") == 0
    expect(drawing.page.locator("#log .text")).to_contain_text(tex[:40])


def test_a_formula_does_not_grow_over_the_page(drawing: Drawing) -> None:
    drawing.draw(r"$\rule{9000em}{9000em}$ and $$\kern9000em x \\[9000em] y$$")
    expect(drawing.page.locator("#log math")).to_have_count(2)
    for formula in drawing.page.locator("#log math").all():
        box = formula.bounding_box()
        assert box is not None
        assert max(box["width"], box["height"]) < 2000
    width = drawing.page.evaluate("() => document.documentElement.scrollWidth")
    assert width <= drawing.page.evaluate("() => window.innerWidth")


def test_words_decide_their_direction_and_code_goes_left_to_right(drawing: Drawing) -> None:
    drawing.draw("שלום **עולם**\n\nhello\n\n- שלום\n\n```\nשלום = 1\n```")
    directions = drawing.page.locator("#log").evaluate("""log =>
        [...log.querySelectorAll("p, li, pre code")].map((e) => getComputedStyle(e).direction)""")
    assert directions == ["rtl", "ltr", "rtl", "ltr"]


def test_headings_of_an_answer_go_on_from_those_of_the_page(drawing: Drawing) -> None:
    drawing.draw("### Deep\n\n# High\n\n#### Deeper\n\n###### Deepest")
    names = drawing.page.locator("#log").evaluate("""log =>
        [...log.querySelectorAll("h1,h2,h3,h4,h5,h6")].map((e) => e.localName)""")
    assert names == ["h3", "h3", "h4", "h5"]


def test_code_is_copied_as_it_was_written(drawing: Drawing) -> None:
    drawing.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    drawing.draw("```python\nif a < b:\n\tprint('&amp;')\n```")
    drawing.page.click("#log figure button")
    expect(drawing.page.locator("#log figure button")).to_have_text("Copied")
    copied: Any = drawing.page.evaluate("() => navigator.clipboard.readText()")
    assert copied == "if a < b:\n\tprint('&amp;')"
