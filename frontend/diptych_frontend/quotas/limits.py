"""How many tokens a key may use, as the lines below the key in its own file say."""

from __future__ import annotations

from typing import Annotated

import msgspec

from diptych_protocol import UNREADABLE, InvalidRequestError

Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class Limits(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Prompt and answer count, whether cached or not. None: as many as one likes."""

    tokens_per_minute: Tokens | None = None
    tokens_per_month: Tokens | None = None
    token_budget: Tokens | None = None
    """A limit for all time."""

    def part(self, of: int) -> Limits:
        """Return the part of each of so many routers that count alone."""
        each = msgspec.structs.asdict(self).items()
        return Limits(**{name: limit and max(limit // of, 1) for name, limit in each})

    def and_of(self, other: Limits) -> Limits:
        """Return the smaller one of each limit."""
        pairs = zip(*map(msgspec.structs.astuple, (self, other)), strict=True)
        return Limits(*(min(filter(None, pair), default=None) for pair in pairs))


NO_LIMITS = Limits()


def read_limits(lines: bytes) -> Limits:
    """Read lines such as `tokensPerMinute: 100000`. Raises `InvalidRequestError`, which quotes
    nothing: the lines may be another key, and the words go into logs and a status."""
    fields: dict[str, str] = {}
    try:
        for line in lines.decode("ascii").split("\n"):
            name, _, number = (part.strip() for part in line.partition(":"))
            if name in fields:
                raise ValueError
            fields[name] = number
        if lines:
            return msgspec.convert(fields, Limits, strict=False)
    except (ValueError, *UNREADABLE):
        names = ", ".join(Limits.__struct_encode_fields__)
        raise InvalidRequestError(f"each line is to be one of {names}, and its number") from None
    return NO_LIMITS
