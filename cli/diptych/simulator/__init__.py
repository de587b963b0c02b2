"""A discrete-event simulator of prefill and decode pods, whose routers decide as real ones do."""
