"""Authentication between engines: the service's keys, signed references, the handshake of a
connection."""
