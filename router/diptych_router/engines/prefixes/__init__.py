"""Which engine holds which prefixes: what engines say of it, and what was just sent to them."""
