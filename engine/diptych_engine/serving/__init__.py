"""The processes and objects that callers meet: the core's server, `LLM`, lockstep with peers."""
