"""Text as it streams is the text of the whole; stop strings are found whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from diptych_frontend.text.detokenizer import MAX_UNDECODED, Detokenizer, StopMatcher, TextStream
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import SamplingParams

TEXTS = [
    "Hello world, it's 2024.",
    " leading space\n\n\ttabs and  spaces  ",
    "😀 👩‍👩‍👧‍👦 🇩🇪 你好，世界 ünïcödé \u200b",
    "a real \ufffd replacement character",
    "<|im_start|>user\nhi<|im_end|>\n",
]


def stream(tokenizer: Tokenizer, context: list[int], ids: list[int], *, skip: bool = True) -> str:
    decoder = TextStream(tokenizer, context, skip_special_tokens=skip)
    return "".join([*map(decoder.push, ids), decoder.flush()])


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_the_whole(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text)
    assert stream(tokenizer, [], ids, skip=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30), data=st.data())
def test_text_continues_any_prompt_that_ends_at_a_character(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    before, after = tokenizer.decode(ids[:cut]), tokenizer.decode(ids)
    if after.endswith("\ufffd") or before.endswith("\ufffd"):
        return
    assert stream(tokenizer, ids[:cut], ids[cut:]) == after.removeprefix(before)


def test_no_half_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("👩‍👩‍👧‍👦🇩🇪")
    assert len(ids) > 15, "the test needs characters of several tokens"
    decoder = TextStream(tokenizer, [], skip_special_tokens=True)
    pieces = [decoder.push(token_id) for token_id in ids]
    assert "\ufffd" not in "".join(pieces)
    assert pieces[0] == ""
    assert "".join(pieces) == "👩‍👩‍👧‍👦🇩🇪"


@pytest.mark.parametrize("missing", [1, 2])
def test_an_unfinished_character_at_the_end_is_left_out(tokenizer: Tokenizer, missing: int) -> None:
    ids = tokenizer.encode("ok 👍")
    assert stream(tokenizer, [], ids[:-missing]) == "ok "


def test_a_prompt_that_ends_inside_a_character_is_not_emitted_again(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("secret 👍 done")
    inside = next(at for at in range(1, len(ids)) if tokenizer.decode(ids[:at]).endswith("\ufffd"))
    text = stream(tokenizer, ids[:inside], ids[inside:])
    assert "secret" not in text
    assert text.endswith(" done")


@given(ids=st.lists(st.integers(0, 49151), max_size=MAX_UNDECODED))
@settings(max_examples=300)
def test_any_token_ids_give_the_characters_of_the_whole(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    whole = tokenizer.decode(ids)
    assert stream(tokenizer, [], ids).replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_bytes_that_never_form_a_character_do_not_stop_the_stream(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("😀")[0]
    decoder = TextStream(tokenizer, [], skip_special_tokens=True)
    pieces = [decoder.push(broken) for _ in range(100)]
    assert any("\ufffd" in piece for piece in pieces)
    rest = [decoder.push(token_id) for token_id in tokenizer.encode(" and on")]
    assert "".join(rest).endswith(" and on")


def words(*, strip_changes_text: bool = False) -> Tokenizer:
    """A tokenizer whose decoder strips the first space, as SentencePiece models do."""
    vocabulary = {"▁Hello": 0, "▁world": 1, "▁": 2, "a": 3, "XX": 4, "?": 5}
    backend = Backend(models.WordLevel(vocabulary, unk_token="?"))
    steps = [decoders.Metaspace()]
    if strip_changes_text:
        steps = [decoders.Fuse(), decoders.Replace("aXX", "b")]  # type: ignore[list-item]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend)


def test_the_prompt_decides_whether_the_first_word_gets_its_space() -> None:
    assert stream(words(), [0], [1]) == " world"
    assert stream(words(), [], [1]) == "world"
    assert words().token_text(1) == " world"


def test_a_decoder_that_rewrites_earlier_text_does_not_break_the_stream() -> None:
    tokenizer = words(strip_changes_text=True)
    assert tokenizer.decode([3, 4]) == "b"
    assert stream(tokenizer, [0, 3], [4, 4, 3]) == "XXXXa"


# --- stop strings ---------------------------------------------------------------------------------


def naive(text: str, stops: list[str], include: bool, min_chars: int = 0) -> tuple[str, str | None]:
    """Cut at the first character that completes a stop string; the longest one counts."""
    for end in range(min_chars + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=500)
@given(pieces=st.lists(st.text("abc", max_size=5), max_size=8), stops=STOPS, include=st.booleans())
def test_contract_B05_any_split_of_any_text_stops_where_a_search_over_the_whole_does(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(stops, include_in_output=include)
    emitted, found = "", None
    for piece in pieces:
        text, found = matcher.push(piece, may_stop=True)
        emitted += text
        if found is not None:
            break
    else:
        emitted += matcher.flush()
    assert (emitted, found) == naive("".join(pieces), stops, include)


@given(pieces=st.lists(st.text("abc", max_size=5), max_size=8), stops=STOPS)
def test_contract_B05_nothing_is_emitted_that_could_still_begin_a_stop_string_and_no_more_is_held(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops, include_in_output=False)
    keep = max(map(len, stops)) - 1
    emitted = seen = ""
    for piece in pieces:
        seen += piece
        text, found = matcher.push(piece, may_stop=True)
        emitted += text
        if found is not None:
            return
        assert emitted == seen[: max(len(seen) - keep, 0)]


ENGLISH = "One, two. three\n\nfour END five END. 12 stop stopping <|im_end|> last"


@settings(max_examples=300)
@given(
    text=st.lists(st.sampled_from([ENGLISH, "stop", " END", "\n", "a", ". t"]), max_size=4).map(
        "".join
    ),
    stops=st.lists(
        st.sampled_from(["END", "stop", "stopping", "\n\n", ". ", "e t", "12", "no such"]),
        min_size=1,
        max_size=4,
        unique=True,
    ),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=40),
)
@example(text="stop END", stops=["END"], include=False, min_tokens=0, steps=[9])
def test_contract_B05_tokens_in_any_steps_stop_where_a_search_over_the_whole_does(
    tokenizer: Tokenizer,
    text: str,
    stops: list[str],
    include: bool,
    min_tokens: int,
    steps: list[int],
) -> None:
    ids = tokenizer.encode(text)
    lengths = [len(tokenizer.decode(ids[:count])) for count in range(len(ids) + 1)]
    min_chars = lengths[min(min_tokens, len(ids))]
    expected = naive(tokenizer.decode(ids), stops, include, min_chars)

    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=999
    )
    detokenizer = Detokenizer(tokenizer, params, [])
    emitted, kept, found, at = "", 0, None, 0
    while found is None and at < len(ids):
        step = ids[at : at + steps.pop()] if len(steps) > 1 else ids[at : at + steps[0]]
        at += len(step)
        piece, count, found = detokenizer.push(step, finished=at == len(ids), stop_token=False)
        emitted += piece
        kept += count
    assert (emitted, found) == expected
    if found is None:
        assert kept == len(ids)
    else:
        end = len(emitted) if include else len(emitted) + len(found)
        assert kept == next(count for count, length in enumerate(lengths) if length >= end)


@pytest.mark.parametrize(
    ("include", "skip_special", "text"),
    [(False, True, "Hi"), (False, False, "Hi"), (True, True, "Hi"), (True, False, "Hi<|im_end|>")],
)
def test_the_token_that_ends_the_answer_is_not_part_of_its_text_unless_asked_for(
    tokenizer: Tokenizer, include: bool, skip_special: bool, text: str
) -> None:
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip_special)
    detokenizer = Detokenizer(tokenizer, params, [])
    ids = [*tokenizer.encode("Hi"), 2]
    assert detokenizer.push(ids, finished=True, stop_token=True) == (text, 2, None)


def test_a_stop_token_of_plain_text_leaves_no_trace_in_the_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop_token_ids=[1]), [])
    ids = tokenizer.encode("one two")
    assert detokenizer.push(ids, finished=True, stop_token=True) == ("one", 2, None)


def test_contract_B05_a_stop_string_before_the_stop_token_of_one_step_wins(
    tokenizer: Tokenizer,
) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["two"]), [])
    ids = [*tokenizer.encode("one two three"), 2]
    assert detokenizer.push(ids, finished=True, stop_token=True) == ("one ", 2, "two")


def test_held_back_text_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["never this one"]), [])
    ids = tokenizer.encode("all of it")
    assert detokenizer.push(ids, finished=False, stop_token=False) == ("", 3, None)
    assert detokenizer.push([], finished=True, stop_token=False) == ("all of it", 0, None)
