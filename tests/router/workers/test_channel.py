"""Questions and answers between two processes, here over a real socketpair in one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from waits import FOR_EVER_S, PATIENCE_S

from diptych_router.workers.channel import MAX_BYTES, AnswerTo, Channel, ChannelError


async def backwards(question: bytes) -> bytes:
    return question[::-1]


async def refuses(question: bytes) -> bytes:
    raise ValueError("no such question")


async def never(question: bytes) -> bytes:
    await asyncio.Event().wait()
    return b""


@contextlib.asynccontextmanager
async def channels(here: AnswerTo, there: AnswerTo) -> AsyncIterator[tuple[Channel, Channel]]:
    ends = socket.socketpair()
    pair = [
        await Channel.over(end, answer) for end, answer in zip(ends, (here, there), strict=True)
    ]
    running = [asyncio.create_task(channel.run()) for channel in pair]
    try:
        yield pair[0], pair[1]
    finally:
        for channel in pair:
            channel.close()
        await asyncio.wait(running, timeout=PATIENCE_S)


async def test_both_ends_ask_and_are_answered_whatever_the_order() -> None:
    async def slowly_first(question: bytes) -> bytes:
        if question == b"first":
            await asked_last.wait()
        else:
            asked_last.set()
        return question.upper()

    asked_last = asyncio.Event()
    async with channels(backwards, slowly_first) as (here, there):
        answers = await asyncio.gather(
            here.ask(b"first", PATIENCE_S), here.ask(b"last", PATIENCE_S),
            there.ask(b"abc", PATIENCE_S), there.ask(b"", PATIENCE_S),
            there.ask(bytes(1 << 20), PATIENCE_S),
        )  # fmt: skip
    assert list(answers) == [b"FIRST", b"LAST", b"cba", b"", bytes(1 << 20)]


async def test_who_cannot_answer_says_why() -> None:
    async with channels(backwards, refuses) as (here, there):
        with pytest.raises(ChannelError, match="no such question"):
            await here.ask(b"?", PATIENCE_S)
        assert await there.ask(b"still here", PATIENCE_S) == b"ereh llits"


async def test_an_answer_has_a_time_limit() -> None:
    async with channels(backwards, never) as (here, _):
        with pytest.raises(TimeoutError):
            await here.ask(b"?", 0.01)


async def test_the_end_of_one_side_fails_what_the_other_waits_for() -> None:
    async with channels(backwards, never) as (here, there):
        waiting = asyncio.create_task(here.ask(b"?", FOR_EVER_S))
        await asyncio.sleep(0)
        there.close()
        with pytest.raises(ChannelError, match="gone"):
            await asyncio.wait_for(waiting, PATIENCE_S)
        with pytest.raises(ChannelError, match="gone"):
            await here.ask(b"?", FOR_EVER_S)


async def test_a_message_that_is_too_long_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    channel = await Channel.over(ours, backwards)
    with theirs:
        theirs.sendall(struct.pack(">BII", 0, 1, MAX_BYTES + 1))
        with pytest.raises(ChannelError, match="at most"):
            await asyncio.wait_for(channel.run(), PATIENCE_S)
