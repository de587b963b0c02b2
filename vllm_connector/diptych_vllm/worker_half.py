"""The half in vLLM's worker, where the KV is. It owns the hinge, whose thread moves the blocks and
keeps leases alive while the model computes and while it does not."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from functools import partial

from diptych_kv_transfer import LeaseEnded, LoadEnded, PrefixAsked
from diptych_kv_transfer.connector import HingeDriver
from diptych_kv_transfer.memory.shard import WHOLE
from diptych_kv_transfer.tables.actions import Action
from diptych_kv_transfer.tables.hinge import Hinge
from diptych_kv_transfer.tables.load import LeaseRef
from diptych_vllm.figures import Growth, totals_of
from diptych_vllm.orders import (
    Cancel,
    Fail,
    Fetch,
    Grant,
    Hold,
    Lend,
    Order,
    Promise,
    Release,
    Revoke,
    RevokeAll,
    Withdraw,
)
from diptych_vllm.ranks import Ranks, Source, every_rank, sources_of
from diptych_vllm.transfers import Results, Transfers

log = logging.getLogger(__name__)

ONLY_RANK = Ranks()


def no_device() -> None:
    """Do nothing: copies from host memory wait for no device."""


class WorkerHalf:
    """Carries out the scheduler half's orders, and collects what has ended. It never blocks."""

    def __init__(
        self,
        driver: HingeDriver,
        ranks: Ranks = ONLY_RANK,
        launched: Callable[[], None] = no_device,
    ) -> None:
        """
        Args:
            ranks: which rank of its engine the worker is.
            launched: tells the copies of KV on a device that they have to wait for all that has
                been launched on the device so far.
        """
        self._driver = driver
        self._ranks = ranks
        self._launched = launched
        self._transfers = Transfers()
        self._growth = Growth()
        self._unread: dict[str, list[LeaseRef]] = {}
        """By requests that fetch early, what other ranks have of their leases, and nobody reads. It
        is given back when all else was read: until then it may be wanted yet."""

    def obey(self, orders: Iterable[Order]) -> None:
        """Carry out the orders of a step, in order. The thread that launches the steps calls it."""
        orders = list(orders)
        if orders:
            # The KV that is lent now was computed by earlier steps, and the blocks that are to be
            # filled may have been written by them.
            self._launched()
        for order in orders:
            self._enter(order)
            self._act(order)

    def _enter(self, order: Order) -> None:
        """Enter an order into the table, before the hinge can report what becomes of it."""
        transfers = self._transfers
        match order:
            case Promise():
                transfers.promised(order.lease_id)
            case Grant():
                transfers.granted(order.lease_id, order.request_id)
            case Withdraw():
                transfers.withdrawn(order.lease_id)
            case Fail():
                transfers.refused(order.request_id)
            case _:
                pass

    def _act(self, order: Order) -> None:
        tell = self._driver.tell
        match order:
            case Promise(lease_id, request_id, num_blocks, digest):
                tell(
                    lambda hinge, now: hinge.leases.promise(
                        lease_id, request_id, num_blocks, digest, now
                    )
                )
            case Lend(lease_id, block_ids):
                tell(lambda hinge, _now: hinge.leases.lend(lease_id, block_ids))
            case Grant(lease_id, _, block_ids):
                tell(lambda hinge, now: hinge.leases.grant(lease_id, block_ids, now))
            case Withdraw(lease_id) | Revoke(lease_id):
                tell(lambda hinge, _now: hinge.leases.revoke(lease_id))
            case RevokeAll():
                tell(lambda hinge, _now: hinge.leases.revoke_all())
            case Hold():
                self._hold(order)
            case Fetch():
                self._fetch(order)
            case Cancel(load):
                self._cancel(self._transfers.cancelled(load))
            case Release(lease):
                self._release(lease)
            case Fail():
                pass

    # --- reading other engines ----------------------------------------------------------------

    def _hold(self, order: Hold) -> None:
        """Keep alive what will be read of a lease, and end what will not."""
        try:
            sources = sources_of(self._ranks, order.lease.num_ranks)
        except ValueError:
            return  # its fetch will fail
        for source in sources:
            if source.part is None:
                self._reject(source.lease(order.lease))
        read = [source for source in sources if source.part is not None]
        self._transfers.holding(order.load, [_name(order.load, source) for source in read])
        for source in read:
            name, lease = _name(order.load, source), source.lease(order.lease)
            self._driver.tell(partial(_hold, name, lease))

    def _fetch(self, order: Fetch) -> None:
        try:
            sources = sources_of(self._ranks, order.lease.num_ranks)
        except ValueError as exc:
            log.warning("request %s: its KV is not fetched: %s", order.request_id, exc)
            self._transfers.refused(order.request_id)
            self._release(order.lease)
            return
        read = [source for source in sources if source.part is not None]
        names = [_name(order.load, source) for source in read]
        self._transfers.fetching(order.load, order.request_id, names)
        if order.early:  # a lease that is held was told of these before
            unread = [x.lease(order.lease) for x in sources if x.part is None]
            self._unread[order.request_id] = unread
        for source, name in zip(read, names, strict=True):
            self._driver.tell(partial(_start, order, source, name, secrets.randbits(60)))

    def _cancel(self, names: Iterable[str]) -> None:
        for name in names:
            self._driver.tell(partial(_cancel, name))

    def _release(self, lease: LeaseRef) -> None:
        """Tell another engine that this rank will read nothing of a lease."""
        try:
            sources = sources_of(self._ranks, lease.num_ranks)
        except ValueError:
            sources = every_rank(lease.num_ranks)
        for source in sources:
            self._reject(source.lease(lease))

    def _reject(self, lease: LeaseRef) -> None:
        self._driver.tell(lambda hinge, _now: hinge.loads.reject(lease))

    # --- what has ended -----------------------------------------------------------------------

    def collect(self) -> Results:
        """Return what has ended since the last call.

        Raises `RuntimeError` if the hinge has failed. The engine cannot continue without it.
        """
        for event in self._driver.poll_events():
            match event:
                case LeaseEnded():
                    log.info("request %s: its lease was %s", event.request_id, event.outcome)
                    self._transfers.lease_ended(event)
                case LoadEnded():
                    self._load_ended(event)
                case PrefixAsked(lease_id):
                    self._lend_no_prefix(lease_id)
                case _:
                    pass
        return self._transfers.take_results()

    def _load_ended(self, event: LoadEnded) -> None:
        fetched = self._transfers.load_ended(event)
        if event.ok:
            # One that was early is kept until its request has come, and that is here.
            self._driver.tell(partial(_adopt, event.request_id))
        if fetched is None:
            return
        if not event.ok:
            log.warning("request %s: the KV hand-off failed: %s", fetched.request_id, event.reason)
            self._cancel(fetched.loads)
        if not fetched.loads:
            unread = self._unread.pop(fetched.request_id, [])
            for lease in unread if fetched.ok else ():
                self._reject(lease)

    def _lend_no_prefix(self, lease_id: str) -> None:
        """vLLM's prefix cache is not ours to lend; the other engine computes what it lacks."""
        self._driver.tell(lambda hinge, now: hinge.leases.lend_prefix(lease_id, [], b"", now))

    def take_figures(self) -> dict[str, int]:
        """Return what the hinge has counted since the last call; see `figures.OF_HINGE`."""
        return self._growth.of(totals_of(self._driver.stats()))

    def close(self) -> None:
        """Cut all connections. Safe to call twice."""
        self._driver.close()


def _name(load: str, source: Source) -> str:
    """What the hinge calls the part of a load that comes from one rank."""
    return f"{load}@{source.rank}"


def _hold(name: str, lease: LeaseRef, hinge: Hinge, now: float) -> list[Action]:
    return hinge.loads.hold(name, lease, now)


def _start(
    order: Fetch, source: Source, name: str, tag: int, hinge: Hinge, now: float
) -> list[Action]:
    return hinge.loads.start(
        name,
        source.lease(order.lease),
        order.digest,
        tag,
        dict(order.wanted),
        order.num_tokens,
        now,
        part=source.part or WHOLE,
        early=order.early,
    )


def _adopt(name: str, hinge: Hinge, now: float) -> list[Action]:
    return hinge.loads.adopt(name, now)


def _cancel(name: str, hinge: Hinge, now: float) -> list[Action]:
    return hinge.loads.cancel(name, now)
