"""Splits a model's output into its reasoning and its answer. It uses no tokenizer and performs no
I/O."""
