"""The OpenAI-compatible routes, and the server and layers in front of all routes."""

from diptych_frontend.openai.server import Site, listen, serve_http, serve_sites

__all__ = ["Site", "listen", "serve_http", "serve_sites"]
