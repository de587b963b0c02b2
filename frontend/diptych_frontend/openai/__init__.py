"""The OpenAI-compatible routes, and the server and layers in front of all routes."""
