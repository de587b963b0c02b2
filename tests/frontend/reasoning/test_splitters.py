"""Reasoning and answer: told apart the same way, whatever pieces a text comes in."""

from __future__ import annotations

import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_frontend.reasoning.formats import FORMATS
from diptych_frontend.reasoning.harmony import MARKERS, MAX_HEADER
from diptych_frontend.reasoning.splitter import certain_length
from diptych_frontend.reasoning.think import CLOSE, MAX_BLANKS, OPEN
from diptych_protocol import EngineConfig, InvalidRequestError

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
BLANKS = " " * (MAX_BLANKS + 1)

CASES: list[tuple[str, bool | None, str, str, str]] = [
    # format, ended, text, reasoning, answer
    ("think", None, "", "", ""),
    ("think", None, "plain", "", "plain"),
    ("think", None, "  plain ", "", "  plain "),
    ("think", None, "<think>a b</think>c", "a b", "c"),
    ("think", None, "\n<think>\na b\n</think>\n\nc d\n", "a b\n", "c d\n"),
    ("think", None, "<think>a <b </thin x</think>", "a <b </thin x", ""),
    ("think", None, "<think></think>", "", ""),
    ("think", None, "<think>cut of", "cut of", ""),
    ("think", None, "<think>cut </thi", "cut </thi", ""),
    ("think", None, "<thi", "", "<thi"),
    ("think", None, "<thing>", "", "<thing>"),
    ("think", None, "yes <think>a</think>", "", "yes <think>a</think>"),
    ("think", None, "<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
    ("think", None, f"{BLANKS}<think>a", "", f"{BLANKS}<think>a"),
    ("think", False, "\na</think>b", "a", "b"),
    ("think", False, "<think>a</think>b", "<think>a", "b"),
    ("think", True, " a</think>b", "", " a</think>b"),
    ("harmony", None, "plain <|x|> text", "", "plain <|x|> text"),
    ("harmony", None, f"{ANALYSIS}a < b<|end|>{FINAL}c", "a < b", "c"),
    ("harmony", None, f"{ANALYSIS}a<|end|>{FINAL}c<|return|>", "a", "c"),
    ("harmony", None, f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c", "ab", "c"),
    ("harmony", None, "<|channel|>commentary to=functions.f<|message|>{}<|call|>", "{}", ""),
    ("harmony", None, "<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    ("harmony", None, "<|start|>assistant<|message|>a", "", "a"),
    ("harmony", None, f"{ANALYSIS}cut of", "cut of", ""),
    ("harmony", None, f"{ANALYSIS}a<|end|><|start|>assis", "a", ""),
    ("harmony", None, f"{ANALYSIS}a<|en", "a<|en", ""),
    ("harmony", None, "<|channel|>" + "x" * (MAX_HEADER + 1), "", "x" * (MAX_HEADER + 1)),
    ("harmony", False, f"a<|end|>{FINAL}b", "a", "b"),
    ("harmony", True, "a", "", "a"),
]  # fmt: skip


def split(name: str, ended: bool | None, pieces: list[str]) -> tuple[str, str]:
    splitter = FORMATS[name].splitter(ended)
    told = [splitter.push(piece) for piece in pieces] + [splitter.push("", last=True)]
    return "".join(reasoning for reasoning, _ in told), "".join(answer for _, answer in told)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


PLACES = st.lists(st.integers(0, 1000), max_size=8)


@pytest.mark.parametrize(("name", "ended", "text", "reasoning", "answer"), CASES)
@given(places=PLACES)
@settings(max_examples=30)
def test_contract_C05_reasoning_is_found_however_a_text_is_cut(
    name: str, ended: bool | None, text: str, reasoning: str, answer: str, places: list[int]
) -> None:
    assert split(name, ended, cut(text, places)) == (reasoning, answer)
    assert split(name, ended, list(text)) == (reasoning, answer)


PARTS = st.sampled_from(
    [OPEN, CLOSE, *MARKERS, "<", "<|", "</", "final", "a", " ", "\n", "|>", "é"]
)


@pytest.mark.parametrize("name", FORMATS)
@given(
    parts=st.lists(PARTS, max_size=12), places=PLACES, ended=st.sampled_from([None, False, True])
)
@settings(max_examples=300)
def test_contract_C05_any_pieces_give_what_the_whole_gives(
    name: str, parts: list[str], places: list[int], ended: bool | None
) -> None:
    text = "".join(parts)
    assert split(name, ended, cut(text, places)) == split(name, ended, [text])


@pytest.mark.parametrize("name", FORMATS)
@given(parts=st.lists(PARTS, max_size=12), ended=st.sampled_from([None, False, True]))
def test_contract_C05_little_is_held_back(name: str, parts: list[str], ended: bool | None) -> None:
    """What is not told at once may be a part of a marker, a header, or blanks before a marker."""
    splitter = FORMATS[name].splitter(ended)
    dropped = {"think": MAX_BLANKS + len(CLOSE), "harmony": MAX_HEADER + len(MARKERS[0])}[name]
    markers = "".join((OPEN, CLOSE, *MARKERS))
    pushed = told = 0
    for part in parts:
        pushed += 0 if part in markers or part.isspace() else len(part)
        reasoning, answer = splitter.push(part)
        told += len(reasoning) + len(answer)
        assert pushed - told <= dropped


@given(text=st.text("<|endthik/>", max_size=12))
def test_what_is_held_back_is_the_longest_beginning_of_a_marker(text: str) -> None:
    certain = certain_length(text, MARKERS)
    rest = text[certain:]
    assert not rest or any(marker.startswith(rest) for marker in MARKERS)
    longer = [text[begin:] for begin in range(certain)]
    assert not any(m.startswith(t) and m != t for m in MARKERS for t in longer)


@each(
    ("name", "tail", "ended"),
    [
        ("think", "<|im_start|>assistant\n", None),
        ("think", "assistant\n<think>\n", False),
        ("think", "assistant\n<think>\n\n</think>\n\n", True),
        ("think", "<think><|im_end|>\n<|im_start|>assistant\n", None),
        ("harmony", "<|start|>assistant", None),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>", True),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", False),
        ("harmony", "<|channel|>final<|message|>Hi", None),
        ("harmony", "<|start|>user<|message|>", None),
    ],
)
def test_contract_C05_only_the_end_of_a_prompt_says_where_an_output_begins(
    name: str, tail: str, ended: bool | None
) -> None:
    assert FORMATS[name].ended_in_prompt(tail) is ended


def test_the_setting_names_the_formats() -> None:
    for name in ("auto", "none", *FORMATS):
        EngineConfig("dummy://", reasoning_parser=name).check()  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="auto, none, think or harmony"):
        EngineConfig("dummy://", reasoning_parser="other").check()  # type: ignore[arg-type]
