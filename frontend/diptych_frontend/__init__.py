"""Everything between a user and an EngineCore: text, tokens, clients of a core, the OpenAI API."""
