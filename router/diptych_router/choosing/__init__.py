"""Which engines serve a request: what is known of both pools, and the policies. No I/O."""
