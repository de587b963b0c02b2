"""What all lines of one router to vLLM servers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from diptych_protocol import RouterConfig
from diptych_protocol.config import Connector
from diptych_router.vllm.description import ServedModel
from diptych_router.vllm.references import References

Doubt = Callable[[str], None]
"""Called with a reason: hand-offs of an engine are not to be trusted until it is verified again."""


@dataclass(frozen=True, slots=True)
class VllmService:
    """The model, how KV is handed over, and which hand-offs are on their way."""

    model: ServedModel
    connector: Connector
    lease_seconds: float
    references: References
    _doubts: dict[str, Doubt] = field(default_factory=dict)
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

    def listen(self, address: str, doubt: Doubt) -> None:
        """`doubt` is called when something speaks against the server at this address."""
        self._doubts[address] = doubt

    def cease(self, address: str) -> None:
        self._doubts.pop(address, None)

    def doubt(self, addresses: Iterable[str], why: str) -> None:
        """Something speaks against these servers."""
        for address in addresses:
            doubt = self._doubts.get(address)
            if doubt is not None:
                doubt(why)
