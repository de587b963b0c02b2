"""OpenAI's Responses API: translates to and from chats, and stores answers on request."""
