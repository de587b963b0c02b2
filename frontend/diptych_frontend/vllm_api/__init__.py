"""Routes that vLLM has beside those of the OpenAI API, in vLLM's shapes."""
