"""OpenAI's Responses API: a translation of chats, and a store of answers for those who ask."""
