"""What happened to each request: written by the request table, read by all who tell of it."""
