"""Converts between text and tokens: templates, tokenizers, options, answers."""
