"""The page at `/` of a router: a chat, and both pools beside it; docs/decisions/0077."""
