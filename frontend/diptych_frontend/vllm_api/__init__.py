"""Routes of vLLM beyond those of the OpenAI API, in vLLM's shapes."""
