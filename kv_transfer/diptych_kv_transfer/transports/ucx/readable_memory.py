"""Memory that peers may read with a key, and the keys to memory of peers."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t, c_void_p

from diptych_kv_transfer.memory.region import MemoryRegion
from diptych_kv_transfer.transports.ucx import libucp
from diptych_kv_transfer.transports.ucx.libucp import check, lib
from diptych_kv_transfer.transports.ucx.worker import Context


class ReadableMemory:
    """A region that peers may read, with its `key`, as long as this object is open."""

    def __init__(self, context: Context, region: MemoryRegion) -> None:
        """Raises `UcpError`."""
        self._context, self._region, self._handle = context, region, c_void_p()
        params = libucp.MemMapParams(
            field_mask=libucp.MEM_MAP_PARAM_FIELD_ADDRESS | libucp.MEM_MAP_PARAM_FIELD_LENGTH,
            address=region.address,
            length=region.length,
        )
        status = lib.ucp_mem_map(context.handle, byref(params), byref(self._handle))
        check(status, "registering memory")
        packed, length = c_void_p(), c_size_t()
        status = lib.ucp_rkey_pack(context.handle, self._handle, byref(packed), byref(length))
        check(status, "packing a memory key")
        self.key = ctypes.string_at(packed, length.value)
        """Packed, for `unpack_key` of a peer."""
        lib.ucp_rkey_buffer_release(packed)

    def close(self) -> None:
        """Close it. Call this once."""
        lib.ucp_mem_unmap(self._context.handle, self._handle)


def unpack_key(endpoint: int, packed: bytes) -> int:
    """Return a peer's key for use on its endpoint, until `destroy_key`. Raises `UcpError`."""
    key = c_void_p()
    check(lib.ucp_ep_rkey_unpack(endpoint, packed, byref(key)), "unpacking a memory key")
    return int(key.value or 0)


def destroy_key(key: int) -> None:
    lib.ucp_rkey_destroy(key)
