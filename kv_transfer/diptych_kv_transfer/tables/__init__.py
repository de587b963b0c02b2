"""The state machines of a hand-off: leases, loads, and the messages between engines. They perform
no I/O."""
