"""Everything that a long run must have seen, by name, and the words by which it is told apart.

Faults are counted where they are injected; refusals and failures where the real code utters them.
"""

from __future__ import annotations

from collections.abc import Mapping

LEASE_REFUSALS = {
    "unknown lease": "it is unknown",
    "the lease has released": "it was read before",
    "the lease has revoked": "it was revoked",
    "the lease has expired": "it has expired",
    "the lease has withdrawn": "it was withdrawn",
    "the lease is being read": "somebody reads it",
    "the lease is for another prompt": "it is for another prompt",
    "the lease is ": "it has ended, and is still being sent",
    "more blocks are asked for": "it has fewer blocks",
    "the lease has no blocks": "it has no such blocks",
    "nothing of the prefix": "nothing of the prefix is remembered",
    "another reader asks": "somebody asks for a lease of this id",
    "no block of the prefix": "no block of a prefix is asked for",
    "behind the end of the prefix": "blocks behind the end of a prefix are asked for",
}
"""What P answers a reader: words in it, and what they say."""

LOAD_FAILURES = {
    **dict.fromkeys(LEASE_REFUSALS, "P refused"),
    "cannot connect": "cannot connect",
    "connection to the prefill engine was lost": "connection lost",
    "broke the protocol": "P broke the protocol",
    "receiving blocks failed": "completion error",
    "ended while its blocks were read": "the lease ended during the read",
    "speaks version": "another version of the protocol",
    "was restarted or replaced": "another epoch",
    "cannot exchange KV": "another fingerprint",
    "no hand-off within": "time",
    "cancelled": "cancelled",
}
"""Why D gives a load up."""

ENGINE_REFUSALS = {
    "the KV hand-off failed": "the hand-off failed",
    "too many requests wait": "it is full",
    "still on its way": "KV for the same id is on its way",
    "leave no room": "too long",
    "tokens of KV do not fit": "KV for more tokens than it has",
    "blocks for": "blocks that do not fit",
    "lease of this id already": "a lease of this id exists",
    "32 hexadecimal digits": "a lease id that is none",
    "exclude each other": "both sides at once",
    "do_remote_prefill needs": "no lease is named",
    "first_token_ids": "first tokens that do not fit",
    "no engine of this service": "nobody has signed it",
    "another prompt, adapter or salt": "lent for other tokens",
    "used here before": "used before",
    "at another router": "its client came back elsewhere",
    "kv_transfer_params: ": "parameters that are none",
}
"""Why engines answer requests with an error."""

UTILITY_REFUSALS = {
    "Server shutting down": "the engine leaves",
    "is asleep": "the engine is asleep",
    "leave no room": "announced, but too long",
    "tokens of KV do not fit": "announced, but it does not fit",
    "no engine of this service": "nobody has signed it",
    "kv_transfer_params: ": "parameters that name no lease",
}
"""Why engines refuse utility calls."""

ROUTER_FAILURES = {
    "no other engine has room": "all engines are full",
    "requests wait already; retry": "too many wait for an engine",
    "no engine within": "no engine in time",
    "the KV hand-off failed": "too many hand-offs failed",
    "gave it up": "too many engines gave it up",
    "": "too many engines were lost or failed",
}
"""Why routers let requests fail."""

FORGED = "forged: "
REFUSED = "refused by {role}: "


def named(said: str, words: Mapping[str, str]) -> str:
    """The name of what is said; all of it, if that is nothing known."""
    return next((name for part, name in words.items() if part in said), said)


def refused_by_engine(role: str, error: str) -> str:
    """The name of an engine's last word on a request."""
    return f"refused by {role}: {named(error, ENGINE_REFUSALS)}"


def _each(prefix: str, names: Mapping[str, str]) -> list[str]:
    return [prefix + name for name in dict.fromkeys(names.values())]


SECTIONS: dict[str, list[str]] = {
    "The network": [
        "message late", "message dropped", "message lost with its connection",
        "message duplicated", "message overtaken", "connection cut", "line cut",
        "partition: engines", "partition: router", "partition: client", "partition healed",
        "connect failed", "connect hangs", "send could not be posted",
        "receive could not be posted", "completion error: sender", "completion error: receiver",
        "completion error: sender and receiver", "peer cut off",
    ],
    "Machines": [
        *(f"{role} {fate}" for role in ("prefill", "decode")
          for fate in ("crashed", "restarted", "left", "stalled", "resumed", "drains", "paused",
                       "fell asleep: level 1", "fell asleep: level 2")),
        "turned to prefill", "turned to decode", "router crashed", "router restarted",
        "restarted with another model", "restarted with another version",
    ],
    "Steps": ["step launched ahead"],
    "Memory": [
        "preempted on prefill", "preempted on decode", "prefix evicted on prefill",
        "prefix evicted on decode",
    ],
    "Aborts, by where the request was": [
        f"aborted: {where}"
        for where in (
            "waiting on prefill", "running on prefill", "preempted on prefill",
            "waiting on decode", "waiting_for_remote_kv on decode", "running on decode",
            "preempted on decode", "held by its router", "between engines",
        )
    ],
    "What engines answer requests": [
        "refused by prefill: it is full", "refused by decode: it is full",
        "refused by an engine: it leaves",
        *(f"refused by decode: {name}" for name in (
            "the hand-off failed", "KV for the same id is on its way", "too long",
            "KV for more tokens than it has", "blocks that do not fit", "both sides at once",
            "no lease is named", "first tokens that do not fit", "parameters that are none",
            "nobody has signed it", "lent for other tokens", "used before",
        )),
        *(f"refused by prefill: {name}" for name in (
            "a lease of this id exists", "a lease id that is none", "too long",
        )),
        *_each("refused call: ", UTILITY_REFUSALS),
        "announced: blocks reserved", "announced: only connected",
        "hand_off asked for", "hand_off refused or not answered", "handed off by a decode engine",
    ],
    "What P answers readers": [
        *_each("lease refused: ", LEASE_REFUSALS), "read not confirmed",
        "lease expired during a read",
    ],
    "Prefixes": [
        "prefix to be fetched", "prefix lent", "prefix lent in part", "prefix fetched",
        "prefix late", "prefix not fetched",
    ],
    "Why D gives loads up": [
        *_each("load failed: ", LOAD_FAILURES), "nobody came for it",
    ],
    "What routers do about it": [
        "router lost an engine", "router suspects an engine", "new attempt",
        "first token too late for a router",
        "a router gives a lease back", "answer goes on at another router: whole",
        "answer goes on at another router: a part",
        "prompt computed by a decode engine", *_each("failed by a router: ", ROUTER_FAILURES),
    ],
    "How it ended": [
        "lease released", "lease revoked", "lease expired", "lease withdrawn", "load ok",
        "load failed", "request whole", "request ended with an error", "request aborted",
        "request lost with who served it", "request refused: no router",
    ],
}  # fmt: skip
"""What must have happened, beside every fault at every moment, every forgery and every stranger."""
