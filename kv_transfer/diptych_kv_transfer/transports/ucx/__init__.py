"""The transport over UCX: connections, blocks through them, and blocks read on one host."""
