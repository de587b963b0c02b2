"""The state machines of a hand-off, without I/O: leases, loads, messages between engines."""
