"""The API's description: /openapi.json for programs, /docs for people."""
