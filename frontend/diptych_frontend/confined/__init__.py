"""Processes for work on what other people made: bounded in memory and time, and easily ended."""
