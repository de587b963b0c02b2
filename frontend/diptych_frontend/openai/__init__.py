"""The OpenAI-compatible HTTP face of any `EngineClient`."""

from diptych_frontend.openai.app import build_app
from diptych_frontend.openai.server import Site, listen, serve_http, serve_sites

__all__ = ["Site", "build_app", "listen", "serve_http", "serve_sites"]
