"""A process that takes the place of a verified one: whether streams wait for its canary."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import pytest
from engine_kit.fake_core import FakeCore, description, failed, said
from free_ports import free_port

from diptych_protocol import EngineCoreOutputs, KVTransferStats, RouterConfig, SchedulerStats, wire
from diptych_protocol.wire import FOLLOW_PREFIXES, PrefixChanges
from diptych_router.engines.discovery import Target
from diptych_router.engines.engine_link import EngineLink
from diptych_router.engines.engine_table import ROLES, Role
from diptych_router.requests.pools.pools import Pools

LEASE = {"do_remote_prefill": True, "remote_engine_id": "prefill"}


def core(target: Target, role: Role, **changes: Any) -> FakeCore:
    about = {"engine_id": role, "epoch": role, "kv_transfer": True, **changes}
    return FakeCore(
        f"tcp://{target[0]}:{target[1]}",
        describe=msgspec.to_builtins(msgspec.structs.replace(description("m"), **about)),
        stats=SchedulerStats(kv_transfer=KVTransferStats()),
        reject_kv_transfer=None,
    )


async def let_cross(prefill: FakeCore, decode: FakeCore) -> None:
    """Answer their first canary."""
    [asked] = await prefill.added(1)
    output = said(asked, 7, ends=True)
    output.kv_transfer_params = LEASE
    await prefill.tell(output)
    [asked] = await decode.added(1)
    decode.answers["stats"] = SchedulerStats(kv_transfer=KVTransferStats(blocks_received=3))
    output = said(asked, 7, 7, 7, ends=True)
    output.num_received_tokens = len(asked.prompt_token_ids or ())
    await decode.tell(output)


class Router:
    """Two pools of one engine each, of which the decode engine may be started again."""

    def __init__(self) -> None:
        self.targets: dict[Role, list[Target]] = {x: [("127.0.0.1", free_port())] for x in ROLES}
        self.prefill, self.decode = (core(self.targets[role][0], role) for role in ROLES)
        connect = partial(
            EngineLink, read_keys=None, on_outputs=self._hear, on_lost=lambda *_: None,
            on_hang=lambda _: None,
        )  # fmt: skip
        self.pools = Pools(RouterConfig(model="m"), self.targets, connect, None, lambda: None)
        self.pools.start()

    def _hear(self, link: EngineLink, message: EngineCoreOutputs) -> None:
        if message.prefix_changes is not None:
            self.pools.take_prefixes(link, message.prefix_changes)

    @property
    def link(self) -> EngineLink:
        [link] = self.pools.of("decode")
        return link

    async def start_decode_again(self, eventually: Any, **changes: Any) -> None:
        await self.decode.close()
        await eventually(lambda: not self.pools.of("decode"))
        self.decode = core(self.targets["decode"][0], "decode", **changes)
        await eventually(lambda: self.decode.calls(FOLLOW_PREFIXES))

    async def tell_prefixes(self) -> None:
        news = EngineCoreOutputs(prefix_changes=PrefixChanges(0, whole=True))
        await self.decode.send(*wire.encoder.encode(news))


@contextlib.asynccontextmanager
async def verified(eventually: Any) -> AsyncIterator[Router]:
    router = Router()
    try:
        await asyncio.gather(
            let_cross(router.prefill, router.decode), eventually(lambda: router.pools.canaries)
        )
        assert router.pools.verified(router.link)
        yield router
    finally:
        router.pools.close()
        await router.prefill.close()
        await router.decode.close()


async def test_it_serves_once_it_has_told_what_is_left_and_until_its_canary_fails(
    eventually: Any,
) -> None:
    async with verified(eventually) as router:
        await router.start_decode_again(eventually, epoch="2")
        assert not router.pools.usable(router.link), "its KV is not known yet"
        await router.tell_prefixes()
        await eventually(lambda: router.pools.usable(router.link))
        assert not router.pools.verified(router.link)
        assert router.link.row["usable"]
        [_, asked] = await router.prefill.added(2)
        assert router.pools.usable(router.link)
        await router.prefill.tell(failed(asked, "broken"))
        await eventually(lambda: not router.link.row["usable"])
        # What follows one that was not verified is not trusted either.
        await router.start_decode_again(eventually, epoch="3")
        await router.tell_prefixes()
        await router.prefill.added(3)
        assert not router.pools.usable(router.link)


@pytest.mark.parametrize("change", [{"engine_id": "another"}, {"compat": {"revision": "2"}}])
async def test_another_engine_at_the_address_proves_itself_first(
    change: dict[str, Any], eventually: Any
) -> None:
    async with verified(eventually) as router:
        await router.start_decode_again(eventually, epoch="2", **change)
        await router.tell_prefixes()
        await eventually(lambda: router.pools.fleet.known.has_told(router.link.key))
        assert not router.pools.usable(router.link)
