"""The OpenAI-compatible HTTP face of any `EngineClient`."""

from diptych_frontend.openai.app import build_app
from diptych_frontend.openai.server import listen, serve_http, serve_on

__all__ = ["build_app", "listen", "serve_http", "serve_on"]
