"""Requests of the router's own, which prove engines before users' requests go there."""
