"""Which request gets which tokens and blocks in the next step: pure state machines, no torch."""
