"""Judges the health of engines: by heartbeats, outcomes of requests, and room."""
