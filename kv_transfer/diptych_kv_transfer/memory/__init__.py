"""Where blocks lie: regions of memory, shards of blocks, their layout, staging and repacking."""
