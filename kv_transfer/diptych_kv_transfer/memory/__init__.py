"""The memory of KV blocks: regions, shards, their layout, staging and repacking."""
