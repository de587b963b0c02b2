"""n > 1: a prompt is computed and shipped once, whatever becomes of the answer that goes ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_kit.handoff import BLOCK, Engine, LocalRouter, engines, prompt_of, request, save_toy

N = 4
LENGTH = 38
SEVERAL: dict[str, Any] = {"n": N, "temperature": 1.5, "seed": 1, "max_tokens": 8}


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    model = save_toy(tmp_path_factory.mktemp("toy") / "model")
    with engines(model, alone={}, p0={}, p1={}, d0={}, d1={}) as made:
        yield made


@pytest.fixture
def router(five: list[Engine]) -> LocalRouter:
    """Two engines in each pool, which remember nothing."""
    for engine in five:
        engine.forget_prefixes()
    return LocalRouter(None, prefill=five[1:3], decode=five[3:])


def answers(router: LocalRouter, seed: int, **fields: Any) -> dict[int, list[int]]:
    [outputs] = router.run(request("n", prompt_of(seed, LENGTH), **{**SEVERAL, **fields}))
    return {answer.index: answer.token_ids for output in outputs for answer in output.outputs}


@pytest.mark.parametrize(
    "ahead",
    [{}, {"stop_token_ids": list(range(64))}, {"max_tokens": 1}, {"max_tokens": 2}],
    ids=["decodes", "ends in prefill", "wants one token", "wants two"],
)
def test_a_prompt_is_computed_and_shipped_once_for_all_answers(
    five: list[Engine], router: LocalRouter, ahead: dict[str, Any]
) -> None:
    alone, *pools = five
    computed = [engine.prompt_tokens_computed for engine in pools]
    sent = [engine.hinge.blocks_sent for engine in pools]
    fields = {"ignore_eos": True, **ahead}
    assert answers(router, 1, **fields) == answers(LocalRouter(None, decode=[alone]), 1, **fields)
    computed = [e.prompt_tokens_computed - c for e, c in zip(pools, computed, strict=True)]
    sent = [e.hinge.blocks_sent - s for e, s in zip(pools, sent, strict=True)]
    assert sum(computed) <= LENGTH + (N - 1) * BLOCK
    assert sum(sent) <= -(-LENGTH // BLOCK) + (N - 1)
    assert sorted(computed)[:3] == [0, 0, 0], "one engine computes, and it is one of prefill"


@pytest.mark.parametrize("turns", range(0, 16, 3))
def test_the_others_go_on_when_the_one_ahead_is_gone(router: LocalRouter, turns: int) -> None:
    """Its line is lost at some moment: it begins again, and nobody waits for it for ever."""
    collector = router.send(request("n", prompt_of(2, LENGTH), ignore_eos=True, **SEVERAL))
    ahead = router.table.requests[collector.request_ids[0]]
    for _ in range(turns):
        router.turn()
    router.lose(ahead.engine)
    router.until(lambda: not router.table.requests)
    router.settle()


def test_the_others_go_on_when_the_one_ahead_is_withdrawn_alone(router: LocalRouter) -> None:
    collector = router.send(request("n", prompt_of(3, LENGTH), ignore_eos=True, **SEVERAL))
    first, *others = collector.request_ids
    router.withdraw([first])
    assert set(router.table.requests) == set(others)
    router.fleet_changed()
    router.until(lambda: not router.table.requests)
    router.settle()


def test_all_can_be_withdrawn_while_they_wait(router: LocalRouter) -> None:
    collector = router.send(request("n", prompt_of(3, LENGTH), ignore_eos=True, **SEVERAL))
    router.abandon(collector)
    assert not router.table.requests
    router.fleet_changed()
    router.settle()
