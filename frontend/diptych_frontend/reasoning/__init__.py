"""Splits what a model writes into its reasoning and its answer. Pure: knows no tokenizer."""
