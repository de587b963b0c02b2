"""`diptych bench`: load on an API of OpenAI's kind, and what its users saw."""
