"""What happened to each request: the request table writes it, and all reports read it."""
