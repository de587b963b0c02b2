"""What was observed, and what the status says of it."""
