"""What clients say of the next use of their KV.

`kv_hints` is the envelope that vLLM, SGLang and Dynamo have for that. Two of its actions are known
here: `kv.deref` says that a session has ended, and `kv.prefetch` that a turn is still to come, for
which the KV of this prompt is to be brought.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

import msgspec

from diptych_protocol import RequestOptions

TURN_S: Final = 300
"""How long a next turn is waited for, unless the client says more."""
END: Final = ("kv.deref", "1.0")
PREFETCH: Final = ("kv.prefetch", "1.0")


class KvHint(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any] | None = None


class KvHints(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Actions that nobody here knows ask for nothing."""

    protocol_version: str
    message_id: str
    actions: list[KvHint]


def turn_options(session: str | None, hints: KvHints | None, seconds: int) -> RequestOptions:
    """Say for how long the session's next turn is expected, or that this is its last one."""
    actions = () if hints is None else hints.actions
    asked = {(each.action_type, each.action_version) for each in actions}
    ends = END in asked
    name = (session or "").encode("utf-8", "surrogatepass")
    return {
        "pin_s": 0 if ends else seconds,
        "session": blake2b(name, digest_size=16).hexdigest() if name else "",
        "prefetches": PREFETCH in asked and not ends,
    }
