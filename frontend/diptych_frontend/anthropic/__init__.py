"""Anthropic's Messages API, translated into chats, for clients that use only this API."""
