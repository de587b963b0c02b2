"""What always holds of a block pool."""

from __future__ import annotations

from diptych_engine.scheduling.block_pool import BlockPool


def check_blocks(pool: BlockPool) -> None:
    """Raise unless every block is either held or free, and hashes agree both ways."""
    for block, holders in enumerate(pool._holders):
        queued, pinned = block in pool._free, block in pool._pinned
        if holders < 0 or queued != (holders == 0 and not pinned):
            raise RuntimeError(f"block {block}: {holders} holders, free={queued}")
        block_hash = pool._hash_of[block]
        if pinned and block_hash is None:
            raise RuntimeError(f"block {block} is pinned and remembers nothing")
        if block_hash is not None and pool._block_of.get(block_hash) != block:
            raise RuntimeError(f"block {block} remembers a hash that points elsewhere")
    idle = [block for block in range(pool.num_blocks) if pool._holders[block] == 0]
    if pool.num_free != len(idle):
        raise RuntimeError(f"{pool.num_free} blocks are said to be free, {len(idle)} are")
    if pool.num_remembered != sum(pool._hash_of[block] is not None for block in idle):
        raise RuntimeError(f"{pool.num_remembered} free blocks are said to be remembered")
    begun = {block: parent for parent, (block, _) in pool._parts.items()}
    if begun != pool._parent_of or any(
        pool._holders[block] or pool._hash_of[block] is not None for block in begun
    ):
        raise RuntimeError("what a former core had begun is held, or remembered")
    if len(pool._block_of) != sum(h is not None for h in pool._hash_of):
        raise RuntimeError("a hash points to a block that does not remember it")
