"""The half in vLLM's worker, where the KV is. It owns the hinge, whose thread moves the blocks and
keeps leases alive whether the model computes or not."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable

from diptych_kv_transfer import LeaseEnded, LoadEnded, PrefixAsked
from diptych_kv_transfer.connector import HingeDriver
from diptych_vllm.figures import Growth, totals_of
from diptych_vllm.orders import (
    Cancel,
    Fail,
    Fetch,
    Grant,
    Hold,
    Order,
    Promise,
    Release,
    Revoke,
    RevokeAll,
    Withdraw,
)
from diptych_vllm.transfers import Results, Transfers

log = logging.getLogger(__name__)


class WorkerHalf:
    """Carries out the scheduler half's orders, and collects what has ended. Never waits."""

    def __init__(self, driver: HingeDriver) -> None:
        self._driver = driver
        self._transfers = Transfers()
        self._growth = Growth()

    def obey(self, orders: Iterable[Order]) -> None:
        """Carry out the orders of a step, in order."""
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
            case Fetch():
                transfers.fetching(order.load, order.request_id)
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
            case Grant(lease_id, _, block_ids):
                tell(lambda hinge, now: hinge.leases.grant(lease_id, block_ids, now))
            case Withdraw(lease_id) | Revoke(lease_id):
                tell(lambda hinge, _now: hinge.leases.revoke(lease_id))
            case RevokeAll():
                tell(lambda hinge, _now: hinge.leases.revoke_all())
            case Hold(load, lease):
                tell(lambda hinge, now: hinge.loads.hold(load, lease, now))
            case Fetch(load, _, lease, digest, wanted, num_tokens):
                tag = secrets.randbits(60)
                tell(
                    lambda hinge, now: hinge.loads.start(
                        load, lease, digest, tag, wanted, num_tokens, now
                    )
                )
            case Cancel(load):
                tell(lambda hinge, now: hinge.loads.cancel(load, now))
            case Release(lease):
                tell(lambda hinge, _now: hinge.loads.reject(lease))
            case Fail():
                pass

    def collect(self) -> Results:
        """What has ended since the last call.

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
        request_id = self._transfers.load_ended(event)
        if request_id is not None and not event.ok:
            log.warning("request %s: the KV hand-off failed: %s", request_id, event.reason)

    def _lend_no_prefix(self, lease_id: str) -> None:
        """vLLM's prefix cache is not ours to lend; the other engine computes what it lacks."""
        self._driver.tell(lambda hinge, now: hinge.leases.lend_prefix(lease_id, [], b"", now))

    def take_figures(self) -> dict[str, int]:
        """What the hinge has counted since the last call; see `figures.OF_HINGE`."""
        return self._growth.of(totals_of(self._driver.stats()))

    def close(self) -> None:
        """Cut all connections. Safe to call twice."""
        self._driver.close()
