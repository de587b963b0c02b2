"""Calls of tools in the formats of models: read from answers, and prepared for prompts."""
