"""The interface of the wire's service to vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from diptych_protocol import EngineCoreRequest, LoRARequest, PoolingParams
from diptych_protocol.arrays import Array
from diptych_protocol.wire import Abilities, ErrorKind
from diptych_vllm.serve.load import VllmLoad
from diptych_vllm.serve.translation import CoreOutput


class ServedEngine(Protocol):
    """An engine that runs requests."""

    load: VllmLoad
    announced_from: int | None
    """The length, in tokens, from which on announcing a prompt saves time; None: it never does."""

    @property
    def llm(self) -> Any:
        """vLLM's `AsyncLLM`, for the calls that need no translation."""

    @property
    def abilities(self) -> Abilities: ...
    @property
    def adapter_places(self) -> tuple[int, int]:
        """How many adapters a step may use, and how many are kept; 0 if it takes none."""

    @property
    def can_sleep(self) -> bool: ...
    @property
    def remembers(self) -> bool:
        """Whether its prefix cache is on."""

    async def generate(
        self, request: EngineCoreRequest, take: Callable[[CoreOutput], None]
    ) -> None:
        """Run a request to its end; `take` gets each of its outputs. Cancelling aborts it."""

    async def pool(self, request: EngineCoreRequest, params: PoolingParams) -> Array:
        """Return the vectors of a prompt."""

    async def reject(self, params: dict[str, Any]) -> None:
        """Tell the connector that nobody will read the blocks that these parameters name."""

    async def add_lora(self, adapter: LoRARequest) -> bool:
        """Load an adapter under an id that vLLM does not know."""

    def error_of(self, error: Exception) -> tuple[ErrorKind, str | None]:
        """Return the meaning of an exception, and the field that it names."""

    def has_died(self, error: Exception) -> bool:
        """Whether an exception says that the core has ended."""
