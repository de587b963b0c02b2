"""What the service promises to each request: see docs/promises.md."""
