"""How bytes get from one engine to another: UCX, its bindings, and same-host copies."""
