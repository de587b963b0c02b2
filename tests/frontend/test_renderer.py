"""Prompts and conversations to token ids; everything else to an error that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from cases import each

from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.renderer import TextRenderer, tokenization
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import InvalidRequestError

HELLO = [19556]


@pytest.fixture(scope="module")
def without_tokenizer() -> TextRenderer:
    return TextRenderer(resolve_model("dummy://?vocab_size=100"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hello", {"prompt": "Hello", "prompt_token_ids": HELLO}),
        ({"prompt": "Hello"}, {"prompt": "Hello", "prompt_token_ids": HELLO}),
        ([5, 6], {"prompt_token_ids": [5, 6]}),
        ([0, 49151], {"prompt_token_ids": [0, 49151]}),
        ({"prompt_token_ids": [5], "prompt": "x"}, {"prompt": "x", "prompt_token_ids": [5]}),
        ({"prompt_token_ids": [5], "prompt": None}, {"prompt_token_ids": [5]}),
        ({"prompt_token_ids": [5], "multi_modal_data": None}, {"prompt_token_ids": [5]}),
        (
            {"prompt": "Hello", "cache_salt": "s"},
            {"prompt": "Hello", "prompt_token_ids": HELLO, "cache_salt": "s"},
        ),
    ],
)
def test_prompts(text_renderer: TextRenderer, prompt: Any, expected: dict[str, Any]) -> None:
    assert text_renderer.render_prompt(prompt) == expected


@pytest.mark.parametrize(
    ("kwargs", "kept"),
    [
        (None, slice(None)),
        ({}, slice(None)),
        ({"add_special_tokens": False}, slice(None)),
        ({"truncation": True, "max_length": 2}, slice(2)),
        ({"truncation": True, "max_length": 1000}, slice(None)),
        ({"truncation": True}, slice(None)),
    ],
)
def test_a_text_is_tokenised_as_its_caller_wants(
    text_renderer: TextRenderer, tokenizer: Tokenizer, kwargs: Any, kept: slice
) -> None:
    text = "one two three four"
    rendered = text_renderer.render_prompt(text, tokenization=tokenization(kwargs))
    assert rendered["prompt_token_ids"] == tokenizer.encode(text)[kept]
    ids = [5, 6, 7]
    given = text_renderer.render_prompt(ids, tokenization=tokenization(kwargs))
    assert given["prompt_token_ids"] == ids, "token ids are not tokenised"


def test_a_text_that_is_too_long_may_be_cut_to_what_the_model_holds(
    text_renderer: TextRenderer,
) -> None:
    text = "word " * (text_renderer.max_model_len + 10)
    rendered = text_renderer.render_prompt(text, tokenization=tokenization({"truncation": True}))
    assert len(rendered["prompt_token_ids"]) == text_renderer.max_model_len


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"padding": True}, "unknown field `padding`"),
        ({"truncation": 1}, "Expected `bool`"),
        ({"truncation": True, "max_length": 0}, ">= 1"),
        ({"max_length": 5}, "needs truncation"),
        ([], "must be a dict"),
        ({1: 2}, "Expected `str`"),
        ({"\ud800": 2}, "takes add_special_tokens"),
    ],
)
def test_what_no_tokenizer_takes_is_refused(kwargs: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as refusal:
        tokenization(kwargs)
    assert refusal.value.param == "tokenization_kwargs"


@each(
    ("prompt", "param", "says"),
    [
        ("", "prompt", "empty"),
        ([], "prompt", "empty"),
        ({"prompt": ""}, "prompt", "empty"),
        ({}, "prompt", "neither"),
        (None, "prompt", "string or a list"),
        (7, "prompt", "string or a list"),
        ({"prompt": 7}, "prompt", "string"),
        ([1, -1], "prompt", "token id -1"),
        ([1, 49152], "prompt", "token id 49152"),
        ([1, "a"], "prompt", "int"),
        ([True], "prompt", "int"),
        ([2**70], "prompt", "outside|range"),
        ({"prompt_token_ids": "ab"}, "prompt", "array"),
        ({"prompt": "x", "cache_salt": 1}, "cache_salt", "string"),
        ("\ud800", "prompt", "surrogate"),
        ({"prompt": "x", "multi_modal_data": {"image": "y"}}, "multi_modal_data", "no images"),
        ({"prompt_token_ids": [5], "token_type_ids": [0]}, "token_type_ids", "not supported"),
    ],
)
def test_prompts_that_cannot_be_rendered(
    text_renderer: TextRenderer, prompt: Any, param: str, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        text_renderer.render_prompt(prompt)
    assert caught.value.param == param


def test_chat(text_renderer: TextRenderer, tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    rendered = text_renderer.render_chat(messages)
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert rendered == {"prompt": text, "prompt_token_ids": tokenizer.encode(text)}
    assert rendered["prompt_token_ids"].count(1) == 3
    closed = text_renderer.render_chat(messages, add_generation_prompt=False)
    assert closed["prompt"] == text.removesuffix("<|im_start|>assistant\n")
    begun = [*messages, {"role": "assistant", "content": "It is"}]
    goes_on = text_renderer.render_chat(
        begun, add_generation_prompt=False, continue_final_message=True
    )
    assert goes_on["prompt"] == text + "It is"


@pytest.mark.parametrize(
    ("content", "same_as"),
    [
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ([], ""),
        (None, ""),
    ],
)
def test_content_in_parts(text_renderer: TextRenderer, content: Any, same_as: str) -> None:
    messages = [{"role": "user", "content": content}]
    plain = text_renderer.render_chat([{"role": "user", "content": same_as}])
    assert text_renderer.render_chat(messages) == plain
    assert messages == [{"role": "user", "content": content}], "the caller's object was changed"


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "empty"),
        (["hi"], "messages[0]", "object"),
        ([{"content": "x"}], "messages[0].role", "None"),
        (
            [{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}],
            "messages[1].role",
            "wizard",
        ),
        ([{"role": "user", "content": 3}], "messages[0].content", "string"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
            "image_url",
        ),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "text parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "str"),
    ],
)
def test_conversations_that_cannot_be_rendered(
    text_renderer: TextRenderer, messages: Any, param: str, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        text_renderer.render_chat(messages)
    assert caught.value.param == param


def test_decode(text_renderer: TextRenderer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello<|im_end|>")
    assert text_renderer.decode(ids) == "Hello"
    assert text_renderer.decode(ids, skip_special_tokens=False) == "Hello<|im_end|>"


def test_a_model_without_tokenizer_takes_token_ids_only(without_tokenizer: TextRenderer) -> None:
    assert without_tokenizer.render_prompt([1, 99]) == {"prompt_token_ids": [1, 99]}
    assert without_tokenizer.decode([1]) == ""
    with pytest.raises(InvalidRequestError, match="token id 100"):
        without_tokenizer.render_prompt([100])
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        without_tokenizer.render_prompt("text")
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        without_tokenizer.render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("text", ["It was the best of times. ", "1234567890", "a", " ", "é", "\n"])
def test_a_text_that_cannot_fit_costs_no_more_than_one_that_does(
    text_renderer: TextRenderer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    tokenised = 0
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        nonlocal tokenised
        tokens = encode(self, text, add_special_tokens=add_special_tokens)
        tokenised += len(tokens)
        return tokens

    monkeypatch.setattr(Tokenizer, "encode", counted)
    size = 4 << 20
    with pytest.raises(InvalidRequestError, match="more tokens than this model") as refused:
        text_renderer.render_prompt((text * (size // len(text)))[:size])
    assert refused.value.code == "context_length_exceeded"
    assert tokenised <= 4 * text_renderer.max_model_len


@pytest.mark.parametrize("text", ["word ", "1", " ", "\n\n"])
def test_a_long_text_that_fits_is_tokenised_whole(text_renderer: TextRenderer, text: str) -> None:
    tokenizer = text_renderer.get_tokenizer()
    for size in (1_000, 8_000, 70_000):
        whole = (text * size)[:size]
        if len(tokenizer.encode(whole)) <= text_renderer.max_model_len:
            assert not tokenizer.exceeds(whole, text_renderer.max_model_len)
            assert text_renderer.render_prompt(whole)["prompt_token_ids"] == tokenizer.encode(whole)
