"""`diptych bench`: puts load on an OpenAI-compatible API and measures what its users see."""
