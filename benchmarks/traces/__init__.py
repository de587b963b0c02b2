"""Traces of requests: what users asked for and when, without what they said."""
