"""A router learns what engines really remember, whatever befalls the messages that tell it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from chaos_kit.agreement import disagreements
from chaos_kit.bad_news import Mischief
from chaos_kit.campaign import Campaign, campaign
from chaos_kit.load import Load
from chaos_kit.service import PREFIX_AUTO, REST_S
from drawn_seed import drawn_seed
from waits import PATIENCE_S

from diptych_protocol.wire import PrefixChanges
from diptych_router.engines.known_prefixes import KnownPrefixes

pytestmark = pytest.mark.asyncio(loop_scope="module")
OFTEN = Mischief(lose=0.2, double=0.2, delay=0.2, forge=0.4)
LOST = Mischief(lose=0.3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chaos(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Campaign]:
    folder = tmp_path_factory.mktemp("chaos")
    names = ("prefill-0", "decode-0")
    async with campaign(folder, networked=False, names=names, steering=PREFIX_AUTO) as chaos:
        yield chaos


async def ask_amid(chaos: Campaign, mischief: Mischief, seed: int) -> None:
    """Some questions while this befalls the news; all of them are answered right."""
    chaos.service.news.begin(mischief, random.Random(seed))
    load = Load(lambda: chaos.service.router, chaos.asked, seed)
    for _ in range(4):
        load.burst(6)
        await load.settle(PATIENCE_S)
    await load.finish(PATIENCE_S)
    chaos.service.news.end()
    assert [str(fate) for fate in load.fates if fate.outcome != "answered" or fate.wrong] == []
    assert await chaos.service.at_rest(REST_S) == []


async def test_news_that_are_lost_doubled_late_or_forged_mislead_nobody_for_long(
    chaos: Campaign,
) -> None:
    await ask_amid(chaos, OFTEN, drawn_seed())
    assert sum(chaos.service.news.done.values()) > 0
    assert await disagreements(chaos.service) == []


async def test_a_router_that_ignores_gaps_is_found_out(
    chaos: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself: with this bug it fails, and the next router does without the bug.

    The bug hides the bound of an engine's blocks too: a router that misses what was removed counts
    too many, and the bound would make it ask for everything, which heals it."""

    take = KnownPrefixes.take

    def ignore(self: KnownPrefixes, engine: str, changes: PrefixChanges, most_blocks: int) -> bool:
        follower = self._follower(engine)
        if follower.number is not None and not changes.whole:
            follower.number, changes.digest = changes.number - 1, 0
        return take(self, engine, changes)

    with monkeypatch.context() as planted:
        planted.setattr(KnownPrefixes, "take", ignore)
        await ask_amid(chaos, LOST, 1)
        assert "the router does not know" in "; ".join(await disagreements(chaos.service, 5.0))
    chaos.service.close_router()
    chaos.service.open_router()
    await chaos.service.ready()
    assert await disagreements(chaos.service) == []
