"""What becomes of requests: the table that decides it, and the pools that it is carried out in."""
