"""P4: whatever a peer sends, the hinge decides about it and lives on.

`DIPTYCH_TEST_MESSAGES` says how many mutated messages there are; `make chaos` sends a million.
Their seed is printed, and `DIPTYCH_TEST_SEED` gives it back.
"""

from __future__ import annotations

import os
import random

from chaos_kit.hostile_bytes import control_messages, mutated
from drawn_seed import drawn_seed

from diptych_kv_transfer.tables.actions import Address, Connected, PeerLost, PrefixAsked, Received
from diptych_kv_transfer.tables.hinge import Hinge
from diptych_kv_transfer.tables.leases import LeaseTable
from diptych_kv_transfer.tables.loads import LoadTable
from diptych_kv_transfer.tables.messages import Hello, encode

MESSAGES = int(os.environ.get("DIPTYCH_TEST_MESSAGES", "10000"))


def test_P4_the_hinge_decides_about_any_bytes_without_raising() -> None:
    """The pure part alone, in whatever state the messages before have left it."""
    rng = random.Random(drawn_seed())
    me = Hello("me", "epoch", {"dtype": "float32"})
    hinge = Hinge(me, LeaseTable(5.0), LoadTable(me, 5.0))
    there: Address = ("10.0.0.1", 5)
    peer, now = 0, 0.0
    for number in range(MESSAGES):
        if number % 50 == 0:
            hinge.handle(PeerLost(peer), now)
            peer += 1
            hinge.handle(Connected(peer, rng.choice([None, there])), now)
            hinge.handle(Received(peer, encode(Hello("you", "e", {}))), now)
        payload = encode(rng.choice(control_messages(rng)))
        data = payload if rng.random() < 0.3 else mutated(payload, rng)
        for action in hinge.handle(Received(peer, data), now):
            if isinstance(action, PrefixAsked):
                blocks = list(range(rng.randrange(len(action.names) + 1)))
                hinge.leases.lend_prefix(action.lease_id, blocks, b"last", now)
        now += rng.random() * 0.01
        hinge.tick(now)
    hinge.handle(PeerLost(peer), now)
    assert not hinge.leases.leases
    assert not hinge.loads.loads
