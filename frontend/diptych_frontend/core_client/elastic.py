"""Changes the number of data-parallel cores while they serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from diptych_frontend.core_client.group import CoreGroup
from diptych_frontend.core_client.launcher import START_TIMEOUT_S
from diptych_frontend.core_client.member import CoreMember
from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDeadError,
    FinishReason,
    InvalidRequestError,
    ReconfigureDistributedRequest,
    ReconfigureRankType,
)
from diptych_protocol.engine_settings import MAX_RANKS

log = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 10.0
"""A core that was asked to end and has not done so after this time is killed."""


class Resizer:
    """Grows and shrinks one group, one change at a time."""

    def __init__(self, group: CoreGroup) -> None:
        self._group = group
        self._turn = asyncio.Lock()

    async def resize(self, size: int, drain_timeout_s: float) -> None:
        """Change the group to `size` cores.

        New cores get requests as soon as all of them can serve. Cores that leave get no more
        requests. Their present requests may end within `drain_timeout_s`; then the other cores take
        them over, with all tokens generated so far.

        Raises `InvalidRequestError` for an impossible size, and what `CoreMember.connect` raises if
        a new core does not start; the group is as before then.
        """
        if not 1 <= size <= MAX_RANKS:
            raise InvalidRequestError(
                f"new_data_parallel_size must be between 1 and {MAX_RANKS}, not {size}",
                param="new_data_parallel_size",
            )
        self._group.check_elastic()
        async with self._turn:
            members = self._group.members
            if size > len(members):
                await self._grow(size)
            elif size < len(members):
                await self._shrink(size, drain_timeout_s)

    async def _grow(self, size: int) -> None:
        members = self._group.members
        # Each is asked: what it last told of itself may be older than its answer to a pause.
        if any(await asyncio.gather(*(member.client.call("is_paused") for member in members))):
            raise InvalidRequestError("a paused or sleeping engine does not grow: resume it first")
        new = [self._group.start_member(rank, size) for rank in range(len(members), size)]
        for member in new:
            member.dismissed = True  # until it belongs to the group, its end is only our failure
        try:
            await asyncio.gather(*(member.connect(START_TIMEOUT_S) for member in new))
            for member in new:
                member.dismissed = False
                if (cause := member.process.ended()) is not None:
                    raise cause
        except BaseException:
            await asyncio.gather(*(_end(member) for member in new))
            raise
        members.extend(new)
        await self._announce(size)
        log.info("%d engine cores serve now", size)

    async def _shrink(self, size: int, drain_timeout_s: float) -> None:
        members = self._group.members
        leaving = members[size:]
        for member in leaving:
            member.leaving = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_timeout_s):
                    await asyncio.gather(*(member.emptied() for member in leaving))
            for member in leaving:
                await self._move_requests(member)
        except BaseException:
            for member in leaving:
                member.leaving = False
            raise
        del members[size:]
        await asyncio.gather(*(self._dismiss(member, size) for member in leaving))
        await self._announce(size)
        log.info("%d engine cores serve now", size)

    async def _move_requests(self, member: CoreMember) -> None:
        """Let the cores that stay go on with what a leaving one has."""
        if not member.open:
            return
        generated: dict[str, list[int]] = await member.client.call("surrender")
        for request_id, tokens in generated.items():
            request = member.open.pop(request_id, None)
            if request is None:
                continue  # it was aborted in the meantime
            if request.resumable:  # its earlier pieces are nowhere but in the core
                ended = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT)
                self._group.hand_over(EngineCoreOutputs(outputs=[ended]))
                continue
            self._group.add(
                msgspec.structs.replace(
                    request, data_parallel_rank=None, generated_token_ids=tokens or None
                )
            )
        log.info("rank %d gave %d requests away", member.rank, len(generated))
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            await member.emptied()  # what had ended before still has its last outputs on the way

    async def _dismiss(self, member: CoreMember, size: int) -> None:
        """Let a core end that has nothing left to do."""
        member.dismissed = True
        try:
            with contextlib.suppress(EngineDeadError):  # it may be gone before its answer has come
                await member.client.call(
                    "reinitialize_distributed",
                    _reconfigure(size, ReconfigureRankType.SHUTDOWN_CURRENT_RANK),
                    timeout_s=EXIT_TIMEOUT_S,
                )
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await member.process.wait()
        except (DiptychError, TimeoutError) as exc:
            log.warning("rank %d does not leave by itself: %s", member.rank, exc)
        finally:
            await _end(member)

    async def _announce(self, size: int) -> None:
        """Tell those that stay."""
        keep = _reconfigure(size, ReconfigureRankType.KEEP_CURRENT_RANK)
        await self._group.call_each("reinitialize_distributed", keep)


async def _end(member: CoreMember) -> None:
    member.disconnect()
    await asyncio.to_thread(member.stop)


def _reconfigure(size: int, rank: ReconfigureRankType) -> ReconfigureDistributedRequest:
    """There is no master: cores that do not step together need not find each other."""
    return ReconfigureDistributedRequest(size, rank, rank, "", 0)
