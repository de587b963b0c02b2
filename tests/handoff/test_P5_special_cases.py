"""P5 at the edges: the shortest answers, too little room, adapters that are not there, and routers
that know the public vocabulary only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from engine_kit.core import tokens
from engine_kit.handoff import Engine, LocalRouter, drive, engines, prompt_of, request, save_toy
from model_kit.checkpoints import save_adapter

from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineGenerateError,
    FinishReason,
    LoRARequest,
    StructuredOutputsParams,
)

LONG = {"max_tokens": 20, "ignore_eos": True}
FORM = {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3,8}-[0-9]{2}")}


@dataclass
class Toy:
    model: str
    adapter: LoRARequest
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    root = tmp_path_factory.mktemp("toy")
    model = save_toy(root / "model")
    adapter = LoRARequest("one", 1, save_adapter(root / "one", 1, rank=2))
    tokenizer = load_tokenizer(resolve_model(model))
    assert tokenizer is not None
    return Toy(model, adapter, tokenizer)


@pytest.fixture(scope="module")
def alone(toy: Toy) -> Iterator[Engine]:
    with engines(toy.model, alone={}) as [engine]:
        yield engine


@pytest.fixture(scope="module")
def pair(toy: Toy) -> Iterator[list[Engine]]:
    with engines(toy.model, prefill={"max_num_batched_tokens": 16}, decode={}) as made:
        yield made


def told(toy: Toy, router: LocalRouter, *messages: EngineCoreRequest) -> list[Any]:
    """The answers to each request: tokens, text, and how it ended."""
    answers = []
    for outputs in router.run(*messages):
        last = {answer.index: answer for output in outputs for answer in output.outputs}
        answers.append(
            [
                (index, a.token_ids, a.text, a.finish_reason, a.stop_reason)
                for index, a in sorted(last.items())
            ]
        )
    return answers


# --- the shortest answers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "crosses"),
    [
        ({"max_tokens": 10, "logit_bias": {0: 100.0}}, False),
        ({"max_tokens": 10, "stop_token_ids": list(range(64))}, False),
        ({"max_tokens": 1, "ignore_eos": True}, False),
        ({"max_tokens": 10, "min_tokens": 2, "logit_bias": {0: 100.0}}, True),
        ({"max_tokens": 2, "ignore_eos": True}, True),
    ],
    ids=[
        "the end comes first",
        "a stop token comes first",
        "one token",
        "the end comes third",
        "two",
    ],
)
def test_P5_an_answer_that_ends_with_its_first_token_is_not_handed_off(
    toy: Toy, alone: Engine, pair: list[Engine], params: dict[str, Any], crosses: bool
) -> None:
    message = request("short", prompt_of(1, 38), **params)
    prefill, decode = pair
    granted = prefill.hinge.leases_granted
    router = LocalRouter(toy.tokenizer, prefill=[prefill], decode=[decode])
    assert told(toy, router, message) == told(
        toy, LocalRouter(toy.tokenizer, decode=[alone]), message
    )
    assert prefill.hinge.leases_granted - granted == crosses


# --- too little room ------------------------------------------------------------------------------


def neighbors(adapter: LoRARequest) -> list[EngineCoreRequest]:
    return [
        request("plain", prompt_of(1, 18), **LONG),
        request("urgent", prompt_of(2, 25), priority=-1, **LONG),
        request("adapter", prompt_of(1, 18), lora_request=adapter, **LONG),
        request("salted", prompt_of(1, 18), cache_salt="salt", priority=1, **LONG),
        request("two", prompt_of(4, 30), n=2, temperature=1.0, seed=4, top_p=0.9, **LONG),
        request("form", prompt_of(5, 12), max_tokens=20, **FORM),
        request("penalties", prompt_of(6, 21), frequency_penalty=1.5, priority=1, **LONG),
    ]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("remembers", [True, False], ids=["prefix cache", "no prefix cache"])
def test_P5_requests_that_lose_their_blocks_on_either_side_answer_the_same(
    toy: Toy, alone: Engine, policy: str, remembers: bool
) -> None:
    messages = neighbors(toy.adapter)
    expected = [
        told(toy, LocalRouter(toy.tokenizer, decode=[alone]), message)[0] for message in messages
    ]
    common = {"scheduling_policy": policy, "enable_prefix_caching": remembers, "max_model_len": 64}
    narrow = {"num_blocks": 19, "max_num_batched_tokens": 12, **common}
    with engines(toy.model, prefill=narrow, decode={"num_blocks": 22, **common}) as made:
        prefill, decode = made
        router = LocalRouter(toy.tokenizer, prefill=[prefill], decode=[decode])
        for name in ("its own", "its second"):
            prefill.core.add(request(name, prompt_of(9, 5), max_tokens=40, ignore_eos=True), b"me")
        assert told(toy, router, *messages) == expected
        assert prefill.core.stats().num_preemptions > 0
        assert decode.core.stats().num_preemptions > 0


# --- adapters -------------------------------------------------------------------------------------


def test_P5_an_adapter_that_decode_does_not_have_is_refused_and_prefill_freed(toy: Toy) -> None:
    with engines(toy.model, prefill={}, decode={"max_loras": 0}) as (prefill, decode):
        router = LocalRouter(toy.tokenizer, prefill=[prefill], decode=[decode])
        with pytest.raises(EngineGenerateError, match="adapter"):
            router.run(request("r", prompt_of(1, 30), lora_request=toy.adapter, **LONG))
        router.settle()
        assert prefill.hinge.leases_granted == prefill.hinge.leases_revoked > 0
        [[outputs]] = [router.run(request("r", prompt_of(1, 30), **LONG))]
        assert outputs[-1].finished, "others are served"


# --- somebody else's router -----------------------------------------------------------------------


def foreign(
    pair: list[Engine], name: str, prompt: list[int], **params: Any
) -> tuple[list[EngineCoreOutput], list[EngineCoreOutput]]:
    """What P and D answer to a proxy that passes `kv_transfer_params` on as they are."""
    prefill, decode = pair
    asked = {"kv_transfer_params": {"do_remote_decode": True}}
    first = request(f"{name}-p", prompt, **{**params, "max_tokens": 1, "extra_args": asked})
    at_prefill = drive(prefill, first)
    lent = at_prefill[-1].kv_transfer_params
    if lent is None:
        return at_prefill, at_prefill  # it is over
    second = request(f"{name}-d", prompt, **params, extra_args={"kv_transfer_params": lent})
    return at_prefill, drive(decode, second, prefill)


FOREIGN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "form": FORM,
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
    "bad words": {"bad_words_token_ids": [[9], [10, 11]]},
    "logprobs": {"logprobs": 2},
    "prompt logprobs": {"prompt_logprobs": 2},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "a stop token": {"stop_token_ids": list(range(20, 64))},
}


@pytest.mark.parametrize("length", [30, 32], ids=["partial block", "full blocks"])
@pytest.mark.parametrize("case", FOREIGN)
def test_P5_a_router_that_knows_the_public_vocabulary_gets_the_same_answer(
    toy: Toy, alone: Engine, pair: list[Engine], case: str, length: int
) -> None:
    params = {"max_tokens": 12, **FOREIGN[case]}
    name, prompt = f"{case}-{length}", prompt_of(8, length)
    for engine in (alone, *pair):
        engine.forget_prefixes()
    expected = drive(alone, request(name, prompt, **params))
    computed = pair[1].prompt_tokens_computed
    at_prefill, at_decode = foreign(pair, name, prompt, **params)
    assert tokens(at_decode) == tokens(expected)
    assert at_decode[-1].finish_reason == expected[-1].finish_reason
    if "logprobs" in params:
        assert rows(at_decode) == rows(expected)
    if "prompt_logprobs" in params:
        assert at_prefill[0].new_prompt_logprobs_tensors is not None, "they are P's to tell"
    assert pair[1].prompt_tokens_computed - computed <= 1
    LocalRouter(None, prefill=[pair[0]], decode=[pair[1]]).settle()


def rows(outputs: list[EngineCoreOutput]) -> list[Any]:
    """Which tokens' log-probabilities were told, one entry a token."""
    told = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    return [sorted(row) for lists in told for row in lists.logprob_token_ids]


def test_P5_a_prompt_in_pieces_is_refused_by_name(pair: list[Engine]) -> None:
    """Its KV would have to be kept for pieces to come, on an engine that hands its KV on."""
    asked = {"kv_transfer_params": {"do_remote_decode": True}}
    piece = request("pieces", prompt_of(1, 9), max_tokens=1, extra_args=asked)
    [output] = drive(pair[0], msgspec.structs.replace(piece, resumable=True))
    assert output.finish_reason is FinishReason.ERROR
    assert "kv_transfer_params" in (output.error or "")
