"""The utility calls that pause, put to sleep, reset and profile one engine, or reach its workers.

Calls that have to wait for steps or for the hinge return a `Future`, and do their work between two
steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from diptych_engine.control.sleep import Weights, check_level, check_tags
from diptych_protocol import DiptychError, InvalidRequestError, PauseMode, UtilityError, wire
from diptych_protocol.control_calls import StartProfile

if TYPE_CHECKING:
    from diptych_engine.control.core import EngineCore

log = logging.getLogger(__name__)

NO_MULTIMODAL_MODEL = "no multimodal model is loaded: there is nothing to forget"


class Controls:
    """The control calls of one core's owner."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def calls(self) -> tuple[Callable[..., Any], ...]:
        """The functions that a client may name in a utility call."""
        return (
            self.pause_generation, self.resume_generation, self.is_paused,
            self.sleep, self.wake_up, self.is_sleeping,
            self.reset_prefix_cache, self.reset_mm_cache, self.reset_encoder_cache,
            self.start_profile, self.stop_profile, self.collective_rpc,
        )  # fmt: skip

    # --- pause --------------------------------------------------------------------------------

    def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[None]:
        """Pause. The answer comes when nothing runs any more, and the last outputs are sent.

        A pause replaces the one before. New requests wait for its end.
        """
        self._close_gate(mode)
        return self._core.deferred.when(
            self._at_rest, self._forget_computed if clear_cache else _nothing
        )

    def resume_generation(self) -> None:
        """End the pause; harmless without one. Raises `InvalidRequestError` while asleep, or while
        weights are being replaced."""
        self._require_model()
        self._core.scheduler.end_pause()

    def is_paused(self) -> bool:
        return self._core.scheduler.paused

    def _require_model(self) -> None:
        """Raises `InvalidRequestError` while no step can be computed."""
        obstacle = self._core.weights.obstacle
        if obstacle is not None:
            raise InvalidRequestError(obstacle, status=409)
        if not self._core.residency.complete:
            raise InvalidRequestError("the engine is asleep; wake it up first")

    def _close_gate(self, mode: PauseMode) -> None:
        """Raises `InvalidRequestError` if requests are to end for which there is no model now."""
        scheduler = self._core.scheduler
        if mode == "wait" and scheduler.view().any_begun:
            self._require_model()
        scheduler.pause(mode)
        if mode == "abort":
            self._core.abort_all()

    def _at_rest(self) -> bool:
        """Raises `DiptychError` when the pause has ended before its time."""
        if not self.is_paused():
            raise DiptychError("generation was resumed before everything had come to rest")
        return all(holds() for holds in self._core.rest_conditions)

    # --- sleep --------------------------------------------------------------------------------

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[None]:
        """Pause, then release memory. The answer comes when that is done.

        Leases are revoked first, because nobody may read the KV cache while it goes; in the mode
        `wait` they are read first. Requests that are kept and would receive KV compute it here
        instead.
        """
        check_level(level)
        self._close_gate(mode)
        if level == 0:
            return self._core.deferred.when(self._at_rest, _nothing)
        if mode == "keep":
            self._discard_loads()
        else:
            self._cancel_loads(self._core.scheduler.early.drop_all())
        if mode != "wait" and self._core.connector is not None:
            self._core.connector.revoke_all()
        return self._core.deferred.when(self._hinge_at_rest, lambda: self._fall_asleep(level))

    def _hinge_at_rest(self) -> bool:
        store = self._core.hand_offs.store
        reads = store is not None and not store.at_rest
        return self._at_rest() and self._core.scheduler.hinge_at_rest and not reads

    def _fall_asleep(self, level: int) -> None:
        residency, runner = self._core.residency, self._core.runner
        if level == 2 and residency.weights is not Weights.DROPPED:
            runner.collective_rpc("_drop_weights")
            residency.weights = Weights.DROPPED
            self._retire_store()  # other weights may come
        elif residency.weights is Weights.LOADED:
            self._put_weights_aside()
            residency.weights = Weights.ASIDE
        if residency.kv_cache:
            self._forget_kv()
            runner.collective_rpc("_drop_kv_cache")
            residency.kv_cache = False
        log.info("asleep at level %d", residency.level)

    def _put_weights_aside(self) -> None:
        """On all workers, or on none."""
        runner = self._core.runner
        try:
            runner.collective_rpc("_put_weights_aside")
        except BaseException:
            runner.collective_rpc("_restore_weights")
            raise

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore what the tags name. Requests are served again when everything is back."""
        wanted = check_tags(tags)
        residency, runner = self._core.residency, self._core.runner
        if "weights" in wanted and residency.weights is not Weights.LOADED:
            runner.collective_rpc("_restore_weights")
            if residency.weights is Weights.DROPPED:
                self._core.weights.reset(runner.collective_rpc("_sample_weights")[0])
            residency.weights = Weights.LOADED
        if "kv_cache" in wanted and not residency.kv_cache:
            runner.collective_rpc("_restore_kv_cache")
            residency.kv_cache = True
        if residency.complete:
            self.resume_generation()
            log.info("awake")

    def is_sleeping(self) -> bool:
        return self.is_paused() or not self._core.residency.complete

    # --- caches -------------------------------------------------------------------------------

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool | Future[bool]:
        """Forget every cached prefix. False, and nothing changes, if a block is in use.

        reset_running_requests: running requests compute their KV again and repeat no output; this
        always succeeds. reset_connector: leases are revoked first.
        """
        connector = self._core.connector if reset_connector else None
        if connector is not None:
            connector.revoke_all()
        if reset_running_requests:
            self._forget_computed()
            return True
        scheduler, store = self._core.scheduler, self._core.hand_offs.store
        if connector is None and store is None:
            return scheduler.pool.forget_all()

        def only_requests_hold_blocks() -> bool:
            written = store is None or store.at_rest or scheduler.view().any_begun
            return written and (connector is None or not len(scheduler.leased))

        return self._core.deferred.when(only_requests_hold_blocks, self._forget_prefixes)

    def _forget_prefixes(self) -> bool:
        forgotten = self._core.scheduler.pool.forget_all()
        if forgotten:
            self._clear_store()
        return forgotten

    def reset_mm_cache(self) -> str:
        """Forget received images: the next request has to bring its images again. Returns a note
        for the user."""
        forgotten = self._core.images.forget()
        return self._note("reset_mm_cache", f"{forgotten} images have to be sent again")

    def reset_encoder_cache(self) -> str:
        """Forget the features of images, which are then encoded again. Returns a note
        for the user."""
        forgotten = self._forget_features()
        return self._note("reset_encoder_cache", f"{forgotten} images have to be encoded again")

    def _note(self, method: str, note: str) -> str:
        note = note if self._core.images.sees else NO_MULTIMODAL_MODEL
        log.info("%s: %s", method, note)
        return note

    def _forget_features(self) -> int:
        if not self._core.images.sees:
            return 0
        self._core.runner.collective_rpc("_forget_images")
        return self._core.scheduler.encoder.forget_all()

    def forget_everything(self) -> None:
        """Forget all KV, all features of images and all received images. No request uses what was
        computed before.

        Lent blocks stay as they are, unless their prompt is still being computed, because KV from
        before and after must not be in one lease.
        """
        self._forget_kv()
        self._retire_store()

    def _forget_computed(self) -> None:
        self._forget_kv()
        self._clear_store()

    def _clear_store(self) -> None:
        if self._core.hand_offs.store is not None:
            self._core.hand_offs.store.clear()

    def _retire_store(self) -> None:
        """What is on disk, or kept, is of the weights that the engine has started with."""
        if self._core.hand_offs.kept is not None:
            self._core.hand_offs.kept.retire()
        if self._core.hand_offs.store is not None:
            self._core.hand_offs.store.retire()

    def _forget_kv(self) -> None:
        self._core.scheduler.preempt_all()
        self._core.hand_offs.withdraw_lent()
        self._discard_loads()
        self._core.scheduler.pool.forget_all(even_held=True)
        self._core.images.forget()
        self._forget_features()

    def _discard_loads(self) -> None:
        """Use nothing of what the hinge brings from now on: its requests compute their prompts
        here."""
        self._cancel_loads(self._core.scheduler.discard_loads())

    def _cancel_loads(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._core.connector is not None:
                self._core.connector.cancel_load(request_id)

    # --- profile ------------------------------------------------------------------------------

    def start_profile(self, profile_prefix: str | None = None) -> None:
        StartProfile(profile_prefix)  # which checks it
        self._core.runner.collective_rpc("_start_profile", (profile_prefix or "",))

    def stop_profile(self) -> list[str]:
        """Return the files that were written, one per worker; none if no profile ran."""
        files = self._core.runner.collective_rpc("_stop_profile")
        return [file for file in files if file is not None]

    # --- workers ------------------------------------------------------------------------------

    def collective_rpc(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Run a public worker method on every rank, between two steps; return the results in the
        order of the ranks.

        Raises `InvalidRequestError` for an unknown name, `UtilityError` with the message of an
        error in the method, or if its result cannot be sent.
        """
        if method.startswith("_"):
            raise InvalidRequestError(f"the worker method {method!r} is not for clients")
        self._retire_store()  # it may write to the weights
        try:
            results = self._core.runner.collective_rpc(method, args, kwargs)
            wire.encoder.encode(results)
        except DiptychError:
            raise
        except Exception as exc:  # it fails the call, not the engine
            raise UtilityError(f"{method}: {type(exc).__name__}: {exc}") from exc
        return results


def _nothing() -> None:
    """Being at rest is all that was asked for."""
