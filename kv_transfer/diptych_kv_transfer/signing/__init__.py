"""Authentication between engines: keys, signed references, the handshake of a connection."""
