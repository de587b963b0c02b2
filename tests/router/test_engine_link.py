"""What a router makes of what an engine says of itself."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from diptych_protocol import EngineCoreOutputs, EngineDeadError, EngineDescription, SchedulerStats
from diptych_router.engines.engine_link import EngineLink
from diptych_router.engines.engine_table import EngineTable

DESCRIPTION = EngineDescription(
    engine_id="d", epoch="e", model="m", max_model_len=64, vocab_size=8, block_size=16,
    num_blocks=4, dtype="float32", compat={}, max_num_seqs=1, pid=1,
)  # fmt: skip


def statistics(*, draining: bool) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[], scheduler_stats=SchedulerStats(draining=draining))


@pytest_asyncio.fixture
async def reached() -> AsyncIterator[EngineLink]:
    made = EngineLink(
        "decode", "tcp://127.0.0.1:1", EngineTable().add("decode", 0), "", lambda: None,
        read_keys=None, on_outputs=lambda *_: None, on_lost=lambda *_: None,
        on_hang=lambda _: None,
    )  # fmt: skip
    yield made
    made.close()


async def test_an_engine_that_is_lost_lends_no_prefixes(reached: EngineLink) -> None:
    reached.description = DESCRIPTION
    reached.row["usable"] = reached.row["lends"] = True
    reached._handle_lost(EngineDeadError("gone"))
    assert (reached.row["usable"], reached.row["lends"]) == (False, False)


async def test_an_engine_that_drains_is_never_taken_for_one_that_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    news: list[bool] = []

    def hear() -> None:
        news.append(link.stats.draining)
        raise ValueError("a mistake of whoever listens")

    link = EngineLink(
        "decode", "tcp://127.0.0.1:1", EngineTable().add("decode", 0), "", hear,
        read_keys=None, on_outputs=lambda *_: None, on_lost=lambda *_: None,
        on_hang=lambda _: None,
    )  # fmt: skip
    try:
        link.description = DESCRIPTION
        assert link.open_to_work
        for draining in (False, True, False, True):
            link._handle_outputs(statistics(draining=draining))
        assert not link.open_to_work
        assert news == [True]
        assert "went unheard" in caplog.text
    finally:
        link.close()
