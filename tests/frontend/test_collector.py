"""The mailbox: a slow consumer reads the same as a quick one, in fewer messages."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waits import PATIENCE_S

from diptych_frontend.text.collector import Collector
from diptych_protocol import CompletionOutput, EngineGenerateError, Logprob, RequestOutput


def output(*answers: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], list(answers), finished)


def delta(index: int, number: int, *, last: bool = False) -> CompletionOutput:
    return CompletionOutput(
        index,
        f"<{index}.{number}>",
        [number, number + 1],
        -float(number),
        [{number: Logprob(-1.0, 1, "x")}],
        "stop" if last else None,
        number if last else None,
    )


@given(
    order=st.lists(st.integers(0, 2), min_size=1, max_size=25),
    reads=st.lists(st.booleans(), min_size=25, max_size=25),
)
def test_contract_B04_merged_deltas_add_up_to_all_sent(order: list[int], reads: list[bool]) -> None:
    collector = Collector()
    sent = [delta(index, number) for number, index in enumerate(order)]
    received: list[RequestOutput] = []
    for answer, read in zip(sent, reads, strict=False):
        collector.put(output(copy.deepcopy(answer)), delta=True)
        if read:
            taken = collector.take()
            assert taken is not None
            received.append(taken)
    last = collector.take()
    received += [last] if last else []
    for index in set(order):
        assert joined(sent, index) == joined(
            [answer for message in received for answer in message.outputs], index
        )


def joined(answers: list[CompletionOutput], index: int) -> tuple[Any, ...]:
    """All that the answers with this index say together."""
    mine = [answer for answer in answers if answer.index == index]
    return (
        "".join(answer.text for answer in mine),
        [token_id for answer in mine for token_id in answer.token_ids],
        [row for answer in mine for row in answer.logprobs or []],
        mine[-1].cumulative_logprob,
    )


def test_contract_B04_the_end_survives_a_merge() -> None:
    collector = Collector()
    collector.put(output(delta(0, 1)), delta=True)
    end = output(delta(0, 2, last=True), finished=True)
    end.num_cached_tokens, end.kv_transfer_params = 5, {"lease_id": "x"}
    collector.put(end, delta=True)
    merged = collector.take()
    assert merged is not None
    assert merged.finished
    assert (merged.outputs[0].finish_reason, merged.outputs[0].stop_reason) == ("stop", 2)
    assert (merged.num_cached_tokens, merged.kv_transfer_params) == (5, {"lease_id": "x"})
    assert collector.take() is None


def test_contract_B04_cumulative_outputs_replace_each_other_index_by_index() -> None:
    collector = Collector()
    for index, number in ((0, 1), (1, 2), (0, 3)):
        collector.put(output(delta(index, number)), delta=False)
    taken = collector.take()
    assert taken is not None
    assert {answer.index: answer.text for answer in taken.outputs} == {0: "<0.3>", 1: "<1.2>"}


async def test_get_waits_for_the_next_output() -> None:
    collector = Collector()
    waiting = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    collector.put(output(delta(0, 1)), delta=True)
    assert (await asyncio.wait_for(waiting, PATIENCE_S)).outputs[0].text == "<0.1>"


async def test_an_error_wakes_the_consumer_and_stays() -> None:
    collector = Collector()
    waiting = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    first = EngineGenerateError("first")
    collector.fail(first)
    collector.fail(EngineGenerateError("second"))
    collector.put(output(delta(0, 1)), delta=True)
    with pytest.raises(EngineGenerateError, match="first") as caught:
        await asyncio.wait_for(waiting, PATIENCE_S)
    assert caught.value is first
    with pytest.raises(EngineGenerateError, match="first"):
        collector.take()


async def test_a_cancelled_reader_loses_nothing() -> None:
    collector = Collector()
    waiting = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    waiting.cancel()
    collector.put(output(delta(0, 1)), delta=True)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await asyncio.wait_for(collector.get(), PATIENCE_S)).outputs[0].text == "<0.1>"


async def test_what_is_taken_at_once_wakes_nobody() -> None:
    collector: Collector[RequestOutput] = Collector()
    offered: list[RequestOutput] = []

    def take(output: RequestOutput) -> bool:
        offered.append(output)
        return len(offered) == 1

    collector.take_at_once = take
    early, first, second = (output(delta(0, number)) for number in range(3))
    collector.put(early)
    assert await collector.get() is early
    waits = asyncio.ensure_future(collector.get())
    await asyncio.sleep(0)
    collector.put(first)
    await asyncio.sleep(0)
    assert not waits.done()
    collector.put(second)
    assert await waits is second
    assert offered == [first, second]


async def test_an_error_of_who_takes_at_once_is_the_consumers() -> None:
    """One read serves all requests: the others go on."""
    collector: Collector[RequestOutput] = Collector()
    collector.take_at_once = lambda _: 1 // 0 == 0
    waits = asyncio.ensure_future(collector.get())
    await asyncio.sleep(0)
    collector.put(output(delta(0, 0)))
    with pytest.raises(ZeroDivisionError):
        await waits
