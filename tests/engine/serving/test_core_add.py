"""How requests come into a core: tokens that came with them, and defects of ours on the way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from engine_kit.core import CLIENT, core_request, generate, make_core, run, tokens

from diptych_engine.control.core import EngineCore
from diptych_kv_transfer.parameters import digest_of
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_protocol import FinishReason, KVTransferConfig, KVTransferParams
from diptych_protocol.wire import ErrorKind

PROMPT = [3, 1, 4, 1, 5]
MAX_LENGTH = 32


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    made = make_core(
        kv_transfer=KVTransferConfig(listen_host="127.0.0.1", load_timeout_s=2.0),
        max_model_len=MAX_LENGTH,
    )
    yield made
    made.close()


_lives = itertools.count(30.0)
"""How long references are good: each is another one."""


def prefilled(prompt: list[int], first: list[int], **params: Any) -> Any:
    """A hand-off by a router that leaves it to decode to tell of the first tokens."""
    lease = KVTransferParams(
        do_remote_prefill=True, remote_engine_id="p", remote_host="127.0.0.1", remote_port=1,
        remote_num_tokens=len(prompt), lease_id="00", epoch="e", compat="c",
        remote_block_ids=[[0] * -(-len(prompt) // 16)], first_token_ids=first,
        tokens_digest=digest_of(prompt, None),
    )  # fmt: skip
    signed = References(PUBLIC_KEY).sign(lease, next(_lives)).to_dict()
    return core_request("r", prompt, extra_args={"kv_transfer_params": signed}, **params)


@pytest.mark.parametrize(
    ("prompt", "first", "params", "told", "reason"),
    [
        (PROMPT, [7], {"max_tokens": 1}, [7], FinishReason.LENGTH),
        (PROMPT, [7, 8, 9], {"max_tokens": 2}, [7, 8], FinishReason.LENGTH),
        (PROMPT, [7], {"max_tokens": 9, "stop_token_ids": [7]}, [7], FinishReason.STOP),
        (PROMPT, [7], {"max_tokens": 9, "eos_token_id": 7}, [7], FinishReason.STOP),
        ([2] * (MAX_LENGTH - 1), [7], {"max_tokens": None}, [7], FinishReason.LENGTH),
    ],
    ids=["just enough", "more than enough", "stop token", "end of text", "the context is full"],
)
def test_what_prefill_has_sampled_may_be_all_that_was_wanted(
    core: EngineCore, prompt: list[int], first: list[int], params: dict[str, Any],
    told: list[int], reason: FinishReason,
) -> None:  # fmt: skip
    outputs = run(core, prefilled(prompt, first, **params))["r"]
    assert (tokens(outputs), outputs[-1].finish_reason) == (told, reason)
    assert not core.scheduler.requests, "nothing is fetched, let alone computed"


def test_one_token_less_is_not_the_end(core: EngineCore) -> None:
    core.add(prefilled(PROMPT, [7], max_tokens=2), CLIENT)
    assert not core.take_outputs()[CLIENT], "it is told when the KV has come"
    assert core.scheduler.requests.keys() == {"r"}
    core.abort(["r"])
    assert core.take_outputs()[CLIENT][-1].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("place", ["scheduler.can_add", "grammars.begin", "scheduler.add"])
def test_a_defect_of_ours_costs_one_request_its_answer(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    usual = generate(core, PROMPT, max_tokens=4)
    part, _, method = place.partition(".")

    def defective(*args: Any) -> bool:
        raise KeyError("a defect")

    with monkeypatch.context() as broken:
        broken.setattr(type(getattr(core, part)), method, defective)
        core.add(core_request("unlucky", PROMPT), CLIENT)
    [last] = core.take_outputs()[CLIENT]
    assert (last.request_id, last.finish_reason) == ("unlucky", FinishReason.ERROR)
    assert "internal error" in str(last.error)
    assert "defect" not in str(last.error), "what went wrong is for the log"
    assert not core.scheduler.requests
    assert generate(core, PROMPT, max_tokens=4) == usual


def test_a_tenant_with_many_requests_shuts_nobody_else_out() -> None:
    """The newest of who has most is refused instead, as overload, and keeps nothing here."""
    core = make_core(max_num_seqs=1, max_num_waiting=4)
    for number in range(5):
        core.add(core_request(f"g{number}", PROMPT, max_tokens=40, tenant="greedy"), CLIENT)
        core.finish_step(*core.start_step())
    core.take_outputs()
    core.add(core_request("o", PROMPT, max_tokens=4, tenant="other"), CLIENT)
    core.add(core_request("g5", PROMPT, max_tokens=4, tenant="greedy"), CLIENT)
    refused = {output.request_id: output for output in core.take_outputs()[CLIENT]}
    assert refused.keys() == {"g4", "g5"}
    assert all(output.error_kind is ErrorKind.OVERLOADED for output in refused.values())
    assert "API key" in str(refused["g4"].error)
    assert core.scheduler.requests.keys() == {"g0", "g1", "g2", "g3", "o"}
    core.close()


@pytest.mark.parametrize("name", ["tenant", "session"])
def test_names_are_bounded(core: EngineCore, name: str) -> None:
    core.add(core_request("r", PROMPT, max_tokens=4, **{name: "t" * 257}), CLIENT)
    [last] = core.take_outputs()[CLIENT]
    assert f"{name} may have at most 256 characters" in str(last.error)
    assert not core.scheduler.requests


@pytest.mark.parametrize("pin_s", [-1, 3601])
def test_how_long_kv_is_kept_is_bounded(core: EngineCore, pin_s: int) -> None:
    core.add(core_request("r", PROMPT, max_tokens=4, pin_s=pin_s), CLIENT)
    [last] = core.take_outputs()[CLIENT]
    assert "pin_s must be 0 to 3600" in str(last.error)
    assert not core.scheduler.requests


@pytest.mark.parametrize("deadline_ms", [-1, 600_001])
def test_a_deadline_is_bounded(core: EngineCore, deadline_ms: int) -> None:
    core.add(core_request("r", PROMPT, max_tokens=4, deadline_ms=deadline_ms), CLIENT)
    [last] = core.take_outputs()[CLIENT]
    assert "deadline_ms must be 0 to 600000" in str(last.error)
    assert not core.scheduler.requests
