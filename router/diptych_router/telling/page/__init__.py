"""The page at `/` of a router: a chat, and both pools beside it; docs/page.md describes it."""
