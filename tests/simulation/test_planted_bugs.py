"""The simulator can fail: bugs that somebody might make are planted, and it finds each of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from sim_faults import FAULTS
from sim_schedule import run_schedule

from diptych_engine.control.kept_answers import KeptAnswers
from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.early_loads import EarlyLoads
from diptych_engine.scheduling.lent_blocks import LentBlocks
from diptych_engine.scheduling.pause import PauseGate
from diptych_engine.scheduling.request import Request, RequestStatus
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_engine.scheduling.waiting_queue import FairQueue
from diptych_kv_transfer import connector
from diptych_kv_transfer.tables import loads
from diptych_kv_transfer.tables.actions import Action, Fence, LeaseEnded
from diptych_kv_transfer.tables.lease import NEVER, Lease
from diptych_kv_transfer.tables.leases import LeaseTable
from diptych_kv_transfer.tables.load import Load, LoadState, Prefix
from diptych_kv_transfer.tables.loads import LoadTable
from diptych_kv_transfer.tables.messages import FromOwner, Opened
from diptych_protocol import EngineCoreRequest
from diptych_router.requests.attempts import Attempts
from diptych_router.requests.request_record import Setback
from diptych_router.requests.request_table import RequestTable, _Turn
from diptych_router.requests.routed_request import RoutedRequest, Stage
from diptych_router.requests.table_interface import Action as ToDo

Plant = Callable[[pytest.MonkeyPatch], None]
MAX_SCHEDULES = 3000


def lease_that_is_not_bound_to_a_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(connector, "digest_of", lambda *_: "any")


def decode_that_does_not_wait_for_closed(patch: pytest.MonkeyPatch) -> None:
    honest = LoadTable._go_on

    def go_on(self: LoadTable, load: Load, peer: int, now: float) -> list[Action]:
        actions = honest(self, load, peer, now)
        return [*actions, *self._end(load, now)] if load.state is LoadState.CLOSING else actions

    patch.setattr(LoadTable, "_go_on", go_on)


def decode_that_uses_what_failed(patch: pytest.MonkeyPatch) -> None:
    honest = Scheduler.load_ended
    patch.setattr(
        Scheduler,
        "load_ended",
        lambda self, name, **ended: honest(self, name, **{**ended, "ok": True}),
    )


def decode_that_frees_blocks_that_are_written_to(patch: pytest.MonkeyPatch) -> None:
    honest = Scheduler.finish

    def finish(self: Scheduler, request: Request, *args: Any) -> None:
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            self._free_blocks(request)
        honest(self, request, *args)

    patch.setattr(Scheduler, "finish", finish)


def decode_that_reuses_an_early_load_under_way(patch: pytest.MonkeyPatch) -> None:
    honest = EarlyLoads.drop

    def drop(self: EarlyLoads, request_id: str) -> None:
        load = self.loads.get(request_id)
        if load is not None:
            blocks, load.announced.block_ids = load.announced.block_ids, []
            self.pool.release(blocks)
        honest(self, request_id)

    patch.setattr(EarlyLoads, "drop", drop)


def prefill_that_frees_blocks_while_they_are_sent(patch: pytest.MonkeyPatch) -> None:
    honest = LeaseTable._give_back_if_done

    def give_back(self: LeaseTable, lease: Lease) -> list[Action]:
        lease.sending.clear()
        return honest(self, lease)

    patch.setattr(LeaseTable, "_give_back_if_done", give_back)


def prefill_that_forgets_the_end_of_a_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LentBlocks, "end", lambda self, lease_id: self._blocks.pop(lease_id, None))


def prefill_that_ends_leases_twice(patch: pytest.MonkeyPatch) -> None:
    honest = LeaseTable._give_back_if_done

    def give_back(self: LeaseTable, lease: Lease) -> list[Action]:
        ends = honest(self, lease)
        return [*ends, *(end for end in ends if isinstance(end, LeaseEnded))]

    patch.setattr(LeaseTable, "_give_back_if_done", give_back)


def lease_that_does_not_expire(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "deadline", NEVER)


def lost_connection_that_ends_no_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadTable, "_lost", lambda self, address, reason, now: [])


def load_without_a_time_limit(patch: pytest.MonkeyPatch) -> None:
    honest = LoadTable.start

    def start(self: LoadTable, request_id: str, *args: Any, **kwargs: Any) -> list[Action]:
        actions = honest(self, request_id, *args, **kwargs)
        if request_id in self.loads:
            self.loads[request_id].deadline = NEVER
        return actions

    patch.setattr(LoadTable, "start", start)


def engines_that_do_not_look_whether_they_fit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loads, "mismatch", lambda lease, theirs, mine, *, granted: "")


def lease_whose_reader_is_never_cut_off(patch: pytest.MonkeyPatch) -> None:
    honest = LeaseTable.tick

    def tick(self: LeaseTable, now: float) -> list[Action]:
        return [action for action in honest(self, now) if not isinstance(action, Fence)]

    patch.setattr(LeaseTable, "tick", tick)


def decode_that_believes_anybody(patch: pytest.MonkeyPatch) -> None:
    def find(self: LoadTable, peer: int, message: FromOwner) -> Load | None:
        named = [x for x in self.loads.values() if x.lease.lease_id == message.lease_id]
        return named[0] if named else None

    patch.setattr(LoadTable, "_find", find)


def preempted_request_that_keeps_its_place(patch: pytest.MonkeyPatch) -> None:
    def take_blocks(self: Scheduler, victim: Request) -> None:
        self.pool.release(victim.block_ids)
        victim.block_ids = []

    patch.setattr(Scheduler, "_take_blocks", take_blocks)


def sleeper_that_remembers_its_prefixes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "forget_all", lambda self, *, even_held=False: True)


def pause_that_loses_what_was_parked(patch: pytest.MonkeyPatch) -> None:
    honest = PauseGate.open

    def open_gate(self: PauseGate, waiting: FairQueue) -> None:
        self.parked.clear()
        honest(self, waiting)

    patch.setattr(PauseGate, "open", open_gate)


def router_that_hears_engines_twice(patch: pytest.MonkeyPatch) -> None:
    def pass_turn(
        self: RequestTable, routed: RoutedRequest, setback: Setback | None = None, why: str = ""
    ) -> None:
        self._turns.append(_Turn(routed, setback, why))

    patch.setattr(RequestTable, "_pass_turn", pass_turn)


def router_that_forgets_what_was_delivered(patch: pytest.MonkeyPatch) -> None:
    honest = RoutedRequest._with

    def with_params(
        self: RoutedRequest, params: dict[str, Any] | None, *source: Any, **named: Any
    ) -> EngineCoreRequest:
        whole = honest(self, params, *source, **named)
        return msgspec.structs.replace(whole, generated_token_ids=None)

    patch.setattr(RoutedRequest, "_with", with_params)


def router_that_forgets_a_request_in_a_loss(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestTable, "engine_lost", lambda self, engine, why, now: ())


def router_that_lets_an_engine_lend_to_itself(patch: pytest.MonkeyPatch) -> None:
    honest = Attempts.hand_over

    def hand_over(self: Attempts, routed: RoutedRequest, now: float) -> list[ToDo]:
        if routed.stage is Stage.PREFILL:
            routed.engine = ""
        return honest(self, routed, now)

    patch.setattr(Attempts, "hand_over", hand_over)


def router_that_asks_for_a_kept_answer_anew(patch: pytest.MonkeyPatch) -> None:
    honest = RequestTable.submit

    def submit(self: RequestTable, request: EngineCoreRequest, *rest: Any) -> Any:
        return honest(self, msgspec.structs.replace(request, generated_token_ids=None), *rest)

    patch.setattr(RequestTable, "submit", submit)


def engine_that_keeps_a_prefill_as_a_whole_answer(patch: pytest.MonkeyPatch) -> None:
    honest = KeptAnswers.keep

    def keep(self: KeptAnswers, request: Request, **options: bool) -> None:
        honest(self, replace(request, kv_transfer=None), **options)

    patch.setattr(KeptAnswers, "keep", keep)


def cache_that_ignores_the_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("diptych_protocol.block_hashes.root_hash", lambda salt: b"")


def pool_that_remembers_what_it_gave_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_forget", lambda self, block: None)


def taker_that_counts_what_was_not_lent(patch: pytest.MonkeyPatch) -> None:
    honest = Load.shorten

    def shorten(self: Load, prefix: Prefix, opened: Opened) -> None:
        hoped_for = self.num_tokens
        honest(self, prefix, opened)
        self.num_tokens = hoped_for

    patch.setattr(Load, "shorten", shorten)


def holder_that_does_not_pin_prefixes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        LentBlocks, "lend_prefix", lambda self, _, names, known: self.pool.match(names)[: 1 + known]
    )


def taker_that_computes_in_blocks_that_are_written_to(patch: pytest.MonkeyPatch) -> None:
    honest = Scheduler.go_on_without

    def go_on_without(self: Scheduler, request_id: str) -> None:
        honest(self, request_id)
        held = self.loading.get(request_id)
        if held is not None and held.finished:
            self._free_blocks(held)

    patch.setattr(Scheduler, "go_on_without", go_on_without)


PLANTS: dict[Plant, str] = {
    # bug: the property that it breaks
    lease_that_is_not_bound_to_a_prompt: "P2",
    decode_that_does_not_wait_for_closed: "P2",
    decode_that_uses_what_failed: "P2",
    decode_that_frees_blocks_that_are_written_to: "P2",
    decode_that_reuses_an_early_load_under_way: "P2",
    prefill_that_frees_blocks_while_they_are_sent: "P2",
    prefill_that_forgets_the_end_of_a_lease: "P1",
    prefill_that_ends_leases_twice: "P6",
    lease_that_does_not_expire: "P1",
    lost_connection_that_ends_no_load: "P3",
    load_without_a_time_limit: "P3",
    engines_that_do_not_look_whether_they_fit: "P2",
    lease_whose_reader_is_never_cut_off: "P1",
    decode_that_believes_anybody: "P2",
    preempted_request_that_keeps_its_place: "P2",
    sleeper_that_remembers_its_prefixes: "P2",
    pause_that_loses_what_was_parked: "P3",
    router_that_hears_engines_twice: "P1",
    router_that_forgets_what_was_delivered: "P2",
    router_that_forgets_a_request_in_a_loss: "P3",
    router_that_lets_an_engine_lend_to_itself: "P3",
    router_that_asks_for_a_kept_answer_anew: "P2",
    engine_that_keeps_a_prefill_as_a_whole_answer: "P6",
    cache_that_ignores_the_salt: "P2",
    pool_that_remembers_what_it_gave_away: "P2",
    taker_that_counts_what_was_not_lent: "P2",
    holder_that_does_not_pin_prefixes: "P2",
    taker_that_computes_in_blocks_that_are_written_to: "P2",
}


HINTS: dict[Plant, list[str]] = {
    lease_that_is_not_bound_to_a_prompt: ["forge"],
    decode_that_believes_anybody: ["stranger"],
    router_that_lets_an_engine_lend_to_itself: ["turn", "drain"],
    router_that_asks_for_a_kept_answer_anew: ["crash_router"],
    engine_that_keeps_a_prefill_as_a_whole_answer: ["crash_router"],
}
"""Faults to choose from, where it would take long among all."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


SLOW = {
    decode_that_believes_anybody,
    engines_that_do_not_look_whether_they_fit,
    lease_whose_reader_is_never_cut_off,
    router_that_lets_an_engine_lend_to_itself,
}
"""Those that take most schedules to find."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "plant",
    [pytest.param(plant, marks=pytest.mark.slow if plant in SLOW else ()) for plant in PLANTS],
    ids=lambda plant: plant.__name__,
)
def test_the_simulator_finds(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(MAX_SCHEDULES):
        try:
            run_schedule(seed, faults=HINTS.get(plant, list(FAULTS)))
        except Exception as exc:  # a bug may break other things first
            if str(exc).startswith(PLANTS[plant]):
                return
    pytest.fail(f"{MAX_SCHEDULES} schedules do not break {PLANTS[plant]}")
