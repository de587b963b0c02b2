"""How requests get to engines: attempts, who has which request, and who waits for what."""
