"""Calls in the format of each family: found the same, whatever pieces an answer comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_frontend.reasoning.harmony import HarmonySplitter
from diptych_frontend.tool_calls.calls import MAX_CALL, ParsedCall
from diptych_frontend.tool_calls.formats import FORMATS, SIGNS, format_of
from diptych_frontend.tool_calls.json_end import MAX_DEPTH
from diptych_frontend.tool_calls.mistral import OF_GRANITE
from diptych_frontend.tool_calls.parser import ToolCallParser
from diptych_protocol import EngineConfig, InvalidRequestError, RouterConfig

TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "x": {"type": "string"},
            "n": {"type": "integer"},
            "b": {"type": ["boolean", "null"]},
            "o": {"type": "object"},
        },
    },
    "g": {},
}
F, G = ParsedCall("f", '{"x":"<b>"}'), ParsedCall("g", "{}")

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "<b>"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "g", "parameters": {}}</tool_call>'

LLAMA = '{"name": "f", "parameters": {"x": "<b>"}}'
LLAMA_G = '{"name": "g", "parameters": {}}'

LIST = '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "<b>"}, "id": "abcdefghi"}]'
GRANITE = '<|tool_call|>[{"name": "f", "arguments": {"x": "<b>"}}]'
GRANITE_G = '<|tool_call|>[{"name": "g", "arguments": {}}]'
PHI = f"{GRANITE}<|/tool_call|>"
NAMED = '[TOOL_CALLS]f[ARGS]{"x": "<b>"}'

V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": "<b>"}\n```<｜tool▁call▁end｜>'
V31 = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "<b>"}<｜tool▁call▁end｜>'
V31_G = "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
ALL, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

XML = "<tool_call>\n<function=f>\n<parameter=x>\n<b>\n</parameter>\n</function>\n</tool_call>"
XML_G = "<tool_call><function=g></function></tool_call>"
VALUES = (
    "<tool_call><function=f><parameter=x>\n1\n2\n</parameter><parameter=n>3</parameter>"
    '<parameter=b>True</parameter><parameter=o>{"a": [1]}</parameter>'
    "<parameter=other>4</parameter></function></tool_call>"
)
TYPED = ParsedCall("f", '{"x":"1\\n2","n":3,"b":true,"o":{"a":[1]},"other":"4"}')

TO_F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": "<b>"}<|call|>'
TO_G = "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"

PYTHON = "[f(x='<b>')]"
START, PYTHON_END = "<|python_start|>", "<|python_end|>"
PYTHON_VALUES = """[f(x='a]\\'"', n=-3, b=True, o={'a': [1.5, None, (true, "[")]})]"""
PYTHON_TYPED = ParsedCall("f", '{"x":"a]\'\\"","n":-3,"b":true,"o":{"a":[1.5,null,[true,"["]]}}')
NO_PYTHON = (
    "[nobody(x=1)]", "[f(x='a'), nobody()]", "[f('a')]", "[f(**{})]", "[f(x=open)]", "[f(x=g())]",
    "[f(x=1+1)]", "[f(x={1: 2})]", "[f(x=b'a')]", "[f(x=1e999)]", "[f(x=1, x=2)]", "[f]", "[f(x=)]",
    "[]", "[f(x=...)]", "[f(x=f'{1}')]", "[f(x='\\ud800')]", f"[f(n={'9' * 5000})]",
    "[(lambda: f)()()]", "[f(x='a\nb')]",
)  # fmt: skip

CASES: list[tuple[str, str, str, list[ParsedCall]]] = [
    # format, answer, text, calls
    *((name, "", "", []) for name in FORMATS),
    *((name, "plain < [ { text", "plain < [ { text", []) for name in FORMATS),
    ("hermes", CALL, "", [F]),
    ("hermes", f"First. {CALL}\n{OTHER}\n", "First. ", [F, G]),
    ("hermes", f"{CALL}\n then", "then", [F]),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", CALL[:-3], "", [F]),
    ("hermes", CALL[:-15], CALL[:-15], []),
    ("hermes", "<tool_call>{no json}</tool_call>", "<tool_call>{no json}</tool_call>", []),
    ("hermes", '<tool_call>{"name": 1}</tool_call>!', '<tool_call>{"name": 1}</tool_call>!', []),
    ("hermes", f"<tool_<tool_call>[]</tool_call>{OTHER}", "<tool_<tool_call>[]</tool_call>", [G]),
    ("pythonic", PYTHON, "", [F]),
    ("pythonic", f"{START}{PYTHON}{PYTHON_END}", "", [F]),
    ("pythonic", "[f(x='<b>'), g()]", "", [F, G]),
    ("pythonic", f"First.\n {PYTHON}\nthen", "First.\n then", [F]),
    ("pythonic", f"In words {PYTHON}", f"In words {PYTHON}", []),
    ("pythonic", PYTHON_VALUES, "", [PYTHON_TYPED]),
    ("pythonic", "[1, 2]\n[a](b)", "[1, 2]\n[a](b)", []),
    ("pythonic", PYTHON[:-1], PYTHON[:-1], []),
    *(("pythonic", text, text, []) for text in NO_PYTHON),
    ("llama", LLAMA, "", [F]),
    ("llama", f"<|python_tag|>{LLAMA}", "", [F]),
    ("llama", f"{LLAMA}; {LLAMA_G}", "", [F, G]),
    ("llama", f"<|python_tag|>{LLAMA};\n{LLAMA_G} then; so", "then; so", [F, G]),
    ("llama", f"First.\n\n{LLAMA}\nthen", "First.\n\nthen", [F]),
    ("llama", f"<|python_tag|>{LLAMA}<|python_tag|>{LLAMA_G}", "", [F, G]),
    ("llama", f"In words {LLAMA}", f"In words {LLAMA}", []),
    ("llama", '{"answer": 1}', '{"answer": 1}', []),
    ("llama", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama", LLAMA[:-1], LLAMA[:-1], []),
    ("llama", '{"name": "f" "}"}', '{"name": "f" "}"}', []),
    ("llama", f'{{"a": "}}"}}\n{LLAMA}', '{"a": "}"}\n', [F]),
    ("mistral", LIST, "", [F]),
    ("mistral", f'{LIST[:-1]}, {{"name": "g", "arguments": {{}}}}]', "", [F, G]),
    ("mistral", f"First.{LIST} then", "First.then", [F]),
    ("mistral", NAMED, "", [F]),
    ("mistral", f"{NAMED}[TOOL_CALLS]g{{}}", "", [F, G]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": "<b>"}', "", [F]),
    ("mistral", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("mistral", "[TOOL_CALLS]f[ARGS]{x}", "[TOOL_CALLS]f[ARGS]{x}", []),
    ("mistral", NAMED[:-1], NAMED[:-1], []),
    ("mistral", f"[TOOL_CALLS]{'x ' * 200}{NAMED}", f"[TOOL_CALLS]{'x ' * 200}", [F]),
    ("mistral", "[TOOL", "[TOOL", []),
    ("granite", GRANITE, "", [F]),
    ("granite", f'First. {GRANITE[:-1]}, {{"name": "g", "arguments": {{}}}}]', "First. ", [F, G]),
    ("granite", GRANITE.replace("|", ""), "", [F]),
    ("granite", "<|tool_call|> none", "<|tool_call|> none", []),
    ("granite", GRANITE[:-1], GRANITE[:-1], []),
    ("phi4_mini", PHI, "", [F]),
    ("phi4_mini", f'So. {GRANITE[:-1]}, {{"name": "g"}}]<|/tool_call|> then', "So. then", [F, G]),
    ("phi4_mini", GRANITE, "", [F]),
    ("phi4_mini", "<|tool_call|> none", "<|tool_call|> none", []),
    ("phi4_mini", PHI.replace("{", "("), PHI.replace("{", "("), []),
    ("deepseek", f"{ALL}{V3}{END}", "", [F]),
    ("deepseek", f"{ALL}{V3}\n{V3}{END}", "", [F, F]),
    ("deepseek", f"First.{ALL}{V31}{V31_G}{END}", "First.", [F, G]),
    ("deepseek", f"{V31}then", "then", [F]),
    ("deepseek", V31.replace("{", "("), V31.replace("{", "("), []),
    ("deepseek", V31.replace("f<", "f f<"), V31.replace("f<", "f f<"), []),
    ("deepseek", V31[:-1], "", [F]),
    ("deepseek", V31[:-20], V31[:-20], []),
    ("qwen3_coder", XML, "", [F]),
    ("qwen3_coder", f"First. {XML}\n{XML_G}\nthen", "First. then", [F, G]),
    ("qwen3_coder", VALUES, "", [TYPED]),
    ("qwen3_coder", CALL, CALL, []),
    ("qwen3_coder", XML.replace("</par", "<par"), XML.replace("</par", "<par"), []),
    ("qwen3_coder", XML[:-1], "", [F]),
    ("qwen3_coder", XML[:-20], XML[:-20], []),
    ("harmony", TO_F, "", [F]),
    ("harmony", TO_F.removesuffix("<|call|>"), "", [F]),
    ("harmony", TO_F.replace(" <|constrain|>", "<|constrain|>"), "", [F]),
    ("harmony", f"{TO_F}{TO_G}{FINAL}then", "then", [F, G]),
    ("harmony", TO_G.removeprefix("<|start|>assistant"), "", [G]),
    ("harmony", f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{TO_F}", "", [F]),
    ("harmony", "<|channel|>commentary<|message|>I will<|end|>", "", []),
    ("harmony", "<|channel|>commentary to=browser.open<|message|>{}<|call|>", "", []),
    ("harmony", TO_F.replace("{", "("),
     '<|channel|>commentary to=functions.f<|message|>("x": "<b>"}<|call|>', []),
    ("harmony", " too", " too", []),
]  # fmt: skip


def parse(
    name: str, pieces: list[str], *, parallel: bool = True, cut: bool = False
) -> tuple[str, list[ParsedCall]]:
    """The text and the calls of an answer. In harmony, what reads reasoning comes first."""
    parser = ToolCallParser(FORMATS[name], TOOLS, parallel=parallel)
    before = HarmonySplitter(None, shows_calls=True) if name == "harmony" else None
    text, calls = "", []
    for piece in [*pieces, None]:
        last, answer = piece is None, piece or ""
        if before is not None:
            _, answer = before.push(answer, last=last)
        for told in parser.push(answer, last=last, cut=cut):
            if isinstance(told, str):
                text += told
            else:
                calls.append(told)
    assert parser.num_calls == len(calls)
    return text, calls


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


BLANKS = " " * 100_000
LONG = [
    # format, answer: of blanks where a reader might try each place for the end of something
    ("deepseek", f"{V3[: V3.index('{')]}{BLANKS}<｜tool▁call▁end｜>"),
    ("deepseek", f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{BLANKS}<｜tool▁call▁end｜>"),
    ("qwen3_coder", f"<tool_call>{BLANKS}</tool_call>"),
    ("qwen3_coder", f"<tool_call><function=f>{BLANKS}</tool_call>"),
    ("qwen3_coder", f"<tool_call><function=f><parameter=x>v</parameter>{BLANKS}y</tool_call>"),
    ("mistral", f"[TOOL_CALLS]{BLANKS}x"),
    ("granite", f"<|tool_call|>{BLANKS}x"),
    ("llama", f"<|python_tag|>{BLANKS}x"),
    ("pythonic", f"<|python_start|>{BLANKS}x"),
    ("pythonic", f"[f(x=1){BLANKS}y]"),
    ("pythonic", "[f(x=" * 50_000),
    ("pythonic", f"[f(x={'1,' * 100_000})]"),
]


@each(("name", "answer"), LONG)
def test_a_long_answer_that_is_no_call_does_not_hold_the_server_up(name: str, answer: str) -> None:
    """A reader whose time grows with the square of the length is not done when this one is."""
    assert parse(name, [answer]) == (answer, [])


@each(("name", "answer", "text", "calls"), CASES)
def test_contract_C05_calls_are_found_however_an_answer_is_cut(
    name: str, answer: str, text: str, calls: list[ParsedCall]
) -> None:
    assert parse(name, [answer]) == (text, calls)
    assert parse(name, list(answer)) == (text, calls)
    for place in range(1, len(answer)):
        assert parse(name, [answer[:place], answer[place:]]) == (text, calls)


TYPED_LLAMA = LLAMA.replace("{", '{ "type": "function", ', 1)
CUT = {
    "hermes": f"So.\n{CALL}\n{OTHER}",
    "llama": f"So.\n{LLAMA}; {LLAMA_G}",
    "llama, with a tag": f"So.\n<|python_tag|>{LLAMA}<|python_tag|>{LLAMA_G}",
    "llama, with a type": f"So.\n{TYPED_LLAMA};{LLAMA_G}",
    "mistral": f"So.\n{NAMED}[TOOL_CALLS]g{{}}",
    "mistral, in a list": f'So.\n{LIST[:-1]}, {{"name": "g", "arguments": {{}}}}]',
    "granite": f'So.\n{GRANITE[:-1]}, {{"name": "g", "arguments": {{}}}}]',
    "phi4_mini": f"So.\n{PHI}{PHI.replace(GRANITE, GRANITE_G)}",
    "deepseek": f"So.\n{ALL}{V31}\n{V31_G}{END}",
    "deepseek, in a fence": f"So.\n{ALL}{V3}\n{V31_G}{END}",
    "pythonic": "So.\n[f(x='<b>'), g()]",
    "pythonic, with markers": f"So.\n{START}[f(x='<b>'), g()]{PYTHON_END}",
    "qwen3_coder": f"So.\n{XML}\n{XML_G}",
    "harmony": f"So.\n{TO_F}{TO_G}",
}


@each("case", CUT)
def test_contract_C05_an_answer_cut_within_a_call_has_its_whole_calls_and_no_part_of_one(
    case: str,
) -> None:
    name, answer = case.partition(",")[0], CUT[case]
    found = []
    for end in range(len("So.\n"), len(answer) + 1):
        text, calls = parse(name, [answer[:end]], cut=True)
        left = text.removeprefix("So.").strip()
        # One character may be anything. A marker of harmony is one token, so it is never cut.
        assert len(left) < 2 or (name == "harmony" and "<|start|>".startswith(left)), answer[:end]
        assert parse(name, list(answer[:end]), cut=True) == (text, calls)
        assert calls == [F, G][: len(calls)]
        found.append(len(calls))
    assert found[-1] == 2
    # Within the fence's end the arguments are whole no more.
    assert found == sorted(found) or "fence" in case


@each(
    ("name", "answer"),
    [
        ("llama", '{"name": "nobody", "a'), ("llama", '{"answer": {"name": "f"'),
        ("pythonic", "[1, 2"), ("pythonic", "[fine, words"), ("hermes", "<tool_call> is one"),
        ("qwen3_coder", "<tool_call> is a tag"), ("deepseek", "a <"), ("mistral", "x = ["),
    ],
)  # fmt: skip
def test_contract_C05_what_cannot_become_a_call_stays_when_an_answer_is_cut(
    name: str, answer: str
) -> None:
    assert parse(name, [answer], cut=True) == (answer, [])


PARTS: dict[str, list[str]] = {
    "hermes": [CALL, OTHER, "<tool_call>", "</tool_call>", '{"name": "f"}'],
    "llama": [LLAMA, LLAMA_G, "<|python_tag|>", ";", "{", "}", '"', "\\", "["],
    "mistral": [LIST, NAMED, "[TOOL_CALLS]", "[ARGS]", "f", "[", "]", "{", "}", '"', "\\"],
    "granite": [GRANITE, *OF_GRANITE, "f", "[", "]", "{", "}", '"', "\\"],
    "phi4_mini": [PHI, GRANITE, "<|/tool_call|>", "f", "[", "]", "{", "}", '"', "\\"],
    "deepseek": [ALL, END, V3, V31, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "{}"],
    "pythonic": [PYTHON, PYTHON_VALUES, START, PYTHON_END, "[", "]", "(", ")", "'", '"', "\\", ","],
    "qwen3_coder": [XML, XML_G, "<tool_call>", "</tool_call>", "<function=f>", "</function>"],
    "harmony": [TO_F, TO_G, FINAL, "<|message|>", "<|call|>", "<|start|>", "<|channel|>"],
}


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data(), places=st.lists(st.integers(0, 2000), max_size=8))
@settings(max_examples=80)
def test_contract_C05_any_pieces_give_what_the_whole_gives(
    name: str, data: st.DataObject, places: list[int]
) -> None:
    parts = st.sampled_from([*PARTS[name], " ", "\n", "a", "<"])
    answer = "".join(data.draw(st.lists(parts, max_size=10)))
    whole = parse(name, [answer])
    assert parse(name, cut(answer, places)) == whole
    assert parse(name, list(answer)) == whole


BEGINNINGS: dict[str, tuple[str, str]] = {
    "hermes": ('<tool_call>{"name": "f", "arguments": {"x": ', "}}</tool_call>"),
    "llama": ('{"name": "f", "parameters": {"x": ', "}}"),
    "mistral": ('[TOOL_CALLS]f[ARGS]{"x": ', "}"),
    "granite": ('<|tool_call|>[{"name": "f", "arguments": {"x": ', "}}]"),
    "phi4_mini": ('<|tool_call|>[{"name": "f", "arguments": {"x": ', "}}]<|/tool_call|>"),
    "deepseek": ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": ', "}<｜tool▁call▁end｜>"),
    "pythonic": ("[f(x=", ")]"),
    "qwen3_coder": (
        "<tool_call><function=f><parameter=o>", "</parameter></function></tool_call>",
    ),
    "harmony": ("<|channel|>commentary to=functions.f<|message|>" + '{"x": ', "}<|call|>"),
}  # fmt: skip


@each("name", FORMATS)
def test_contract_C05_deep_json_is_a_call_or_text_and_never_an_error(name: str) -> None:
    before, after = BEGINNINGS[name]
    shallow = MAX_DEPTH - 10
    nested = f"{before}{'[' * shallow}{']' * shallow}{after}"
    text, [call] = parse(name, [nested])
    assert text == ""
    assert call.arguments.count("[") == shallow
    [deep] = [f"{before}{'[' * 100_000}{']' * 100_000}{after}"]
    text, calls = parse(name, cut(deep, [len(before) + 500, 50_000]))
    if name == "qwen3_coder":  # what is not JSON is a text
        [call] = calls
        assert isinstance(json.loads(call.arguments)["o"], str)
    else:
        assert (text, calls) == (deep, [])


@each("name", FORMATS)
def test_contract_C05_a_call_without_end_does_not_hold_the_answer_back(name: str) -> None:
    before, after = BEGINNINGS[name]
    long = f'{before}"{"x" * MAX_CALL}"{after}'
    text, calls = parse(name, cut(long, [1000, MAX_CALL - 1, MAX_CALL + 30]))
    assert (text, calls) == (long, [])
    style = FORMATS[name]
    parser = ToolCallParser(style, TOOLS, parallel=True)
    [told] = parser.push(long[: MAX_CALL + 100])
    assert isinstance(told, str)
    assert len(told) >= MAX_CALL


@each(
    ("name", "answer"),
    [
        ("hermes", CALL + OTHER),
        ("llama", f"{LLAMA};{LLAMA_G}"),
        ("mistral", f"{NAMED}{LIST}"),
        ("granite", f"{GRANITE}{GRANITE}"),
        ("phi4_mini", f"{PHI}{PHI}"),
        ("deepseek", f"{ALL}{V31}{V31_G}{END}"),
        ("pythonic", "[f(x='<b>'), g()]"),
        ("qwen3_coder", XML + XML_G),
        ("harmony", f"{TO_F}{TO_G}{FINAL}"),
    ],
)
def test_contract_C05_without_parallel_calls_the_first_counts(name: str, answer: str) -> None:
    assert parse(name, [f"{answer}!"], parallel=False) == ("!", [F])


@each(
    ("setting", "reasoning", "template", "name"),
    [
        ("auto", "none", None, "hermes"),
        ("auto", "none", "{{ messages }}", "hermes"),
        ("auto", "think", "<tool_call>", "hermes"),
        ("auto", "none", "<tool_call><function=", "qwen3_coder"),
        ("auto", "none", "[TOOL_CALLS] [", "mistral"),
        ("auto", "none", "<|tool_call|> <tool_call>", "granite"),
        ("auto", "none", "<|tool|><|tool_call|>", "phi4_mini"),
        ("auto", "auto", "<|channel|>analysis", "harmony"),
        ("auto", "none", "<|channel|>analysis", "hermes"),
        ("auto", "think", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        ("auto", "none", "<|start_header_id|>ipython<|end_header_id|>", "llama"),
        # Hermes 3 on Llama's tokens
        ("auto", "none", "<|start_header_id|>ipython<|python_tag|><tool_call>", "hermes"),
        ("auto", "none", "put it in the format of [func_name1(params_name1=...)]", "pythonic"),
        ("auto", "harmony", "anything", "harmony"),
        ("llama", "none", "<tool_call>", "llama"),
        ("hermes", "harmony", None, "hermes"),
    ],
)
def test_contract_C05_the_setting_or_else_the_template_says_the_format(
    setting: str, reasoning: str, template: str | None, name: str
) -> None:
    assert format_of(setting, reasoning, template) == name
    assert {sign_name for _, sign_name in SIGNS} | {"harmony"} == set(FORMATS)


def test_the_setting_names_the_formats() -> None:
    for name in ("auto", *(name for name in FORMATS if name != "harmony")):
        EngineConfig("dummy://", tool_call_parser=name).check()  # type: ignore[arg-type]
        RouterConfig("dummy://", tool_call_parser=name).check()  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="auto, hermes, llama, mistral"):
        EngineConfig("dummy://", tool_call_parser="other").check()  # type: ignore[arg-type]
