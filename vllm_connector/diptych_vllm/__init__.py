"""The hinge inside vLLM: a KV connector that hands KV over under leases, as our own engine does.

Only `connector` imports vLLM, and nothing here imports torch. Everything else is pure, or drives a
hinge, and is used without either.
"""
