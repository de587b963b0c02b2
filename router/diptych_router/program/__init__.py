"""One process that serves the router: its command line, its parts, its admin port."""
