"""Engines that are vLLM's OpenAI servers: token ids in, token ids out, over HTTP."""
