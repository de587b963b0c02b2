"""KVConnector: the interface through which an engine core hands KV over, by the hinge."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from diptych_kv_transfer.hinge_thread import Command, HingeThread
from diptych_kv_transfer.memory.layout import Layout
from diptych_kv_transfer.memory.shard import Shard
from diptych_kv_transfer.parameters import describe_engine, describe_lease, digest_of, lease_of
from diptych_kv_transfer.regions import Regions
from diptych_kv_transfer.signing.references import PUBLIC_KEY, HingeKey, References
from diptych_kv_transfer.tables.actions import Report
from diptych_kv_transfer.tables.hinge import Hinge
from diptych_kv_transfer.tables.lease import LeftLease
from diptych_kv_transfer.tables.leases import LeaseTable
from diptych_kv_transfer.tables.load import Prefix
from diptych_kv_transfer.tables.loads import LoadTable
from diptych_kv_transfer.tables.messages import Hello
from diptych_kv_transfer.transports import transport_named
from diptych_protocol import (
    CurveKeys,
    InvalidRequestError,
    KVTransferConfig,
    KVTransferParams,
    KVTransferStats,
)
from diptych_protocol.kv_transfer_params import is_ip_literal

STAGING_BYTES = 256 << 20
"""Default for an engine on a CPU, which stages only blocks of another geometry."""
STAGING_BYTES_ON_DEVICE = 2 << 30
"""Default for an engine on a device, which stages all blocks. It holds 16,000 tokens of a model of
8 billion weights."""


class HingeDriver(Protocol):
    """Carries out what a hinge decides. `HingeThread` implements it, and so does a simulation."""

    @property
    def port(self) -> int:
        """The port at which the hinge listens."""

    @property
    def wake_fd(self) -> int:
        """Readable while `poll_events` has something to return."""

    def tell(self, command: Command) -> None:
        """Queue a command, which the driver carries out soon."""

    def poll_events(self) -> list[Report]:
        """Return the leases and loads that have ended since the last call, and the prefixes that
        other engines asked for.

        Raises `RuntimeError` if the driver has failed. The engine cannot continue without it.
        """

    def stats(self) -> KVTransferStats:
        """Return totals since the start, and what is held now."""

    def close(self) -> None:
        """Cut all connections. Safe to call twice."""


def open_connector(
    config: KVTransferConfig,
    *,
    engine_id: str,
    epoch: str,
    compat: Mapping[str, str | int],
    kv_memory: Sequence[Shard],
    geometry: Mapping[str, int] | None = None,
    keys: CurveKeys | None = None,
    left: Sequence[LeftLease] | None = None,
) -> KVConnector:
    """Listen, and start a hinge over the configured transport.

    Args:
        compat: what must be equal in engines that exchange KV, by name.
        keys: the service's keys. Engines with other keys exchange nothing with this one. None: for
            engines that listen on loopback, which then exchange KV with any process there.
        geometry: what may differ, by the names of `layout.GEOMETRY`; without it, nothing may.
        kv_memory: the blocks of each rank.
        left: the leases of former engines that this one goes on with. None: leases end with their
            engine.

    Raises `OSError` when the address is not available, `ValueError` when the memory is not what
    `compat` and `geometry` say, and `InvalidRequestError` when it is to listen for other hosts
    without keys, or over a transport that does not exist.
    """
    config = with_literals(config)
    key = key_of(config, keys)
    former = None if left is None else sorted({lease.epoch for lease in left})
    me = Hello(engine_id, epoch, dict(compat), geometry=dict(geometry or {}), former=former)
    driver = start_hinge(config, me, kv_memory, key, left or ())
    return KVConnector(me, config, driver, References(key))


def start_hinge(
    config: KVTransferConfig,
    me: Hello,
    kv_memory: Sequence[Shard],
    key: HingeKey,
    left: Sequence[LeftLease] = (),
) -> HingeThread:
    """Listen, and start the hinge of the engine `me`, whose hosts are addresses already. It has
    the leases that were left to it before anybody can open them.

    Raises what `open_connector` raises for an address or a memory.
    """
    open_transport = transport_named(config.transport)
    regions = Regions(kv_memory, Layout.of(me.compat, me.geometry), open_transport.reaches)
    transport = open_transport(config.listen_host, config.listen_port, key)
    hinge = make_hinge(config, me, regions.block_bytes if regions.on_device else 0)
    for lease in left:
        hinge.leases.adopt(lease, time.monotonic())
    return HingeThread(hinge, transport, regions, hinge.loads.staging_bytes)


Config = TypeVar("Config", bound=KVTransferConfig)


def with_literals(config: Config) -> Config:
    """Return the configuration with host names replaced by addresses.

    Names are looked up once, here. Raises `OSError` for a name that has no address.
    """
    return msgspec.structs.replace(
        config,
        listen_host=_literal(config.listen_host),
        advertise_host=_literal(config.advertise_host or config.listen_host),
    )


def _literal(host: str) -> str:
    if is_ip_literal(host):
        return host
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def key_of(config: KVTransferConfig, keys: CurveKeys | None) -> HingeKey:
    """Return the key that an engine and all its peers must have.

    Raises `InvalidRequestError` without keys, unless the engine listens on loopback.
    """
    if keys is not None:
        return HingeKey.of(keys)
    if not ipaddress.ip_address(config.listen_host).is_loopback:
        raise InvalidRequestError(
            f"KV transfers on {config.listen_host} need the service's keys (--keys), by which "
            "engines know each other; without keys, listen on loopback",
            param="keys",
        )
    return PUBLIC_KEY


def make_hinge(config: KVTransferConfig, me: Hello, copied_block_bytes: int = 0) -> Hinge:
    """Make the hinge of the engine `me`. `copied_block_bytes`: see `LoadTable`."""
    room = config.staging_bytes
    if room is None:
        room = STAGING_BYTES_ON_DEVICE if copied_block_bytes else STAGING_BYTES
    loads = LoadTable(me, config.load_timeout_s, room, copied_block_bytes)
    num_groups = max(1, len(str(me.compat.get("groups", "")).split()))
    return Hinge(me, LeaseTable(config.lease_seconds, num_groups), loads)


class KVConnector:
    """Lends the blocks of finished prefills to other engines, and fetches blocks from them.

    The core calls it from its own thread. The driver's thread does the work.
    """

    def __init__(
        self,
        me: Hello,
        config: KVTransferConfig,
        driver: HingeDriver,
        references: References,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """`random_bits(k)` returns k unpredictable bits. Only a simulation passes its own."""
        self._driver = driver
        self._references = references
        self._random_bits = random_bits
        self._lease_seconds = config.lease_seconds
        self._block_size = me.geometry.get("block_size", 1)
        self.host = config.advertise_host or config.listen_host
        self.port = driver.port
        self.wake_fd = driver.wake_fd
        self.poll_events, self.stats, self.close = driver.poll_events, driver.stats, driver.close
        """See `HingeDriver`."""
        self._described = describe_engine(me, self.host, self.port, self._lease_seconds)
        self.proof = references.proof_of_engine(self._described)
        """The `proof` in announcements of this engine's leases."""
        self.weights: Callable[[], str] = str
        """Returns the name of the engine's weights; empty: those of the model's source. Engines
        with different ones exchange no KV. Whoever may replace weights sets it."""

    def _digest(self, token_ids: list[int], cache_salt: str | None) -> str:
        weights = self.weights()
        return digest_of(token_ids, f"{cache_salt or ''}\0{weights}" if weights else cache_salt)

    # --- lending ------------------------------------------------------------------------------

    def promise(
        self,
        request_id: str,
        lease_id: str | None,
        num_blocks: int,
        token_ids: list[int],
        cache_salt: str | None,
    ) -> str:
        """Promise a lease of the blocks that will hold the KV of `token_ids`.

        Returns the lease's id: the given one, or a new one. No live lease may have the given id.
        """
        lease_id = lease_id or f"{self._random_bits(128):032x}"
        name, digest = lease_id, self._digest(token_ids, cache_salt)
        self._driver.tell(
            lambda hinge, now: hinge.leases.promise(name, request_id, num_blocks, digest, now)
        )
        return lease_id

    def lend(self, lease_id: str, block_ids: list[int]) -> None:
        """Lend the first blocks of a promised lease, which are computed. No effect if it ended."""
        self._driver.tell(lambda hinge, _now: hinge.leases.lend(lease_id, block_ids))

    def grant(
        self,
        request_id: str,
        block_ids: list[int],
        token_ids: list[int],
        first_token_ids: list[int],
        cache_salt: str | None,
        lease_id: str | None = None,
    ) -> KVTransferParams:
        """Lend the blocks that hold the KV of `token_ids`; LeaseEnded gives them back.

        `lease_id` is the id of the promise, if there was one. The result tells a decode engine how
        to fetch the blocks, and which tokens were sampled after them.
        """
        promised = lease_id or self.promise(request_id, None, len(block_ids), token_ids, cache_salt)
        self._driver.tell(lambda hinge, now: hinge.leases.grant(promised, block_ids, now))
        lent = describe_lease(
            self._described,
            request_id=request_id,
            lease_id=promised,
            block_ids=block_ids,
            num_tokens=len(token_ids),
            digest=self._digest(token_ids, cache_salt),
            first_token_ids=first_token_ids,
        )
        return self._references.sign(lent, self._lease_seconds)

    def lend_prefix(self, lease_id: str, block_ids: list[int], last_name: bytes) -> None:
        """Answer a `PrefixAsked`: lend these blocks, or nothing. `last_name` names the last one.

        `LeaseEnded` gives them back, for as long as one lease at most.
        """
        self._driver.tell(
            lambda hinge, now: hinge.leases.lend_prefix(lease_id, block_ids, last_name, now)
        )

    def withdraw(self, lease_id: str) -> None:
        """End a lease of this engine. No effect if it has ended."""
        self._driver.tell(lambda hinge, _now: hinge.leases.revoke(lease_id))

    def revoke(self, params: KVTransferParams) -> None:
        """End the lease of this engine that these parameters name.

        Raises `UnprovenReferenceError` unless this engine signed them.
        """
        self._references.check_lease(params)
        self.withdraw(params.lease_id or "")

    def revoke_all(self) -> None:
        """End every lease of this engine. Blocks that are being sent stay pinned until then."""
        self._driver.tell(lambda hinge, _now: hinge.leases.revoke_all())

    # --- fetching -----------------------------------------------------------------------------

    # The methods that take `params` check their signature before they use them, except
    # `take`. They raise `UnprovenReferenceError` unless an engine of the service has signed them.

    def check(self, params: KVTransferParams, token_ids: list[int], cache_salt: str | None) -> None:
        """Raise as `prove` does, and also if the reference is for other tokens, has expired, or was
        taken already."""
        self._references.check_use(params, self._digest(token_ids, cache_salt))

    def prove(self, params: KVTransferParams) -> None:
        """Raise `UnprovenReferenceError` if a field was edited. Tokens are not compared."""
        self._references.check(params)

    def take(self, params: KVTransferParams) -> None:
        """Record that a checked reference has come, which no other request may use."""
        self._references.take(params)

    def is_taken(self, params: KVTransferParams) -> bool:
        """Whether a request has arrived with this reference. That request then owns the lease."""
        self._references.check_lease(params)
        return self._references.is_taken(params)

    def check_announced(self, params: KVTransferParams) -> None:
        """Raise unless an engine of the service signed the parameters of an announcement."""
        self._references.check_engine(params)

    def reach(self, params: KVTransferParams) -> None:
        """Connect to a prefill engine, because an announcement says its blocks will be wanted."""
        self._references.check_engine(params)
        address = lease_of(params, self._lease_seconds).address
        self._driver.tell(lambda hinge, _now: hinge.loads.reach(address))

    def hold(self, request_id: str, params: KVTransferParams) -> None:
        """Connect to prefill and keep the lease alive while the request queues."""
        self._references.check(params)
        lease = lease_of(params, self._lease_seconds)
        self._driver.tell(lambda hinge, now: hinge.loads.hold(request_id, lease, now))

    def start_load(
        self,
        request_id: str,
        params: KVTransferParams,
        indices: list[int],
        local_block_ids: list[int],
        token_ids: list[int],
        cache_salt: str | None,
        *,
        early: bool = False,
        num_blocks: int | None = None,
    ) -> None:
        """Fetch block `indices[i]` of the lease into `local_block_ids[i]`; ends in LoadEnded.

        Indices count blocks of our size. A lease with blocks of another size is repacked.

        The lease must be for the KV of `token_ids`. `num_blocks`: how many blocks it has, if it
        lacks those that windows have passed. Then only equal blocks can be fetched.

        `early`: the request is only announced, and the lease may be only promised. Unless
        `adopt_load` follows, the load ends by itself after `load_timeout_s`. If it was complete by
        then, it reports a second LoadEnded.
        """
        if early:
            self._references.check_engine(params)
        else:
            self._references.check(params)
        lease = lease_of(params, self._lease_seconds)
        wanted = dict(zip(indices, local_block_ids, strict=True))
        digest, tag = self._digest(token_ids, cache_salt), self._random_bits(60)
        num_tokens = len(token_ids) if num_blocks is None else num_blocks * self._block_size
        self._driver.tell(
            lambda hinge, now: hinge.loads.start(
                request_id, lease, digest, tag, wanted, num_tokens, now, early=early
            )
        )

    def fetch_prefix(
        self,
        request_id: str,
        params: KVTransferParams,
        prefix: Prefix,
        indices: list[int],
        local_block_ids: list[int],
    ) -> None:
        """Fetch what another engine remembers of a prefix: block `indices[i]` into
        `local_block_ids[i]`, both counted in our size. It ends in LoadEnded, which gives the number
        of tokens of the prefix that arrived.

        `params` are that engine's description of itself in announcements.
        """
        self._references.check_engine(params)
        lease_id, tag = f"{self._random_bits(128):032x}", self._random_bits(60)
        lease = lease_of(msgspec.structs.replace(params, lease_id=lease_id), self._lease_seconds)
        wanted = dict(zip(indices, local_block_ids, strict=True))
        count = len(prefix.names) if prefix.whole is None else prefix.whole
        num_tokens, weights = count * prefix.name_tokens, self.weights()
        self._driver.tell(
            lambda hinge, now: hinge.loads.start(
                request_id, lease, weights, tag, wanted, num_tokens, now, prefix=prefix
            )
        )

    def adopt_load(self, request_id: str) -> None:
        """Tell the hinge that the request of an early load has arrived."""
        self._driver.tell(lambda hinge, now: hinge.loads.adopt(request_id, now))

    def cancel_load(self, request_id: str) -> None:
        """Give up a held or started load, and tell the prefill engine. An early one's lease stays.

        A started load still ends in LoadEnded, unless it was reported already.
        """
        self._driver.tell(lambda hinge, now: hinge.loads.cancel(request_id, now))

    def reject(self, params: KVTransferParams) -> None:
        """Tell the prefill engine that its lease is not needed. Repeating it is harmless."""
        self._references.check_lease(params)
        lease = lease_of(params, self._lease_seconds)
        self._driver.tell(lambda hinge, _now: hinge.loads.reject(lease))
