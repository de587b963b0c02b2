"""Runs the model: it takes a step's plan and returns sampled tokens. It does all device work of a
step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych_engine.execution.batch_rows import BatchRows, order_of
from diptych_engine.execution.drafter import Drafter, draft_source
from diptych_engine.execution.kv_cache_size import blocks_in, bytes_for_kv
from diptych_engine.execution.kv_memory import KVMemory
from diptych_engine.execution.layer_groups import LayerGroups, divided, one_group
from diptych_engine.execution.placement import (
    LOST_ROWS_ON_A_GPU,
    SPARE_ROWS_ON_A_CPU,
    SPARE_ROWS_ON_A_GPU,
    block_bytes,
    block_shape,
    choose_bits,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    enough_prompt_tokens,
)
from diptych_engine.execution.pooling import Pooler
from diptych_engine.execution.processor import (
    CpuKernels,
    choose_level,
    give_freed_memory_back,
    keep_freed_memory,
)
from diptych_engine.execution.profiler import Profiler
from diptych_engine.execution.prompt_embeds import PromptEmbeds
from diptych_engine.execution.prompt_logprobs import PromptLogprobs
from diptych_engine.execution.routed_experts import RoutedExperts, check_routed
from diptych_engine.execution.row_options import load_processors
from diptych_engine.execution.sampler import Sampler
from diptych_engine.execution.worker_extension import extension_methods
from diptych_engine.execution.worker_memory import WorkerMemory
from diptych_engine.lora.bank import LoraBank
from diptych_engine.models import (
    StepInputs,
    build_model,
    check_weights,
    is_quantised,
    load_weights,
    weights_sample,
)
from diptych_engine.models.decode_graphs import DecodeGraphs, cuda_recorder
from diptych_engine.models.loader import log_progress
from diptych_engine.models.mixture import stacks_pay
from diptych_engine.models.shard import WHOLE, Shard
from diptych_engine.scheduling.request import (
    Pending,
    Request,
    ScheduledRequest,
    StepPlan,
    StepResult,
    no_result,
)
from diptych_engine.weights.receiver import WeightReceiver
from diptych_frontend.model_files.model_config import family_of
from diptych_frontend.model_files.model_source import ModelConfig, ModelSource
from diptych_frontend.processors import usable_processors
from diptych_kernels.cpu_level import CpuLevel, cpu_level
from diptych_kernels.host_arrays import to_device
from diptych_kernels.native.tile_layout import BYTE
from diptych_kernels.packed_product.cpu import rounds_to_bytes
from diptych_kernels.packed_product.gpu_tiles import UNPACKED_BYTES
from diptych_kernels.paged_attention import AttentionMetadata
from diptych_kernels.trust import set_aside
from diptych_protocol import EngineConfig, InvalidRequestError, SamplingParams
from diptych_protocol.threads import model_threads

log = logging.getLogger(__name__)

WARM_UP_TOKENS: Final = 8


class ModelRunner:
    """Owns the weights, the KV cache and the rows of the batch.

    A request keeps its row from the first plan that schedules it until a plan that removes it, so
    that a step copies only changes.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        shard: Shard = WHOLE,
        kv_memory_fds: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """Load the model, or a rank's share of it.

        `kv_memory_fds`: called when it is loaded; the first is for `KVMemory`. Raises
        `InvalidRequestError` for a device or model that cannot work.
        """
        shard.check(source.config)
        self._source, self._seed, self._shard = source, config.seed, shard
        self._block_size = config.block_size
        self._max_tokens = config.max_model_len or source.config.max_position_embeddings
        kernels = self._choose_types(config)
        if config.enable_return_routed_experts:
            check_routed(source.config, self._max_tokens)
        check_weights(source, shard)  # before anything is allocated
        draft = draft_source(config.speculative_config, source)
        started = time.monotonic()
        # Experts are kept by the slots of one group, as long as the request's blocks; so is the KV
        # of a draft model.
        together = config.enable_return_routed_experts or draft is not None
        layers = one_group(source.config) if together else divided(source.config)
        self.kv_groups = layers.kv_groups(config.block_size, config.max_num_batched_tokens)
        """What the groups of layers keep of a request."""
        own = self._max_tokens, self._dtype, self._device
        parts = shard, layers.group_of
        self.model = build_model(source.config, *own, *parts, packs=self._may_pack)
        self._packables = self.model.packables if self._may_pack else ()
        self.drafter: Drafter | None = None
        if draft is not None:
            self.drafter = Drafter(draft, *own, packs=self._may_pack)
        if kernels is not None:
            kernels.try_all()  # what cannot be multiplied must not be packed
        self._load()
        self._round_inputs(config)
        log.info("%s loaded in %.1f s", source.uri, time.monotonic() - started)
        memory = self._allocate_cache(config, layers, next(iter(kv_memory_fds()), None))
        self._prepare_steps(config)
        self._offer_calls(config, memory)

    def _choose_types(self, config: EngineConfig) -> CpuKernels | None:
        """Choose the device, the types of numbers and the threads; return the kernels that will be
        used, if there are any."""
        source, shard = self._source, self._shard
        self._device = choose_device(config, shard.rank)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # where kernels are launched, wherever tensors are
        self._dtype = choose_dtype(config, self._device)
        engines = shard.size * config.data_parallel_size
        torch.set_num_threads(config.num_threads or model_threads(usable_processors(), engines))
        keep_freed_memory()
        level = choose_level(config)
        on_gpu = self._device.type != "cpu"
        has_kernels = not on_gpu and self._dtype is torch.float32
        self._bits = choose_bits(config, can_round=on_gpu or has_kernels)
        self._may_pack = config.weight_packing != "none" and (on_gpu or has_kernels)
        # Of the model, not of the processor: engines at different levels exchange KV.
        rounded = self._bits is not None or is_quantised(source)
        quantised = self._may_pack and not on_gpu and rounded
        self._kv_dtype = choose_kv_dtype(config, self._device, self._dtype, quantised=quantised)
        if not has_kernels:
            return None
        packs = self._may_pack and level > CpuLevel.NONE
        floats = packs and source.format == "safetensors"
        in_bytes = packs and config.activations == "q8"
        return CpuKernels(
            self._kv_dtype, source.config.head_dim, packed=packs, floats=floats, in_bytes=in_bytes
        )

    def _round_inputs(self, config: EngineConfig) -> None:
        """Let products round their inputs to as many bits as is asked for, where they can."""
        if config.activations == "auto":
            return
        linears = [packable.linear for packable in self._packables]
        of_levels = any(each.packed is not None and each.packed.rounds for each in linears)
        if self._device.type != "cpu" or not of_levels or not rounds_to_bytes():
            log.warning(
                "activations q8 does nothing here: it needs packed weights of 4 to 8 bits, and a "
                "CPU with AVX-512 VNNI"
            )
            return
        for linear in linears:
            linear.input_bits = BYTE

    def _allocate_cache(
        self, config: EngineConfig, layers: LayerGroups, kv_memory_fd: int | None
    ) -> KVMemory:
        """Choose how many blocks there are, and where each layer's are."""
        model, on_gpu = self._source.config, self._device.type != "cpu"
        local = self._shard.local(model)
        of_group = msgspec.structs.replace(local, num_hidden_layers=layers.num_layers)
        self.layers_per_block = layers.num_layers
        self.block_bytes = block_bytes(of_group, config.block_size, self._kv_dtype)
        if self.drafter is not None:
            own = block_bytes(self.drafter.source.config, config.block_size, self._kv_dtype)
            self.block_bytes += own
        of_each_group = config.num_blocks or self._blocks_that_fit(config, local)
        self.num_blocks = of_each_group * self.kv_groups.count
        # Otherwise experts are launched with counts of rows, which a recording would repeat.
        recordable = not model.num_experts or stacks_pay(local, self._device, self._dtype)
        records = on_gpu and self._shard.size == 1 and recordable
        # Behind the blocks there is one that stays empty, for those that windows have passed.
        num_here = self.num_blocks + self.kv_groups.windowed
        num_bytes = (num_here + records) * self.block_bytes
        kept = bool(config.kv_keep)
        memory = KVMemory(num_bytes, self._kv_dtype, self._device, kv_memory_fd, kept=kept)
        whole = memory.tensor.view(-1, self.block_bytes // self._kv_dtype.itemsize)
        shape = block_shape(of_group, config.block_size)
        blocks = whole[:, : math.prod(shape)].view(-1, *shape)
        self.kv_cache = (blocks if self.drafter is None else whole)[:num_here]
        """[>= num_blocks, layers of a group, 2, block_size, kv_heads, head_dim], contiguous; with a
        draft model [num_blocks, numbers], its own behind the model's."""
        self._drafts_kv = whole[:num_here, math.prod(shape) :]
        self._layer_places = [place for _, place in layers.places]
        self._kv_layers = self._by_layer(blocks[:num_here])
        self._graphs: DecodeGraphs | None = None
        if records:
            self._graphs = DecodeGraphs(
                self.model, self._by_layer(blocks), self._max_tokens, cuda_recorder
            )
        return memory

    def _prepare_steps(self, config: EngineConfig) -> None:
        """Make what steps use beside the model and the cache."""
        model, on_gpu = self._source.config, self._device.type != "cpu"
        self._rows = BatchRows(
            config.max_num_seqs,
            -(-self._max_tokens // config.block_size),
            self.kv_groups,
            self.num_blocks,
        )
        self._sampler = Sampler(
            config.max_num_seqs,
            model.vocab_size,
            self._device,
            load_processors(config.logits_processors),
        )
        self.draft_share = 0.0
        """See `Drafter.share_of`."""
        if self.drafter is not None:
            self.draft_share = self.drafter.share_of(self.model.weight_memory)
            self.drafter.join(
                self.drafter.kv_layers(self._drafts_kv, config.block_size),
                self._inputs,
                self._sampler,
                config.max_num_seqs,
                config.max_num_batched_tokens,
            )
        self.enough_prompt_tokens = enough_prompt_tokens(config, self._device)
        self.spare_rows = SPARE_ROWS_ON_A_GPU if on_gpu else SPARE_ROWS_ON_A_CPU
        self.runs_ahead = config.runs_ahead(on_gpu=on_gpu)
        self.lost_rows = LOST_ROWS_ON_A_GPU if on_gpu and self.runs_ahead else 0.0
        self._prompt_logprobs = PromptLogprobs(model.vocab_size)
        self._pooler = Pooler(config.pooling)
        self._embeds = PromptEmbeds(self.model, self._dtype, self._device)
        self.routed: RoutedExperts | None = None
        """The first rank keeps them: all ranks choose alike."""
        if config.enable_return_routed_experts and self._shard.rank == 0:
            self.routed = RoutedExperts(model, self.num_blocks, config.block_size)

    def _offer_calls(self, config: EngineConfig, memory: KVMemory) -> None:
        """Make what clients may call."""
        self.loras = LoraBank(self.model, config.max_lora_rank, self._dtype, self._device)
        self.profiler = Profiler(config.profile_dir, config.engine_id or "engine")
        family = family_of(self._source.config.architecture)
        worker_rank = config.data_parallel_rank * self._shard.size + self._shard.rank
        self._foreign_methods = extension_methods(config, self)
        self.worker_methods: dict[str, Callable[..., Any]] = {
            **self._foreign_methods,
            "_check_weights": lambda: check_weights(self._source, self._shard),
            "_reload_weights": self._load,
            "_sample_weights": lambda: weights_sample(self._source),
            **self.loras.methods(),
            **WeightReceiver(
                self.model, family, worker_rank, self._packables, self._bits
            ).methods(),
            **WorkerMemory(self._weights, self._load, memory).methods(),
            **self.profiler.methods(),
            **self._embeds.methods(),
            "execute_dummy_batch": self.execute_dummy_batch,
            "rank": lambda: self._shard.rank,
        }
        """What `collective_rpc` may name; names with an underscore are not for clients."""

    def _blocks_that_fit(self, config: EngineConfig, model: ModelConfig) -> int:
        """How many blocks of each group the memory for KV holds. model: a rank's part."""
        unpacks = any(packable.linear.packed for packable in self._packables)
        spare = UNPACKED_BYTES if unpacks else 0
        room = bytes_for_kv(config, model, self._device, self._dtype, self._shard.size, spare)
        return blocks_in(room, self.kv_groups.count * self.block_bytes)

    @torch.inference_mode()
    def _load(self) -> None:
        source = self._source
        report = log_progress(source.uri)
        load_weights(self.model.slots, source, self._seed, report, self._packables, self._bits)
        if self.drafter is not None:
            self.drafter.load(self._seed, self._bits)
        give_freed_memory_back()

    def _weights(self) -> Iterator[Tensor]:
        yield from self.model.weight_memory
        if self.drafter is not None:
            yield from self.drafter.model.weight_memory

    @property
    def dtype_name(self) -> str:
        """`float32` or `bfloat16`."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def cpu_facts(self) -> tuple[str, int]:
        """The level of instructions in use, empty on a GPU, and how many kernels are disabled."""
        return (cpu_level().word, len(set_aside())) if self._device.type == "cpu" else ("", 0)

    @property
    def kv_dtype_name(self) -> str:
        """The dtype of keys and values in the cache: `float32`, `bfloat16` or `float8_e4m3fn`."""
        return str(self._kv_dtype).removeprefix("torch.")

    def _by_layer(self, blocks: Tensor) -> list[Tensor]:
        """The view of each layer; those of different groups have blocks of their own there."""
        views = blocks.unbind(1)
        return [views[place] for place in self._layer_places]

    def kv_memory(self) -> list[Tensor]:
        """The KV of each rank, [num_blocks, ...]."""
        return [self.kv_cache]

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens and sample where it says so.

        The requests stay as they are.
        """
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Do the same as `execute`, but on a GPU without waiting for it."""
        for request_id in plan.removed:
            self._free(request_id)
        if plan.images is not None:
            self._embeds.images.do(plan.images)
        if not plan.scheduled:
            return no_result
        fresh_blocks = self._place(plan.scheduled)
        if self.drafter is not None:
            while fresh_blocks:  # before `forward` would, so that it does not clear what follows
                self.kv_cache[fresh_blocks.pop()].zero_()
            self.drafter.draft(plan.scheduled, self._rows.row_of)
        shares, num_decodes = order_of(plan.scheduled)
        rows = [self._rows.row_of[share.request.request_id] for share in shares]
        inputs = self._inputs(shares, rows, num_decodes, ahead=plan.ahead)
        with self.profiler.span("execute_model"):
            return self._compute(plan, shares, rows, inputs, fresh_blocks)

    def _compute(
        self,
        plan: StepPlan,
        shares: Sequence[ScheduledRequest],
        rows: list[int],
        inputs: StepInputs,
        fresh_blocks: list[int],
    ) -> Pending:
        """The model's work, and what follows from it."""
        query_starts = inputs.attention.query_starts
        if self._embeds or plan.images is not None:
            inputs = replace(inputs, given=self._embeds.among(plan, shares, query_starts))
        if self.routed is not None:
            inputs.routed = self.routed.room_for(len(inputs.token_ids), self._device)
        hidden = self.forward(inputs, fresh_blocks)
        told = None if self.routed is None else self.routed.take(inputs, shares, self._rows)
        of_prompts = self._prompt_logprobs.gather(shares, query_starts, hidden, self.model.logits)
        pending = self._sample(plan, shares, rows, inputs, hidden)
        pooled = None
        if self._pooler:
            pooled = self._pooler.pool(shares, query_starts, hidden, self.model.normed)
        if of_prompts is None and pooled is None and told is None:
            return pending
        return lambda: replace(
            pending(),
            prompt_logprobs=of_prompts,
            pooled=pooled,
            routed=None if told is None else told(),
        )

    def can_run_ahead(self, plan: StepPlan) -> bool:
        """Whether the step after a launched one needs none of its results on the host."""
        rows = (self._rows.row_of[share.request.request_id] for share in plan.scheduled)
        return not (self._pooler or any(map(self._sampler.needs_host, rows)))

    def forward(self, inputs: StepInputs, fresh_blocks: list[int]) -> Tensor:
        """Run the model and return hidden states [tokens, hidden] of the step's tokens.

        Blocks that are new to a request are cleared first: data of a previous owner must not reach
        this one, not even through a masked NaN.
        """
        for block in fresh_blocks:  # one by one: torch takes a hundred times as long for a list
            self.kv_cache[block].zero_()
        if self._graphs is not None and self._graphs.fit(inputs):
            return self._graphs.forward(inputs)
        return self.model.forward(inputs, self._kv_layers)

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """Run the model on a dummy token, because ranks that share layers wait for each other."""
        zero, count = np.zeros(1, np.int64), self.kv_groups.count
        tokens = to_device(zero, self._device)
        slot_blocks = tokens if count == 1 else tokens.expand(count, 1).contiguous()
        attention = AttentionMetadata(
            query_starts=np.arange(2),
            context_lens=zero + 1,
            block_tables=np.zeros((1, count), np.int64),
            num_decodes=1,
            block_size=self._block_size,
            device=self._device,
            num_groups=count,
        )
        inputs = StepInputs(tokens, tokens, slot_blocks, tokens, attention)
        own_blocks = [torch.zeros_like(layer[:1]) for layer in self._kv_layers]
        self.model.forward(inputs, own_blocks)

    def close(self) -> None:
        """Do nothing, because a single runner has started nothing."""

    @property
    def watched(self) -> dict[int, Callable[[], None]]:
        """As `EngineCore.watched`: a single runner depends on no other process."""
        return {}

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Run a method of the only worker. Raises `InvalidRequestError` for an unknown name."""
        call = self.worker_methods.get(method)
        if call is None:
            known = ", ".join(sorted(x for x in self.worker_methods if not x.startswith("_")))
            raise InvalidRequestError(f"no worker method {method!r}; there are {known}")
        try:
            return [call(*args, **(kwargs or {}))]
        finally:
            if self._graphs is not None and method in self._foreign_methods:
                self._graphs.forget()  # nobody knows what it did to the model
            elif self._graphs is not None:
                self._graphs.forget_moved()

    def _place(self, planned: Sequence[ScheduledRequest]) -> list[int]:
        """Give the scheduled requests rows, and bring their block tables up to date; returns the
        blocks that are new to them."""
        fresh_blocks: list[int] = []
        table, windowed = self._rows, self.kv_groups.windowed
        for share in planned:
            request = share.request
            row = table.row_of.get(request.request_id)
            if row is None:
                row = table.admit(request.request_id)
                self._take_on(row, share)
            if table.num_blocks[row] < len(request.block_ids):
                first_fresh = -(-share.start // self._block_size) * self.kv_groups.count
                fresh_blocks += table.extend(row, request.block_ids, first_fresh)
            if windowed and share.guess is None:
                table.pass_by(row, share.start)
        return fresh_blocks

    def _take_on(self, row: int, share: ScheduledRequest) -> None:
        """A request begins, or comes back after it lost its row."""
        request = share.request
        if self.drafter is not None:
            self.drafter.admit(row, share)
        if request.pooling is None:
            self._sampler.admit(row, request)
            self._prompt_logprobs.admit(share)
        else:
            self._pooler.admit(request.request_id, request.pooling)
        if request.prompt_embeds is not None:
            self._embeds.admit(request.request_id, request.prompt_embeds)

    def _inputs(
        self, shares: Sequence[ScheduledRequest], rows: list[int], num_decodes: int, *, ahead: bool
    ) -> StepInputs:
        """The step's tokens and what the model must know of them."""
        own_rows = _to_array(rows)
        starts = _to_array([share.start for share in shares])
        ends = [share.start + share.num_tokens for share in shares]
        context_lens = _to_array(ends)
        if num_decodes == len(shares):
            token_ids = []
            if not ahead:
                token_ids = [
                    share.request.token_ids[share.start] if share.guess is None else share.guess
                    for share in shares
                ]
            query_starts = np.arange(len(shares) + 1)
            positions, row_of_token = starts, own_rows
        else:
            counts = context_lens - starts
            token_ids = [token for share in shares for token in _new_tokens(share)]
            query_starts = np.concatenate(([0], counts.cumsum()))
            positions = np.arange(len(token_ids)) + np.repeat(starts - query_starts[:-1], counts)
            row_of_token = np.repeat(own_rows, counts)
        blocks, count = self._rows.block_tables, self.kv_groups.count
        longest = -(-max(ends) // self._block_size)
        places = positions // self._block_size
        if count > 1:
            places = places * count + np.arange(count)[:, None]
        return StepInputs(
            token_ids=(
                self._sampler.sampled[to_device(own_rows, self._device)]
                if ahead
                else to_device(_to_array(token_ids), self._device)
            ),
            positions=to_device(positions, self._device),
            slot_blocks=to_device(blocks[row_of_token, places], self._device),
            slot_offsets=to_device(positions % self._block_size, self._device),
            attention=AttentionMetadata(
                query_starts=query_starts,
                context_lens=context_lens,
                block_tables=blocks[own_rows, : longest * count],
                num_decodes=num_decodes,
                block_size=self._block_size,
                device=self._device,
                num_groups=count,
            ),
            adapters=self.loras.rows_of(shares) if self.loras else (),
        )

    def _sample(
        self,
        plan: StepPlan,
        shares: Sequence[ScheduledRequest],
        rows: list[int],
        inputs: StepInputs,
        hidden: Tensor,
    ) -> Pending:
        """Tokens for the sampling requests, in the plan's order."""
        requests = [share.request for share in shares if share.samples]
        if not requests:
            return no_result
        places = inputs.attention.context_lens
        if len(requests) < hidden.shape[0] or shares is not plan.scheduled:
            # Each sampling share's last token, in the order in which the plan names the requests.
            ends = places.tolist()
            place = {
                (share.request.request_id, ends[i]): i
                for i, share in enumerate(shares)
                if share.samples
            }
            sampling = [share for share in plan.scheduled if share.samples]
            requests = [share.request for share in sampling]
            order = [place[s.request.request_id, s.start + s.num_tokens] for s in sampling]
            rows = [rows[i] for i in order]
            places = places[order]
            last_tokens = inputs.attention.query_starts[1:][order] - 1
            hidden = hidden.index_select(0, to_device(last_tokens, self._device))
        logits = self.model.logits(hidden)
        if plan.guesses:
            guesses = [share.guess for share in plan.scheduled if share.samples]
            return self._sampler.sample_guessed(logits, rows, requests, places, guesses)
        return self._sampler.sample(logits, rows, requests, places, keep=self.runs_ahead)

    def _free(self, request_id: str) -> None:
        row = self._rows.release(request_id)
        if row is not None:
            self._sampler.release(row)
            self._prompt_logprobs.release(request_id)
            self._pooler.release(request_id)
            self._embeds.release(request_id)

    def warm_up(self) -> None:
        """Run a prefill and decodes, so that no request pays for first calls: on a GPU, as many
        decodes as there are graphs for."""
        count = self.kv_groups.count
        room = min(self._max_tokens, self.num_blocks // count * self._block_size)
        num_prompt = min(WARM_UP_TOKENS, room - 1)
        num_blocks = (num_prompt // self._block_size + 1) * count
        most = self._rows.size if self._graphs is not None else 1
        written = list(range(self.num_blocks - num_blocks, self.num_blocks))
        before = self.kv_cache[written].clone()  # another process may have left something
        requests = [_warm_up_request(i, num_prompt, written) for i in range(most)]
        names = [request.request_id for request in requests]
        self.execute(
            StepPlan([ScheduledRequest(requests[0], 0, num_prompt, samples=False)], num_prompt, [])
        )
        decodes = [ScheduledRequest(each, num_prompt, 1, samples=True) for each in requests]
        for power in range((most - 1).bit_length() + 1):
            some = decodes[: 1 << power]
            self.execute(StepPlan(some, len(some), removed=[]))
        if self._device.type != "cpu":  # the other kernel that draws
            self.execute(StepPlan([], 0, removed=names))
            filtered = _warm_up_request(0, num_prompt, written, min_p=0.5)
            self.execute(StepPlan([ScheduledRequest(filtered, num_prompt, 1, samples=True)], 1, []))
        self.execute(StepPlan([], 0, removed=names))
        self.kv_cache[written] = before


def _warm_up_request(
    index: int, num_prompt: int, block_ids: list[int], min_p: float = 0.0
) -> Request:
    """A prompt of this many tokens, and one more. All such requests write to the same blocks;
    nobody reads the results."""
    return Request(
        request_id=f"warm-up {index}",
        client=b"",
        params=SamplingParams(temperature=1.0, min_p=min_p),
        token_ids=[0] * (num_prompt + 1),
        num_prompt_tokens=num_prompt,
        eos_token_id=None,
        max_total_tokens=num_prompt + 1,
        seed=0,
        block_ids=block_ids,
    )


def _to_array(numbers: list[int]) -> NDArray[np.int64]:
    """`np.array` would look at the type of each number before it takes the first: twice as long."""
    return np.fromiter(numbers, np.int64, len(numbers))


def _new_tokens(share: ScheduledRequest) -> list[int]:
    if share.guess is not None:
        return [share.guess]
    return share.request.token_ids[share.start : share.start + share.num_tokens]
