"""/tokenize and /detokenize, with the real model's tokenizer."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from cases import each

from diptych_frontend.openai.request_workers import INLINE_BYTES
from diptych_frontend.text.renderer import TextRenderer
from diptych_frontend.text.tokenizer import MANY_TOKENS, Tokenizer
from diptych_frontend.vllm_api.tokenization import PIECE, in_pieces

TEXT = "Once upon a time, in Zürich"
CHAT = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look_out"}}


@pytest.fixture
def http(engine: Any, text_renderer: TextRenderer, http: httpx.AsyncClient) -> httpx.AsyncClient:
    engine.renderer = text_renderer
    engine.model_config = SimpleNamespace(vocab_size=text_renderer.vocab_size)
    return http


async def ask(http: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    answer = await http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_text_becomes_tokens_and_a_text_again(
    http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    told = await ask(http, "/tokenize", model="echo", prompt=TEXT)
    ids = tokenizer.encode(TEXT)
    assert told == {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": None}
    assert await ask(http, "/detokenize", model="echo", tokens=ids) == {"prompt": TEXT}


async def test_tokens_are_named_as_the_vocabulary_writes_them(http: httpx.AsyncClient) -> None:
    told = await ask(http, "/tokenize", prompt="two words", return_token_strs=True)
    assert told["token_strs"] == ["two", "Ġwords"]


@pytest.mark.parametrize("wanted", [True, False, None])
async def test_special_tokens_come_unless_they_are_not_wanted(
    http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch, wanted: bool | None
) -> None:
    asked: list[Any] = []

    def tokenize(text: str, **options: Any) -> list[int]:
        asked.append((text, options))
        return [1]

    renderer = SimpleNamespace(tokenize=tokenize)
    monkeypatch.setattr(engine, "renderer", renderer)
    await ask(http, "/tokenize", prompt="a", add_special_tokens=wanted)
    assert asked == [("a", {"add_special_tokens": wanted is not False})]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"a": 1}},
        {
            "messages": [*CHAT, {"role": "assistant", "content": "It"}],
            "continue_final_message": True,
        },
    ],
)
async def test_a_chat_has_the_tokens_that_its_answer_would_be_given(
    http: httpx.AsyncClient, engine: Any, options: dict[str, Any]
) -> None:
    told = await ask(http, "/tokenize", **{"messages": CHAT, **options})
    chat = {"model": "echo", "messages": CHAT, "max_tokens": 1, **options}
    await ask(http, "/v1/chat/completions", **chat)
    [(_, _, _, prompt)] = engine.seen
    assert told["tokens"] == prompt["prompt_token_ids"]


async def test_special_tokens_stay_in_the_text(
    http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    text = "<|im_start|>user"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] in tokenizer.all_special_ids
    assert await ask(http, "/detokenize", tokens=ids) == {"prompt": text}


@each(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt"),
        ("/tokenize", {"prompt": ""}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, 400, "tools"),
        ("/tokenize", {"messages": CHAT, "tools": [TOOL]}, 400, "tools"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        (
            "/tokenize",
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "continue_final_message",
        ),
        (
            "/tokenize",
            {"prompt": "a", "continue_final_message": True},
            400,
            "continue_final_message",
        ),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": CHAT, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "media_io_kwargs": {"a": {}}}, 400, "media_io_kwargs"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * 2049}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, 404, "model"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_text_far_beyond_the_context_is_not_tokenised(
    http: httpx.AsyncClient, text_renderer: TextRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_renderer, "max_model_len", 100)
    assert (await ask(http, "/tokenize", prompt="a1 " * 200))["count"] > 100
    answer = await http.post("/tokenize", json={"prompt": "a1 " * 2000})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a " * INLINE_BYTES}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a " * INLINE_BYTES}]}),
        ("/detokenize", {"tokens": [5] * INLINE_BYTES}),
    ],
)
async def test_what_takes_long_is_done_beside_the_event_loop(
    http: httpx.AsyncClient,
    text_renderer: TextRenderer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    threads: set[int] = set()
    for name in ("tokenize", "render_chat", "decode"):
        call = getattr(text_renderer, name)

        def noted(*args: Any, call: Any = call, **options: Any) -> Any:
            threads.add(threading.get_ident())
            return call(*args, **options)

        monkeypatch.setattr(text_renderer, name, noted)
    await ask(http, path, **body)
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("count", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
def test_a_list_in_pieces_is_the_list(count: int) -> None:
    for values in (list(range(count)), [str(i) for i in range(count)]):
        assert json.loads(bytes(in_pieces(values))) == values


def test_many_tokens_are_decoded_like_few(tokenizer: Tokenizer) -> None:
    text = "Zürich 語 " * MANY_TOKENS
    ids = tokenizer.encode(text)
    assert len(ids) > MANY_TOKENS
    assert tokenizer.decode(ids) == text
