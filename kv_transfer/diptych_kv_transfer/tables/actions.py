"""Events that the pure tables are told of, and actions that they request. The driver (`HingeThread`
or a simulation) tells and runs them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from diptych_kv_transfer.memory.shard import WHOLE, Part
from diptych_kv_transfer.memory.staging import AnyStaging
from diptych_kv_transfer.tables.messages import AnyMessage

Peer = int
"""A connection, named by the transport. The name is never reused."""
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection exists: to `address` if we opened it; None if the peer opened it."""

    peer: Peer
    address: Address | None


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    address: Address
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A control message has arrived."""

    peer: Peer
    data: bytes


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A `send_blocks` or `receive_blocks` has ended, and no longer touches its regions."""

    key: Hashable
    """The key that began the transfer. A transport does not interpret it."""
    ok: bool


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A connection has ended, after every transfer on it."""

    peer: Peer


Event = Connected | ConnectFailed | Received | TransferEnded | PeerLost


@dataclass(frozen=True, slots=True)
class Send:
    peer: Peer
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class SendKey:
    """The name of a `SendBlocks` among all running transfers."""

    tag: int
    lease_id: str


@dataclass(frozen=True, slots=True)
class ReceiveKey:
    """The name of a `ReceiveBlocks` among all running transfers."""

    tag: int
    request_id: str


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Send runs of our blocks, run i under tag + i; report the end as `TransferEnded(key)`."""

    peer: Peer
    lease_id: str
    tag: int
    runs: list[range]
    part: Part = WHOLE
    """The part of each block that is sent."""

    @property
    def key(self) -> SendKey:
        return SendKey(self.tag, self.lease_id)


@dataclass(frozen=True, slots=True)
class ReceiveBlocks:
    """Receive runs into our blocks, run i under tag + i; report the end as `TransferEnded(key)`."""

    peer: Peer
    request_id: str
    tag: int
    runs: list[range]
    staged: bool = False
    """Whether the runs are in the request's staging area."""
    part: Part = WHOLE
    """The part of each block that is written."""

    @property
    def key(self) -> ReceiveKey:
        return ReceiveKey(self.tag, self.request_id)


@dataclass(frozen=True, slots=True)
class Stage:
    """Make room for the blocks of a request, until its LoadEnded. A second one for the same request
    announces fewer blocks."""

    request_id: str
    staging: AnyStaging


@dataclass(frozen=True, slots=True)
class Unpack:
    """Copy the staged blocks of a request into our blocks, because they are valid now."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to an address; report to `connected` or `connect_failed`."""

    address: Address


@dataclass(frozen=True, slots=True)
class Fence:
    """Cut a connection. `peer_lost` follows when none of its transfers touches memory any more."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease has ended, and all blocks that were lent under it are free again."""

    request_id: str
    block_ids: list[int]
    outcome: str
    """`released`, `revoked`, `expired` or `withdrawn`."""
    lease_id: str = ""


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The hinge no longer touches the destination blocks; they hold valid KV only if `ok`."""

    request_id: str
    ok: bool
    reason: str = ""
    num_blocks: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    """For a prefix: the number of its tokens, from the first one on, that have KV now."""


@dataclass(frozen=True, slots=True)
class PrefixAsked:
    """Another engine wants to read a prefix. The engine answers by `LeaseTable.lend_prefix`."""

    lease_id: str
    names: list[bytes]
    """The names of the prefix's blocks."""
    num_known: int
    """The number of blocks that the other engine has already; it needs at least one more."""
    weights: str = ""
    """The name of the other engine's weights: see `KVConnector.weights`."""


@dataclass(frozen=True, slots=True)
class PrefixLate:
    """A prefix does not arrive in time, and the engine should compute it in other blocks.
    `LoadEnded` follows when nothing can be written to the original blocks."""

    request_id: str


Report = LeaseEnded | LoadEnded | PrefixAsked | PrefixLate
"""What the hinge reports to the engine."""
Action = (
    Send | SendBlocks | ReceiveBlocks | Stage | Unpack | Connect | Fence | LeaseEnded | LoadEnded
    | PrefixAsked | PrefixLate
)  # fmt: skip
