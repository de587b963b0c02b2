"""The hinge: KV blocks of finished prefills are lent to decode engines over UCX."""

from diptych_kv_transfer.connector import KVConnector, open_connector
from diptych_kv_transfer.signing.references import UnprovenReferenceError
from diptych_kv_transfer.tables.actions import LeaseEnded, LoadEnded, PrefixAsked, PrefixLate
from diptych_kv_transfer.tables.lease import LeftLease

__all__ = [
    "KVConnector",
    "LeaseEnded",
    "LeftLease",
    "LoadEnded",
    "PrefixAsked",
    "PrefixLate",
    "UnprovenReferenceError",
    "open_connector",
]
