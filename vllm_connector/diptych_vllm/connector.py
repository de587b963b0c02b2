"""`DiptychConnector`, which vLLM calls, and its figures in the form of vLLM's `/metrics`. It only
translates.

vLLM loads it by `kv_connector_module_path` and makes one in its scheduler's process and one in each
worker. Only this module imports vLLM.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import Counter
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import iter_layer_specs
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.request import RequestStatus

from diptych_kv_transfer.connector import start_hinge, with_literals
from diptych_kv_transfer.parameters import describe_engine
from diptych_kv_transfer.signing.references import References
from diptych_kv_transfer.tables.messages import Hello
from diptych_protocol import KVTransferParams
from diptych_protocol.config import RANKS_OF_CONNECTOR
from diptych_vllm.figures import FIGURES, add
from diptych_vllm.kv_groups import VllmKVGroups, group_of
from diptych_vllm.kv_memory import compat_of, heads_come_first, needs_copies, shards_of
from diptych_vllm.lending import Progress
from diptych_vllm.orders import Order
from diptych_vllm.ranks import Ranks, epoch_of_rank
from diptych_vllm.request import Arrival, identity_of
from diptych_vllm.scheduler_half import SchedulerHalf
from diptych_vllm.settings import ConnectorSettings, require_tested
from diptych_vllm.versions import series_of
from diptych_vllm.worker_half import WorkerHalf, no_device


class StepFigures(KVConnectorStats):
    """The counts of one step, or of several."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Counters(KVConnectorPromMetrics):
    """One counter for each figure, with vLLM's own labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                metric_types[Counter](
                    name=f"vllm:diptych_{name}", documentation=meaning, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for name, meaning in FIGURES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(number)


if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class StepOrders(KVConnectorMetadata):
    """The scheduler half's orders, on their way to the worker half."""

    orders: Sequence[Order]


@dataclass
class HingeOfWorker(KVConnectorHandshakeMetadata):
    """The worker's hinge's description of itself for the scheduler half."""

    engine: KVTransferParams
    compat: dict[str, str | int]
    """What `engine` has the fingerprint of."""
    proof: str
    """For announcements of this engine."""
    announced_from: int | None
    """See `Lending.announced_from`."""


class DiptychConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands KV over under leases. Raises `InvalidRequestError` for what was not tested."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        _log_as_vllm_does()
        self._vllm = series_of(vllm_version)
        super().__init__(vllm_config, role, kv_cache_config)
        _require_tested(vllm_config)
        self._groups = _groups_of(kv_cache_config)
        settings = ConnectorSettings.parse(self._kv_transfer_config.kv_connector_extra_config)
        settings.require_ports(vllm_config.parallel_config.tensor_parallel_size)
        self._settings = with_literals(settings)
        self._key = self._settings.key()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._hinge: HingeOfWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                References(self._key),
                self._groups,
                self._settings.lease_seconds,
                lends=self._kv_transfer_config.is_kv_producer,
                fetches=self._kv_transfer_config.is_kv_consumer,
                announced_from=_announced_from(vllm_config, self._groups),
            )

    @property
    def _half(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise RuntimeError("this is not the scheduler's half of the connector")
        return self._scheduler

    # --- in the scheduler ---------------------------------------------------------------------

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        # The others listen at the ports behind that of rank 0.
        self._half.meet(metadata[0].engine)

    def on_new_request(self, request: Request) -> None:
        lora = request.lora_request
        has_embeddings = request.prompt_embeds is not None or request.prompt_token_ids is None
        self._half.arrived(
            Arrival(
                request.request_id,
                None if has_embeddings else list(request.prompt_token_ids),
                request.num_prompt_tokens,
                identity_of(
                    request.cache_salt,
                    None if lora is None else lora.lora_name,
                    [feature.identifier for feature in request.mm_features or ()],
                ),
                request.kv_transfer_params,
                rejected=request.abort_immediately,
            )
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens = self._half.num_elsewhere(request.request_id, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._half.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        half = self._half
        if half.promised:
            preempted = half.promised & (scheduler_output.preempted_req_ids or set())
            half.step(_progress(half.promised, scheduler_output), preempted)
        return StepOrders(half.take_orders())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        # vLLM looks up every id of these sets right after this call, and dies of an unknown one.
        connector_output.finished_sending, connector_output.finished_recving = self._half.awaited(
            connector_output.finished_sending or (), connector_output.finished_recving or ()
        )

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = self._half.finished(
            request.request_id,
            block_ids,
            by_length=request.status == RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        return params is not None, params

    def has_pending_push_work(self) -> bool:
        # A step more, so that no order waits for the next request.
        return self._half.has_orders

    def reset_cache(self) -> bool:
        self._half.reset()
        return True

    # --- in the worker ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        copies, launched = None, no_device
        if needs_copies(kv_caches, self._settings.staging):
            # Only here does the connector itself need torch.
            from diptych_vllm.device_copies import copies_of

            copies, launched = copies_of(kv_caches)
        shards = shards_of(kv_caches, self._kv_cache_config.num_blocks, copies)
        group, facts = get_tp_group(), self._facts()
        model = self._vllm_config.model_config
        num_heads = 1 if model.use_mla else model.get_total_num_kv_heads()
        ranks = Ranks(num_heads, group.world_size, group.rank_in_group)
        fit = heads_come_first(kv_caches, str(facts["kv_layout"]), ranks)
        ranks = dataclasses.replace(ranks, heads_first=fit)
        epoch = f"{os.getpid():x}-{secrets.token_hex(8)}"
        epoch = group.broadcast_object(epoch if ranks.rank == 0 else None, src=0)
        me = Hello(
            self._kv_transfer_config.engine_id,
            epoch_of_rank(epoch, ranks.rank, ranks.num_ranks),
            compat_of(kv_caches, facts, ranks),
        )
        settings = self._settings.of_rank(ranks.rank)
        driver = start_hinge(settings, me, shards, self._key)
        self._worker = WorkerHalf(driver, ranks, launched)
        host = settings.advertise_host or settings.listen_host
        engine = describe_engine(me, host, driver.port, settings.lease_seconds)
        engine = msgspec.structs.replace(engine, epoch=epoch, tp_size=ranks.num_ranks)
        self._hinge = HingeOfWorker(
            engine,
            dict(me.compat),
            References(self._key).proof_of_engine(engine),
            _announced_from(self._vllm_config, self._groups),
        )

    def _facts(self) -> dict[str, str | int]:
        """What engines must agree on, and their KV memory does not show."""
        model, cache = self._vllm_config.model_config, self._vllm_config.cache_config
        return {
            "runtime": f"vllm {self._vllm}",
            "model": model.model,
            "weights": model.revision or "",
            "quantization": model.quantization or "",
            "block_size": cache.block_size,
            "cache_dtype": cache.cache_dtype,
            "hf_overrides": str(model.hf_overrides or ""),
            "load_format": str(self._vllm_config.load_config.load_format),
            "kv_layout": str(getattr(self._kv_cache_config, "kv_cache_layout", "")),
            "groups": str(self._groups),
            "group_layers": ";".join(
                " ".join(group.layer_names) for group in self._kv_cache_config.kv_cache_groups
            ),
            "revision": self._settings.revision,
        }

    def get_handshake_metadata(self) -> HingeOfWorker | None:
        return self._hinge

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # Before the forward pass: neither a grant nor a release waits for it.
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepOrders):
            self._worker.obey(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: loads begin when their orders are read."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: whole requests are loaded before they are computed."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are lent in place."""

    def wait_for_save(self) -> None:
        """Do nothing: nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.collect()
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    # --- in both, and in the front-end ----------------------------------------------------------

    def get_kv_connector_stats(self) -> StepFigures | None:
        # A scheduler half that follows no request is false, and has figures all the same.
        half = self._worker if self._scheduler is None else self._scheduler
        figures = None if half is None else half.take_figures()
        return StepFigures(figures) if figures else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StepFigures:
        return StepFigures(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Counters:
        return Counters(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _log_as_vllm_does() -> None:
    """vLLM configures its own loggers only; without this, nothing below a warning is seen."""
    vllm = logging.getLogger("vllm")
    for name in ("diptych_vllm", "diptych_kv_transfer"):
        ours = logging.getLogger(name)
        ours.handlers, ours.propagate = vllm.handlers, False
        ours.setLevel(vllm.level)


def _groups_of(config: KVCacheConfig) -> VllmKVGroups:
    return VllmKVGroups.of(
        [
            group_of(type(x).__name__, x.block_size, getattr(x, "sliding_window", None))
            for x in iter_layer_specs(group.kv_cache_spec)
        ]
        for group in config.kv_cache_groups
    )


def _progress(wanted: Set[str], output: SchedulerOutput) -> dict[str, Progress]:
    """How far a step brings those of these requests that it computes."""
    cached, state = output.scheduled_cached_reqs, output.kv_connector_block_state
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    before |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    progress = {}
    for name in wanted & output.num_scheduled_tokens.keys():
        blocks = None if state is None else state.get_block_ids(name)
        if blocks is not None:
            num_tokens = before[name] + output.num_scheduled_tokens[name]
            progress[name] = Progress(num_tokens, blocks)
    return progress


def _announced_from(config: VllmConfig, groups: VllmKVGroups) -> int | None:
    """See `Lending.announced_from`."""
    scheduler = config.scheduler_config
    if not scheduler.enable_chunked_prefill or not groups.one_whole:
        return None
    in_a_step = int(scheduler.max_num_batched_tokens)
    return min(in_a_step, int(scheduler.long_prefill_token_threshold) or in_a_step) + 1


def _require_tested(config: VllmConfig) -> None:
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    guessing = config.speculative_config
    require_tested(
        [
            (
                f"tensor_parallel_size of {' or '.join(map(str, RANKS_OF_CONNECTOR))}",
                parallel.tensor_parallel_size in RANKS_OF_CONNECTOR,
                True,
            ),
            ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
            ("data_parallel_size", parallel.data_parallel_size, 1),
            ("decode_context_parallel_size", parallel.decode_context_parallel_size, 1),
            ("prefill_context_parallel_size", parallel.prefill_context_parallel_size, 1),
            ("kv_load_failure_policy", transfer.kv_load_failure_policy, "fail"),
            # Other methods have a model, whose KV would have to be handed over too.
            (
                "speculative_config.method",
                "ngram" if guessing is None else guessing.method,
                "ngram",
            ),
            ("sleep mode", config.model_config.enable_sleep_mode, False),
        ]
    )
