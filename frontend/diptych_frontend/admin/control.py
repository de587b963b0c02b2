"""Pausing, sleeping, resetting and profiling by HTTP, on the admin port of an engine pod.

Bodies are JSON objects, all of whose fields may be left out, and so may the body; an answer comes
when the call is done. What the engine refuses in its present state is answered with 409.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.admin.calls import body_of, report
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.control import CALL_TIMEOUT_S, MOVE_TIMEOUT_S
from diptych_protocol import InvalidRequestError, PauseMode, UtilityError

Handler = Callable[[Request], Awaitable[Response]]


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    mode: PauseMode = "abort"
    clear_cache: bool = True


class Sleep(msgspec.Struct, forbid_unknown_fields=True):
    level: Literal[0, 1, 2] = 1
    mode: PauseMode = "abort"


class WakeUp(msgspec.Struct, forbid_unknown_fields=True):
    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None


class ResetPrefixCache(msgspec.Struct, forbid_unknown_fields=True):
    reset_running_requests: bool = False
    reset_connector: bool = False


class RejectKVTransfer(msgspec.Struct, forbid_unknown_fields=True):
    request_id: str
    kv_transfer_params: dict[str, Any]


class ControlReport(msgspec.Struct, frozen=True):
    """Whether the engine works."""

    is_paused: bool
    is_sleeping: bool
    sleep_level: int
    """0: everything is in memory; 1: the weights are put aside; 2: they are dropped."""


class ResetReport(msgspec.Struct, frozen=True, omit_defaults=True):
    done: bool
    """False: blocks are in use, and nothing was forgotten."""
    note: str = ""


class ProfileReport(msgspec.Struct, frozen=True):
    files: list[str]
    """The traces that were written, in the engine's pod."""


class Done(msgspec.Struct, frozen=True):
    done: bool = True


class ControlRoutes:
    """Routes for `build_admin_app`."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        asks = (self.is_paused, self.is_sleeping)
        acts = (
            self.pause, self.resume, self.sleep, self.wake_up,
            self.reset_prefix_cache, self.reset_mm_cache, self.reset_encoder_cache,
            self.start_profile, self.stop_profile, self.reject_kv_transfer,
        )  # fmt: skip
        return [
            *(Route(f"/admin/{ask.__name__}", ask) for ask in asks),
            *(Route(f"/admin/{act.__name__}", refusable(act), methods=["POST"]) for act in acts),
        ]

    # --- pause and sleep ----------------------------------------------------------------------

    async def is_paused(self, request: Request) -> Response:
        return await self._state()

    async def is_sleeping(self, request: Request) -> Response:
        return await self._state()

    async def pause(self, request: Request) -> Response:
        wanted = await body_of(request, Pause)
        await self._engine.pause_generation(mode=wanted.mode, clear_cache=wanted.clear_cache)
        return await self._state()

    async def resume(self, request: Request) -> Response:
        await self._engine.resume_generation()
        return await self._state()

    async def sleep(self, request: Request) -> Response:
        wanted = await body_of(request, Sleep)
        await self._engine.sleep(wanted.level, wanted.mode)
        return await self._state()

    async def wake_up(self, request: Request) -> Response:
        await self._engine.wake_up((await body_of(request, WakeUp)).tags)
        return await self._state()

    async def _state(self) -> Response:
        stats = await self._engine.refresh_stats()
        asleep = stats.paused or stats.sleep_level > 0
        return report(ControlReport(stats.paused, asleep, stats.sleep_level))

    # --- caches -------------------------------------------------------------------------------

    async def reset_prefix_cache(self, request: Request) -> Response:
        wanted = await body_of(request, ResetPrefixCache)
        done = await self._engine.reset_prefix_cache(
            wanted.reset_running_requests, wanted.reset_connector
        )
        return report(ResetReport(done))

    async def reset_mm_cache(self, request: Request) -> Response:
        return await self._reset("reset_mm_cache")

    async def reset_encoder_cache(self, request: Request) -> Response:
        return await self._reset("reset_encoder_cache")

    async def _reset(self, method: str) -> Response:
        note = await self._engine.call_core(method, timeout_s=CALL_TIMEOUT_S)
        return report(ResetReport(True, note))

    # --- profile ------------------------------------------------------------------------------

    async def start_profile(self, request: Request) -> Response:
        await self._engine.start_profile()
        return report(Done())

    async def stop_profile(self, request: Request) -> Response:
        with self._engine.silence_expected():
            files = await self._engine.call_core("stop_profile", timeout_s=MOVE_TIMEOUT_S)
        return report(ProfileReport(files))

    # --- the hinge ----------------------------------------------------------------------------

    async def reject_kv_transfer(self, request: Request) -> Response:
        """Somebody refused a request before admission: free what is held for it."""
        refused = await body_of(request, RejectKVTransfer)
        await self._engine.notify_kv_transfer_request_rejected(
            refused.request_id, refused.kv_transfer_params
        )
        return report(Done())


def refusable(act: Handler) -> Handler:
    """What the engine refuses now it may do in another state: a conflict, not a defect."""

    async def handler(request: Request) -> Response:
        try:
            return await act(request)
        except UtilityError as exc:
            raise InvalidRequestError(str(exc), status=409, code="refused") from exc

    return handler
