"""The invariants of the request table, whatever happens in whatever order."""

from __future__ import annotations

from copy import copy
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_kit.request_world import World

from diptych_protocol import (
    EngineCoreOutput,
    FinishReason,
)
from diptych_protocol.wire import ErrorKind
from diptych_router.engines.engine_table import ROLES, Role
from diptych_router.requests import placements
from diptych_router.requests.attempts import LEAST_PATIENCE_S
from diptych_router.requests.records import MOST_PLACEMENTS
from diptych_router.requests.request_record import RequestRecord
from diptych_router.telling.request_spans import spans_of

HISTORIES = pytest.mark.parametrize("histories", [40, pytest.param(400, marks=pytest.mark.slow)])


@HISTORIES
def test_the_invariants_hold_whatever_happens(histories: int) -> None:
    play_many(histories, [""])


@HISTORIES
def test_the_invariants_hold_for_several_tenants(
    histories: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placements, "MAX_PLACED", 2)
    play_many(histories, ["a", "a", "a", "b", "c"])


def play_many(histories: int, tenants: list[str]) -> None:
    @settings(max_examples=histories)
    @given(st.integers(0, 2**32 - 1))
    def holds(seed: int) -> None:
        play(seed, tenants)

    holds()


def play(seed: int, tenants: list[str]) -> None:
    """A random history of a small service; then nothing bad happens any more, and all ends."""
    random = Random(seed)
    world = World("p1", "p2", "d1", "d2")
    for step in range(60):
        world.now += 1.0
        happen(world, random, step, random.choice(tenants))
        assert {core_id for _, core_id in world.placements()} >= {
            routed.core_id for routed in world.table.requests.values() if routed.engine
        }
    for key in world.fleet.engines:
        role: Role = "prefill" if key[0] == "p" else "decode"
        world.change(key, up=True, withdrawn=False, silent=False, role=role)
    for step in range(200):
        if not world.placements():
            break
        progress(world, random, f"end-{step}")
    world.check_end()
    for record in world.table.records:
        check_record(record, world)


def check_record(record: RequestRecord, world: World) -> None:
    """It says what users have seen, and the spans that are read from it are a tree in time."""
    assert record.ended_s is not None
    assert record.tokens.total == len(world.delivered[record.request_id])
    assert bool(record.error) == (world.ended[record.request_id] == "failed")
    assert (record.first_token_s is None) == (record.tokens.total == 0)
    placements = [placement for attempt in record.attempts for placement in attempt.placements]
    if record.num_placements < MOST_PLACEMENTS:
        assert sum(placement.num_tokens for placement in placements) == record.tokens.total
    spans = list(spans_of(record, record.began_s, {}))
    ended: dict[str, float] = {}
    """When the newest child of each span ended."""
    by_key = {span.key: span for span in spans}
    assert len(by_key) == len(spans)
    for span in spans:
        assert span.began_s <= span.ended_s
        if span.parent is not None:
            parent = by_key[span.parent]
            assert parent.began_s <= span.began_s <= span.ended_s <= parent.ended_s
            assert ended.get(span.parent, 0.0) <= span.began_s
            ended[span.parent] = span.ended_s


def happen(world: World, random: Random, step: int, tenant: str) -> None:
    """One event."""
    engine = random.choice(list(world.fleet.engines))
    link = world.fleet.engines[engine]
    match random.randrange(16):
        case 0 | 1 if step < 40:
            ahead = random.choice([None, *world.delivered])
            world.submit(f"r{step}", ahead, tenant, max_tokens=random.choice([1, 2, 5]))
        case 2 if world.delivered:
            world.leave(random.choice(list(world.delivered)))
        case 3 if link.up:
            world.lose(engine)
        case 4 if link.up:
            link.up, link.open, link.announced = False, {}, {}  # gone, and nobody has noticed yet
            world.carry_out(world.table.engine_lost(engine, "silent", world.now))
        case 5:
            world.change(engine, up=True, withdrawn=random.random() < 0.3)
        case 6 if world.wake_at:
            world.now = max(world.now, world.wake_at.pop(0))
            world.carry_out(world.table.tick(world.now))
        case 7 if world.asked:
            asked = world.asked.pop()
            world.carry_out(world.table.cannot_hand_off(asked.core_id, "no", world.now))
        case 8 if link.up:
            world.say(engine, EngineCoreOutput(f"r{random.randrange(40)}/0", [999],
                                               kv_transfer_params=None))  # fmt: skip
        case 9 if link.up:
            world.hang(engine)
        case 10:
            link.silent = False
        case 11 if random.random() < 0.3:
            world.look_for_late_ones(world.now + 2 * LEAST_PATIENCE_S)
        case 12:
            world.change(engine, role=random.choice(ROLES))
        case _:
            progress(world, random, f"L{step}", faults=True)


def progress(world: World, random: Random, lease: str, *, faults: bool = False) -> None:
    """Some engine says something about one of its requests."""
    placements = world.placements()
    if not placements:
        return
    engine, core_id = random.choice(placements)
    request = world.fleet.engines[engine].open[core_id]
    wants_lease = bool((request.sampling.extra_args or {}).get("kv_transfer_params", {}).get(
        "do_remote_decode"))  # fmt: skip
    left = (request.sampling.max_tokens or 0) - len(world.delivered[core_id.partition("/")[0]])
    fault = random.randrange(8) if faults else 7
    if fault == 0:
        kind = random.choice(list(ErrorKind))
        output = EngineCoreOutput(
            core_id, [], finish_reason=FinishReason.ERROR, error="no", error_kind=kind
        )
        if random.random() < 0.2:
            output.kv_transfer_params = {"lease_id": lease}
    elif fault == 1:
        output = EngineCoreOutput(core_id, [], finish_reason=FinishReason.ABORT)
    elif fault == 2 and engine[0] == "d":
        output = world.answer(core_id, FinishReason.ABORT, tokens=0, lease=lease)
    elif fault == 3:
        output = world.answer(core_id, FinishReason.STOP, lease=lease)
    elif wants_lease:
        output = world.answer(core_id, FinishReason.LENGTH, lease=lease)
    else:
        output = world.answer(core_id, FinishReason.LENGTH if left <= 1 else None)
    outputs = [output]
    if fault == 4 and output.finished:  # what was its last word is not heard twice
        outputs += [EngineCoreOutput(core_id, [998]), copy(output)]
    world.say(engine, *outputs)
