"""Calls of tools, as models write them: read from answers, and made ready for prompts."""
