"""The names of vLLM's V0, thin over the clients and the parameters of this project.

Nothing else imports from here: what V0 called something, or did in another order, stays here. See
docs/decisions/0053-v0-names-in-one-room.md.
"""
