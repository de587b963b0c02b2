"""The hinge: KV blocks of finished prefills, lent to decode engines over UCX."""

from diptych_kv_transfer.actions import LeaseEnded, LoadEnded
from diptych_kv_transfer.connector import KVConnector, open_connector
from diptych_kv_transfer.references import UnprovenReferenceError

__all__ = ["KVConnector", "LeaseEnded", "LoadEnded", "UnprovenReferenceError", "open_connector"]
