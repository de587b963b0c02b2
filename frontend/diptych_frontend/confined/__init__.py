"""Processes that work on untrusted content: limited in memory and time, and easy to end."""
