"""vLLM's V0 names, as a thin layer over the clients and the parameters of this project.

Nothing else imports from here: V0's other names and orders of arguments stay in this package. See
docs/decisions/0053-v0-names-in-one-room.md.
"""
