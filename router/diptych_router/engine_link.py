"""The router's line to one engine core, kept up for as long as discovery names its address."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from diptych_frontend.core_client import CoreClient
from diptych_protocol import (
    CurveKeys,
    EngineCoreOutputs,
    EngineDeadError,
    EngineDescription,
    SchedulerStats,
    UtilityError,
)

log = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]

DESCRIBE_TIMEOUT_S = 30.0
RETRY_S = 0.2


class EngineLink:
    """One engine of a pool. `description` is None while nobody answers there."""

    def __init__(
        self,
        role: Role,
        endpoint: str,
        keys: CurveKeys | None,
        *,
        on_up: Callable[[EngineLink], None],
        on_outputs: Callable[[EngineLink, EngineCoreOutputs], None],
        on_lost: Callable[[EngineLink, EngineDeadError], None],
    ) -> None:
        self.role: Role = role
        self.endpoint = endpoint
        self.description: EngineDescription | None = None
        self.stats = SchedulerStats()
        self.listed = True
        """Discovery still names it; an engine that is not listed gets no new requests."""
        self.open_tokens = 0
        """Tokens of work that this router has open here."""
        self._on_up = on_up
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._gone = asyncio.Event()
        self.client = CoreClient(
            endpoint, keys, on_outputs=self._handle_outputs, on_lost=self._handle_lost
        )
        self._task = asyncio.create_task(self._keep_described(), name=f"link {endpoint}")

    @property
    def key(self) -> str:
        """What the router files it under: an address plays one role."""
        return f"{self.role} {self.endpoint}"

    @property
    def name(self) -> str:
        return self.description.engine_id if self.description is not None else self.endpoint

    @property
    def usable(self) -> bool:
        return self.listed and self.description is not None

    def close(self) -> None:
        self._task.cancel()
        self.client.close()

    async def _keep_described(self) -> None:
        """Learn who answers at the endpoint, now and after every loss."""
        while True:
            try:
                description = await self.client.describe(DESCRIBE_TIMEOUT_S)
            except (EngineDeadError, UtilityError, TimeoutError) as exc:
                log.debug("%s engine at %s: %s", self.role, self.endpoint, exc)
                await asyncio.sleep(RETRY_S)
                continue
            self._gone.clear()
            self.description = description
            log.info("%s engine %s is up (%s)", self.role, self.name, self.endpoint)
            self._on_up(self)
            await self._gone.wait()

    def _handle_outputs(self, message: EngineCoreOutputs) -> None:
        if message.scheduler_stats is not None:
            self.stats = message.scheduler_stats
        self._on_outputs(self, message)

    def _handle_lost(self, cause: EngineDeadError) -> None:
        if self.description is not None:
            log.warning("%s engine %s is lost: %s", self.role, self.name, cause)
            self.description = None
            self.open_tokens = 0
            self._gone.set()
            self._on_lost(self, cause)
