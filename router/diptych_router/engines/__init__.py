"""Each engine of the pools: where it is, the line to it, and what it and requests say of it."""
