"""Whether a router knows what each engine really remembers.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np
from chaos_kit.service import Engine, Service

from diptych_protocol import EngineDeadError
from diptych_protocol.wire import PrefixChanges
from diptych_router.engines.block_holders import Keys
from diptych_router.requests.pool_client import PoolClient

AGREE_S = 30.0
"""Until an engine has repeated its last number, was asked anew, and that again if this is lost."""


def held_by(router: PoolClient, key: str) -> Keys:
    """The keys of the blocks that a router takes an engine to remember, in order."""
    known = router.pools.fleet.known
    held, place = known.index.held, known.place(key)
    values = held._table.values
    numbers, at = np.unique(values[values > 0], return_inverse=True)
    has = np.array([held._sets.bits[int(number)] >> place & 1 for number in numbers], bool)
    return np.sort(held._table.keys()[has[at]])


def difference(router: PoolClient, engine: Engine, truth: PrefixChanges) -> str:
    """What a router has wrong about an engine that remembers this; empty if it has nothing."""
    links = router.pools.links.items()
    key = next(key for key, link in links if link.endpoint.endswith(engine.address))
    really, held = np.unique(np.frombuffer(truth.added, "<u8")), held_by(router, key)
    missing, invented = np.setdiff1d(really, held), np.setdiff1d(held, really)
    wrong = []
    if len(missing) or len(invented):
        wrong.append(
            f"does not know {len(missing)} of {len(really)} blocks and invents {len(invented)}"
        )
    if router.pools.fleet.known.adapters(key) != truth.adapters:
        wrong.append("is wrong about the adapters")
    return f"the router {' and '.join(wrong)} of {engine.name}" if wrong else ""


async def disagreements(service: Service, within_s: float = AGREE_S) -> list[str]:
    """Wait until the router knows what engines without requests remember; what it has wrong after
    that time. A router that does not follow them has nothing wrong."""
    if service.router is None or not service.steering.follows:
        return []
    deadline = time.monotonic() + within_s
    open_: Sequence[Engine] = service.engines
    wrong: list[str] = []
    while open_:
        try:
            found = [(x, difference(service.router, x, await x.remembered())) for x in open_]
        except (EngineDeadError, TimeoutError) as exc:
            return [f"an engine does not say what it remembers: {exc}"]
        open_, wrong = [x for x, why in found if why], [why for _, why in found if why]
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1 if open_ else 0.0)
    return wrong
