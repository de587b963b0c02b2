"""The utility calls about an engine core's weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diptych_engine.control.sleep import Weights
from diptych_protocol import (
    InvalidRequestError,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

if TYPE_CHECKING:
    from diptych_engine.control.core import EngineCore

log = logging.getLogger(__name__)


class WeightCalls:
    """The utility calls that replace weights. Each runs between two steps."""

    def __init__(self, core: EngineCore, forget_everything: Callable[[], None]) -> None:
        """`forget_everything` drops everything that the old weights computed."""
        self._core = core
        self._forget_everything = forget_everything

    @property
    def calls(self) -> tuple[Callable[..., Any], ...]:
        return (
            self.init_weight_transfer_engine, self.start_weight_update, self.update_weights,
            self.finish_weight_update, self.reload_weights,
        )  # fmt: skip

    def init_weight_transfer_engine(self, init_request: WeightTransferInitRequest) -> None:
        """Join the process group of a trainer, if `init_info` names one.

        Without one, weights come inside the messages. Blocks until the group is complete. Raises
        `InvalidRequestError` for a bad address and while requests run, which would stand still;
        `DiptychError` if nobody answers in time.
        """
        if init_request.init_info:
            if not self._core.scheduler.quiet:
                raise InvalidRequestError("pause generation first: requests run", status=409)
            self._core.runner.collective_rpc("_join_trainer", (init_request.init_info,))

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Begin an update. Raises `InvalidRequestError` unless generation is paused and nothing
        runs."""
        self._require_rest()
        ranks = len(self._core.runner.collective_rpc("rank"))
        if ranks > 1 and not is_checkpoint_format:
            raise InvalidRequestError(
                "each tensor-parallel rank lays out a share of its own: send the checkpoint format"
            )
        self._core.weights.start(is_checkpoint_format)

    def _require_rest(self) -> None:
        core = self._core
        if not core.scheduler.paused or not core.scheduler.quiet:
            raise InvalidRequestError("pause generation first", status=409)
        if core.residency.weights is not Weights.LOADED:
            raise InvalidRequestError("the engine's weights are asleep; wake them up", status=409)

    def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        """Replace some weights. If that fails, the whole update has failed.

        Raises `InvalidRequestError` for tensors that do not fit, `DiptychError` if some were lost.
        """
        update = self._core.weights
        update.require_open()
        try:
            self._require_rest()
            of_ranks = self._core.runner.collective_rpc(
                "_put_weights",
                (request.names, request.update_info, update.is_checkpoint_format),
                {"arrays": request.arrays},
            )
        except Exception as exc:
            update.fail(str(exc), changed=not isinstance(exc, InvalidRequestError))
            log.warning("a weight update failed: %s", exc)
            raise
        update.updated.update(zip(request.names, of_ranks[0], strict=True))

    def finish_weight_update(self) -> None:
        """Use the new weights. Results of the old ones are not used again.

        Raises `InvalidRequestError` outside an update, or if tensors of a failed one remain.
        """
        update = self._core.weights
        update.require_open()
        self._require_rest()
        form = update.is_checkpoint_format
        names = self._core.runner.collective_rpc("_weight_names", (form,))[0]
        count = len(update.updated)
        update.finish(names)
        self._forget()
        log.info("%d tensors of the model were replaced", count)

    def reload_weights(self) -> None:
        """Load the weights from the model's source again, even after a failed update. What its
        headers refuse changes nothing. If it fails later, so has an update: some were read.

        Raises `InvalidRequestError` unless generation is paused and nothing runs.
        """
        self._require_rest()
        self._core.runner.collective_rpc("_check_weights")
        try:
            self._core.runner.collective_rpc("_reload_weights")
            sample = self._core.runner.collective_rpc("_sample_weights")[0]
        except Exception as exc:
            self._core.weights.fail(str(exc), changed=True)
            log.warning("the weights were not read again: %s", exc)
            raise
        self._core.weights.reset(sample)
        self._forget()

    def _forget(self) -> None:
        connector = self._core.connector
        if connector is not None:
            connector.revoke_all()
        self._forget_everything()
