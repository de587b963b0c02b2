"""The processes and objects that callers use: the core's server, `LLM`, lockstep with other
engines."""
