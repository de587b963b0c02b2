"""The protocol of waves, explored: two or three cores, a coordinator, every order of events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import pytest

from diptych_engine.serving.waves import WaveMember
from diptych_frontend.core_client.group import WaveCoordinator

BETWEEN_SUMS = 2
ADD, START, PAUSE, RESUME = "add", "start", "pause", "resume"
BEGUN, COMPLETE = "begun", "complete"
Message = tuple[Any, ...]
Channels = tuple[tuple[Message, ...], ...]


class Rank(NamedTuple):
    """One core: its side of the protocol, and what a scheduler would hold."""

    wave: int = 0
    running: bool = False
    paused: bool = False
    pausing: bool = False
    steps: int = 0
    turns: int = 0
    work: int = 0
    """Steps that its requests still need."""
    parked: int = 0
    """The same, of requests that came during a pause."""
    at_barrier: bool = False


PROTOCOL = ("wave", "running", "paused", "pausing", "steps", "turns")
"""What a rank and its `WaveMember` have in common."""
protocol_of = attrgetter(*PROTOCOL)


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    coordinator: tuple[int, bool]
    to_rank: Channels
    from_rank: Channels
    requests: tuple[int, ...]
    """Ranks that requests will go to, one after the other; each needs a step."""
    controls: tuple[str, ...]
    """Pauses and resumes that will be asked of all ranks."""


@dataclass
class World:
    """A state taken apart, to make a move in."""

    state: State

    def __post_init__(self) -> None:
        self.ranks = list(self.state.ranks)
        self.coordinator = WaveCoordinator(*self.state.coordinator)
        self.to_rank = [list(channel) for channel in self.state.to_rank]
        self.from_rank = [list(channel) for channel in self.state.from_rank]

    def member(self, index: int) -> WaveMember:
        return WaveMember(index, len(self.ranks), BETWEEN_SUMS, *protocol_of(self.ranks[index]))

    def keep(self, index: int, member: WaveMember, **changes: Any) -> None:
        protocol = dict(zip(PROTOCOL, protocol_of(member), strict=True))
        self.ranks[index] = self.ranks[index]._replace(**protocol, **changes)

    def tell_all(self, start: tuple[int, int] | None) -> None:
        for channel in self.to_rank if start is not None else ():
            channel.append((START, *start))  # type: ignore[misc]

    def announce(self, index: int, wave: int | None) -> None:
        if wave is not None:
            self.from_rank[index].append((BEGUN, wave))

    def result(self, **changes: Any) -> State:
        return self.state._replace(
            ranks=tuple(self.ranks),
            coordinator=(self.coordinator.wave, self.coordinator.running),
            to_rank=tuple(map(tuple, self.to_rank)),
            from_rank=tuple(map(tuple, self.from_rank)),
            **changes,
        )


def initial(size: int, requests: tuple[int, ...], controls: tuple[str, ...]) -> State:
    empty: Channels = ((),) * size
    return State((Rank(),) * size, (0, False), empty, empty, requests, controls)


def moves(state: State) -> Iterator[State]:
    """Whatever may happen next."""
    if state.requests:
        yield send_request(state)
    if state.controls:
        yield send_control(state)
    for index in range(len(state.ranks)):
        if state.to_rank[index] and not state.ranks[index].at_barrier:
            yield receive(state, index)
        if state.from_rank[index]:
            yield hear(state, index)
        if can_step(state.ranks[index]):
            yield step(state, index)
    if all(rank.at_barrier for rank in state.ranks):
        yield add_up(state)


def send_request(state: State) -> State:
    world = World(state)
    rank, *others = state.requests
    start = world.coordinator.on_request(rank)
    world.to_rank[rank].append((ADD, world.coordinator.wave))
    world.tell_all(start)
    return world.result(requests=tuple(others))


def send_control(state: State) -> State:
    world = World(state)
    control, *others = state.controls
    for channel in world.to_rank:
        channel.append((control,))
    return world.result(controls=tuple(others))


def receive(state: State, index: int) -> State:
    world = World(state)
    member, rank = world.member(index), state.ranks[index]
    kind, *details = world.to_rank[index].pop(0)
    changes: dict[str, int] = {}
    match kind:
        case "add":
            world.announce(index, member.on_request(*details))
            place = "parked" if rank.pausing else "work"
            changes[place] = getattr(rank, place) + 1
        case "start":
            member.on_start(*details)
        case "pause":
            world.announce(index, member.on_pause(True))
        case "resume":
            world.announce(index, member.on_pause(False))
            changes = {"work": rank.work + rank.parked, "parked": 0}
    world.keep(index, member, **changes)
    return world.result()


def hear(state: State, index: int) -> State:
    world = World(state)
    kind, wave = world.from_rank[index].pop(0)
    if kind == BEGUN:
        world.tell_all(world.coordinator.on_start_wave(wave, index))
    else:
        world.coordinator.on_wave_complete(wave)
    return world.result()


def can_step(rank: Rank) -> bool:
    return not rank.at_barrier and (rank.running or rank.work > 0)


def step(state: State, index: int) -> State:
    world = World(state)
    member, rank = world.member(index), state.ranks[index]
    if rank.work:
        world.announce(index, member.on_work())
    member.on_step()
    world.keep(index, member, work=max(0, rank.work - 1), at_barrier=member.sum_due)
    return world.result()


def add_up(state: State) -> State:
    world = World(state)
    terms = [world.member(i).term(rank.work > 0) for i, rank in enumerate(state.ranks)]
    total = [sum(column) for column in zip(*terms, strict=True)]
    for index in range(len(state.ranks)):
        member = world.member(index)
        complete = member.on_sum(total)
        world.keep(index, member, at_barrier=False)
        if complete is not None:
            world.from_rank[index].append((COMPLETE, complete))
    return world.result()


def explore(start: State) -> dict[State, list[State]]:
    """Every state that can be reached, with those that may follow it."""
    reached: dict[State, list[State]] = {}
    todo = [start]
    while todo:
        state = todo.pop()
        if state not in reached:
            reached[state] = following = list(moves(state))
            todo += following
    return reached


def is_at_rest(state: State) -> bool:
    """Nothing is under way, and nothing was forgotten."""
    silent = not any(state.to_rank) and not any(state.from_rank)
    idle = not any(rank.running or rank.work or rank.at_barrier for rank in state.ranks)
    agreed = len({(rank.wave, rank.paused) for rank in state.ranks}) == 1
    obeyed = all(rank.paused == rank.pausing for rank in state.ranks)
    served = all(rank.paused or not rank.parked for rank in state.ranks)
    known = state.ranks[0].paused or state.coordinator == (state.ranks[0].wave, False)
    return silent and idle and agreed and obeyed and served and known


@pytest.mark.parametrize(
    ("size", "requests", "controls"),
    [
        (3, (0, 1, 1), ()),
        pytest.param(3, (2, 1, 0), (), marks=pytest.mark.slow),
        (3, (1,), (PAUSE,)),
        pytest.param(2, (0, 1), (PAUSE, RESUME), marks=pytest.mark.slow),
        (2, (), (PAUSE, RESUME, PAUSE)),
    ],
)
def test_contract_B13_no_order_of_events_stops_a_wave_or_forgets_a_request(
    size: int, requests: tuple[int, ...], controls: tuple[str, ...]
) -> None:
    reached = explore(initial(size, requests, controls))
    stuck = [state for state, following in reached.items() if not following]
    assert stuck, "nothing ever comes to rest"
    for state in stuck:
        assert is_at_rest(state), state
    # From everywhere there is a way to rest: no endless run of dummy batches.
    before: dict[State, list[State]] = {state: [] for state in reached}
    for state, following in reached.items():
        for after in following:
            before[after].append(state)
    leads_to_rest = set(stuck)
    todo = list(stuck)
    while todo:
        for state in before[todo.pop()]:
            if state not in leads_to_rest:
                leads_to_rest.add(state)
                todo.append(state)
    assert len(leads_to_rest) == len(reached)
    # A paused core, which may be without weights, computes nothing.
    assert not any(rank.paused and can_step(rank) for state in reached for rank in state.ranks)
    print(len(reached), "states")
