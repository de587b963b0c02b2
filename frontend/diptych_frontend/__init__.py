"""Everything between users and engine cores: text, tokens, clients of a core, the OpenAI API."""
