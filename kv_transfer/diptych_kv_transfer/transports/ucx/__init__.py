"""The transport over UCX: connections, blocks sent through them, and blocks read on one host."""

from diptych_kv_transfer.transports.ucx.ucx_transport import UcxTransport as TRANSPORT

__all__ = ["TRANSPORT"]
