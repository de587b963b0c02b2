"""Builds an engine from its parts."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from diptych_engine.control.controls import Controls
from diptych_engine.control.core import EngineCore
from diptych_engine.control.image_intake import ImageIntake
from diptych_engine.control.weight_calls import WeightCalls
from diptych_engine.execution.grammar_compiler import GrammarCompiler
from diptych_engine.execution.placement import choose_device, choose_dtype
from diptych_engine.execution.processor import give_freed_memory_back, keep_freed_memory
from diptych_engine.execution.runner import ModelRunner
from diptych_engine.execution.worker_extension import named
from diptych_engine.handoff.block_copies import for_the_hinge
from diptych_engine.handoff.block_files import BlockFiles
from diptych_engine.handoff.block_store import BlockStore
from diptych_engine.handoff.kept_blocks import KeptBlocks, KeptFiles
from diptych_engine.models.loader import weights_sample, weights_stamp
from diptych_engine.parallel.lead import LeadRunner
from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.encoder_cache import EncoderCache
from diptych_engine.scheduling.guesses import Stakes
from diptych_engine.scheduling.journey import JourneyLog
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_frontend.model_files.model_source import ModelConfig, ModelSource, resolve_model
from diptych_frontend.processors import processors_in_common, usable_processors
from diptych_kernels.made_once import user_folder
from diptych_kv_transfer import open_connector
from diptych_kv_transfer.transports import transport_named
from diptych_protocol import (
    CurveKeys,
    EngineConfig,
    EngineDeadError,
    EngineDescription,
    InvalidRequestError,
    SchedulerStats,
)
from diptych_protocol.sampling import POOLING_TASKS
from diptych_protocol.threads import model_threads
from diptych_protocol.weights import numbered

log = logging.getLogger(__name__)


def executor_class(config: EngineConfig) -> type[ModelRunner]:
    """Return the class that runs the model. Raises `InvalidRequestError` for an unsuitable one."""
    own: type[ModelRunner] = ModelRunner if config.tensor_parallel_size == 1 else LeadRunner
    if not config.executor_class:
        return own
    chosen: type[ModelRunner] = named(config.executor_class, "executor_class")
    if not (isinstance(chosen, type) and issubclass(chosen, own)):
        raise InvalidRequestError(
            f"executor_class {config.executor_class!r} must be a subclass of {own.__name__}, which "
            f"runs a model on {config.tensor_parallel_size} ranks",
            param="executor_class",
        )
    return chosen


def longest_context(config: EngineConfig, model: ModelConfig, runner: ModelRunner) -> int:
    """Return how many tokens a request may have by the configuration, and with all blocks."""
    limit = config.max_model_len or model.max_position_embeddings
    if runner.kv_groups.windowed:
        return runner.kv_groups.longest(limit, runner.num_blocks)
    return min(limit, runner.num_blocks * config.block_size)


def recipe_of(config: EngineConfig, source: ModelSource, description: EngineDescription) -> bytes:
    """Return what names everything besides tokens that KV depends on."""
    same = {
        field: value
        for field, value in description.compat.items()
        if field not in ("model", "weights", "revision")
    }
    settings = config.block_size, config.weight_packing, config.executor_class
    return repr((sorted(same.items()), *settings)).encode() + weights_stamp(source, config.seed)


def told_to_compute(config: EngineConfig) -> dict[str, str]:
    """Return the settings with which KV is another model's, or less exact. What a processor does by
    itself, as at another level, is not among them: engines on different machines exchange KV."""
    told = {name: getattr(config, name) for name in ("weight_packing", "activations")}
    device, unasked = choose_device(config), msgspec.structs.replace(config, dtype="auto")
    if choose_dtype(config, device) is not choose_dtype(unasked, device):
        told["computed_in"] = config.dtype
    return {name: value for name, value in told.items() if value not in ("auto", "none")}


def as_bytes(memory: Sequence[torch.Tensor]) -> list[NDArray[np.uint8]]:
    """The KV of each rank, in host memory, as [num_blocks, block bytes]."""
    return [blocks.flatten(1).view(torch.uint8).numpy() for blocks in memory]


def start_runner(
    config: EngineConfig, source: ModelSource, stand_by: Callable[[], None]
) -> tuple[ModelRunner, KeptFiles | None]:
    """Load the model; with `kv_keep` its KV lies in files, which are taken after `stand_by`. Raises
    `InvalidRequestError`."""
    start = executor_class(config)
    if not config.kv_keep:
        return start(config, source), None
    if choose_device(config).type != "cpu":
        raise InvalidRequestError(
            "kv_keep must be left out on a GPU, whose memory ends with its process", param="kv_keep"
        )
    taken: list[KeptFiles] = []
    stamp = weights_stamp(source, config.seed)

    def take() -> Sequence[int]:
        stand_by()
        if weights_stamp(source, config.seed) != stamp:
            raise EngineDeadError(f"the weights of {config.model} are others than were loaded")
        try:
            taken.append(KeptFiles(Path(config.kv_keep), config.tensor_parallel_size))
        except OSError as exc:
            why = f"kv_keep: KV cannot be kept: {exc}"
            raise InvalidRequestError(why, param="kv_keep") from exc
        return taken[0].memory_fds

    return start(config, source, kv_memory_fds=take), taken[0]


def keep_blocks(
    config: EngineConfig, files: KeptFiles, recipe: bytes, runner: ModelRunner, scheduler: Scheduler
) -> KeptBlocks:
    """Adopt what a former engine has left in these files, and keep what this one computes. Raises
    `InvalidRequestError` if there is no room."""
    of_one_kind = not runner.kv_groups.windowed and runner.drafter is None
    rows = (2 * runner.layers_per_block, config.block_size) if of_one_kind else None
    kept = KeptBlocks(files, as_bytes(runner.kv_memory()), scheduler.pool, recipe, rows)
    log.info(
        "%d of %d KV blocks and %d open leases were left by a former engine",
        len(kept.adopted) + len(kept.unseen),
        runner.num_blocks,
        len(kept.left),
    )
    return kept


def kept_on_disk(
    config: EngineConfig, recipe: bytes, runner: ModelRunner, scheduler: Scheduler
) -> BlockStore:
    """Open the tier of KV blocks on disk. Raises `InvalidRequestError` where there can be none."""
    memory = runner.kv_memory()
    if runner.kv_groups.windowed or any(blocks.device.type != "cpu" for blocks in memory):
        raise InvalidRequestError(
            "kv_disk_bytes must be 0 on a GPU, and for a model with sliding windows: their blocks "
            "are not kept on disk",
            param="kv_disk_bytes",
        )
    try:
        files = BlockFiles(user_folder("kv"), config.kv_disk_bytes, recipe)
    except (OSError, RuntimeError) as exc:  # RuntimeError: the user has no home
        raise InvalidRequestError(
            f"kv_disk_bytes: no KV blocks can be kept on disk: {exc}", param="kv_disk_bytes"
        ) from exc
    log.info("%d KV blocks were found in %s", len(files), files.folder)
    return BlockStore(files, as_bytes(memory), scheduler)


def build_core(
    config: EngineConfig, keys: CurveKeys | None = None, stand_by: Callable[[], None] = lambda: None
) -> EngineCore:
    """Load the model and build the engine.

    keys: the service's, by which its engines authenticate each other; see `open_connector`.
    stand_by: with `kv_keep`, called before anything is taken that only one core can have; returns
    when this core may take it. Raises `InvalidRequestError` for a configuration or model that
    cannot work.
    """
    config.check()
    source = resolve_model(config.model, vocabulary=True)
    model = source.config
    keep_freed_memory()  # before there are threads
    if config.kv_transfer is not None:
        transport_named(config.kv_transfer.transport)  # which takes longer than the rest to load
    grammars = GrammarCompiler(source, config.reasoning_parser)
    sample = weights_sample(source)
    runner, files = start_runner(config, source, stand_by)
    runner.warm_up()
    vocabulary = grammars.wait_until_ready()
    give_freed_memory_back()  # of the header, most of all
    description = EngineDescription(
        engine_id=config.engine_id or f"engine-{secrets.token_hex(4)}",
        epoch=f"{os.getpid():x}-{secrets.token_hex(8)}",
        model=config.name,
        max_model_len=longest_context(config, model, runner),
        vocab_size=model.vocab_size,
        block_size=config.block_size,
        num_blocks=runner.num_blocks // runner.kv_groups.count,
        dtype=runner.dtype_name,
        compat={
            "model": config.model,
            # What was fetched is a link to a folder named for its content.
            "weights": "" if source.path is None else str(source.path.resolve()),
            "num_layers": runner.layers_per_block,
            "kv_heads": model.num_key_value_heads,
            "head_dim": model.head_dim,
            "dtype": runner.kv_dtype_name,
            "layout": "block-major/1",
            "revision": config.revision,
        }
        | told_to_compute(config)
        | ({"groups": str(runner.kv_groups)} if runner.kv_groups.windowed else {})
        | ({} if runner.drafter is None else {"draft_model": runner.drafter.compat}),
        max_num_seqs=config.max_num_seqs,
        pid=os.getpid(),
        kv_transfer=config.kv_transfer is not None,
        revision=config.revision,
        hidden_size=model.hidden_size,
        pooling=config.pooling,
        tasks=("generate", *POOLING_TASKS),
        scheduling_policy=config.scheduling_policy,
        tracing_enabled=config.otlp_traces_endpoint is not None,
        logits_processors=tuple(config.logits_processors),
        node=config.node,
        zone=config.zone,
        vocabulary=vocabulary,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enough_prompt_tokens=runner.enough_prompt_tokens,
    )
    cpu_level, num_set_aside = runner.cpu_facts
    if cpu_level:
        usable, ranks = usable_processors(), config.tensor_parallel_size
        each = config.num_threads or model_threads(usable, ranks * config.data_parallel_size)
        description.processors = processors_in_common()
        description.processors_part = min(1.0, ranks * each / usable)
    scheduler = Scheduler(
        BlockPool(runner.num_blocks, runner.kv_groups),
        config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_num_waiting,
        config.enable_prefix_caching,
        config.scheduling_policy,
        config.max_idle_sessions,
        journey=JourneyLog() if config.follows_requests else None,
        max_loras=config.max_loras,
        enough_prompt_tokens=runner.enough_prompt_tokens,
        speculation=config.speculative_config,
        spare_rows=runner.spare_rows,
        lost_rows=runner.lost_rows,
        draft_share=runner.draft_share,
        stakes=None
        if config.speculative_config is None
        else Stakes(runner.spare_rows, runner.lost_rows, runner.draft_share),
        encoder=EncoderCache(config.encoder_cache_tokens, config.max_num_batched_tokens),
        stats=SchedulerStats(cpu_level=cpu_level, cpu_kernels_set_aside=num_set_aside),
    )
    recipe = recipe_of(config, source, description) if files or config.kv_disk_bytes else b""
    kept = None if files is None else keep_blocks(config, files, recipe, runner, scheduler)
    connector = mark = None
    if config.kv_transfer is not None:
        kv_memory, mark = for_the_hinge(runner.kv_memory(), config.kv_transfer.staging)
        connector = open_connector(
            config.kv_transfer,
            engine_id=description.engine_id,
            epoch=description.epoch,
            compat=description.compat,
            kv_memory=kv_memory,
            geometry={
                "block_size": config.block_size,
                "tensor_parallel_size": config.tensor_parallel_size,
            },
            keys=keys,
            left=None if kept is None else kept.left,
        )
        description.kv_transfer_host = connector.host
        description.kv_transfer_port = connector.port
        description.kv_transfer_proof = connector.proof
    images = ImageIntake(model.vision, config.encoder_cache_tokens)
    core = EngineCore(
        description, scheduler, runner, connector, grammars, images, runs_ahead=runner.runs_ahead
    )
    core.mark_launched = mark
    core.weights.reset(sample)
    if runner.routed is not None:
        core.hand_offs.before_load = runner.routed.forget
    if kept is not None:
        core.hand_offs.keep(kept)
        core.watched[kept.wake_fd] = kept.seal_more
    if config.kv_disk_bytes:
        store = kept_on_disk(config, recipe, runner, scheduler)
        core.hand_offs.store = store
        description.num_disk_blocks = config.kv_disk_bytes // store.block_bytes
        core.watched[store.wake_fd] = store.handle_events
    core.watched.update(runner.watched)
    core.watched[grammars.wake_fd] = core.take_grammars
    for adapter in numbered(config.lora_modules):
        core.adapters.add_lora(adapter)
    controls = Controls(core)
    weights = WeightCalls(core, controls.forget_everything)
    core.offer(*controls.calls, *core.adapters.calls, *weights.calls)
    return core
