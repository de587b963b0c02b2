"""What all lines of one router to vLLM servers have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from diptych_protocol import KVTransferParams, RouterConfig
from diptych_protocol.config import Connector
from diptych_router.engines.vllm.description import ServedModel
from diptych_router.engines.vllm.hand_off import Announcing, announcing_of
from diptych_router.engines.vllm.references import References


class Line(Protocol):
    """A line to one server, as the others see it."""

    def forget(self) -> None:
        """Let the server use nothing of what it remembers now."""

    def doubt(self, why: str) -> None:
        """Hand-offs of the server are not to be trusted until it is verified again."""


@dataclass(frozen=True, slots=True)
class VllmService:
    """The model, how KV is handed over, and which hand-offs are on their way."""

    model: ServedModel
    connector: Connector
    lease_seconds: float
    references: References
    early: set[str] = field(default_factory=set)
    """Leases that decode engines were asked to read before prefill has answered. They generate the
    first token."""
    _announcing: dict[str, Announcing] = field(default_factory=dict)
    """By the addresses of prefill engines that have said it."""
    _lines: dict[str, Line] = field(default_factory=dict)
    """By the addresses of the servers that are described."""

    @classmethod
    def of(cls, config: RouterConfig, vocab_size: int) -> VllmService:
        return cls(
            ServedModel(config.name, vocab_size),
            config.connector,
            config.lease_seconds,
            References(config.lease_seconds),
        )

    @property
    def reads_unchecked(self) -> bool:
        """Decode engines do not check that the blocks that they read are still those of the prompt:
        vLLM's NixlConnector."""
        return self.connector == "nixl"

    def learn(self, address: str, reference: dict[str, Any]) -> None:
        """A prefill engine has lent something."""
        if self.connector == "diptych" and address not in self._announcing:
            announcing = announcing_of(reference)
            if announcing is not None:
                self._announcing[address] = announcing

    def lends(self, address: str) -> KVTransferParams | None:
        """What all leases of a server say of it; None: it has not said that yet."""
        announcing = self._announcing.get(address)
        return None if announcing is None else announcing.engine

    def announced_from(self, engine_id: str) -> int | None:
        """From how many tokens on prompts for an engine's KV are announced; None: never."""
        found = (x for x in self._announcing.values() if x.engine.remote_engine_id == engine_id)
        return min((announcing.min_tokens for announcing in found), default=None)

    def enter(self, address: str, line: Line) -> None:
        """The server at this address has described itself."""
        self._lines[address] = line

    def leave(self, address: str) -> None:
        """It is lost."""
        self._lines.pop(address, None)
        self._announcing.pop(address, None)

    def others(self, address: str) -> Iterator[tuple[str, Line]]:
        """All servers but this one."""
        yield from ((x, line) for x, line in self._lines.items() if x != address)
