"""Anthropic's Messages API, for clients that speak only that: a translation of chats."""
