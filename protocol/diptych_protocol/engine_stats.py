"""The statistics that an engine reports: each is one field, which declares its Prometheus metric.

The structs are positional arrays, so the rules of `wire.py` hold for them. A figure is counted
where it arises, in the engine or in its hinge; servers show every field that has a `ShownMetric`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Final, Literal, get_args, get_type_hints

import msgspec

HAND_OFF_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0
)  # fmt: skip
"""Upper bounds of the buckets that count hand-offs by their length; one more is above all."""
MAX_MOVES_TOLD: Final = 16
"""The most moves of KV that a report lists one by one."""
MAX_HOLDERS_TOLD: Final = 16
"""The most requests whose blocks a report counts one by one."""
MAX_TENANTS_TOLD: Final = 32
"""The most tenants whose queues a report contains."""


@dataclass(frozen=True, slots=True)
class ShownMetric:
    """How Prometheus shows a field."""

    kind: Literal["gauge", "counter"]
    name: str
    meaning: str
    label: str = ""
    """The label that distinguishes fields of the same name; empty if there is only one."""
    value: str = ""
    """The value of the label."""

    def of(self, value: str) -> ShownMetric:
        """Return the share of one field in a metric that several have together."""
        return replace(self, value=value)


gauge = partial(ShownMetric, "gauge")
counter = partial(ShownMetric, "counter")


def metrics_of(stats: type[msgspec.Struct]) -> Mapping[ShownMetric, Mapping[str, str]]:
    """Return the metrics of a struct in the order of its fields, and for each the fields' names by
    the values of its label."""
    found: dict[ShownMetric, dict[str, str]] = {}
    for name, hint in get_type_hints(stats, include_extras=True).items():
        for told in get_args(hint):
            if isinstance(told, ShownMetric):
                found.setdefault(told.of(""), {})[told.value] = name
    return found


class Move(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A transfer of KV from another engine: a hand-off, or a prefix."""

    number: int
    """The number of the move among all moves to this engine since its start, from 1 on."""
    sender: str
    """`engine_id` of the engine that sent it."""
    num_blocks: int
    """This engine's blocks that were filled."""
    seconds: float
    """How long the request waited for it; 0 if all came before the request."""
    moving_seconds: float = 0.0
    """How long blocks were on their way, without the time in which the sender had none to send."""
    is_prefix: bool = False
    """Whether it was a prefix that the sender remembered, and no hand-off."""
    request_id: str = ""


class Holder(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request that holds blocks."""

    request_id: str
    num_blocks: int
    """All that it has, also those that it shares with others."""
    num_arriving: int = 0
    """Those of them that another engine is still to fill."""


_LEASES: Final = counter("kv_transfer_leases", "Leases by the states they reached.", "state")
_LOADS: Final = counter("kv_transfer_loads", "Loads by outcome.", "outcome")
_EARLY: Final = counter(
    "kv_transfer_early_loads", "Loads for requests that were only announced.", "state"
)
_FETCHES: Final = counter(
    "kv_transfer_prefix_fetches", "Prefixes to be fetched, and what became of them.", "state"
)
_ASKED: Final = counter("kv_transfer_prefixes", "Prefixes that other engines asked for.", "answer")


class KVTransferStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Running totals of one engine's side of the hinge, since its start.

    They add up: promised = granted + withdrawn + `leases_promised_now`, granted = released +
    revoked + expired + `leases_held`, started = completed + failed + in flight, and early loads
    begun = adopted + dropped + `early_loads_now`. Fetches of prefixes are no loads here: fetches =
    completed + failed + `prefix_fetches_now`.
    """

    leases_held: Annotated[
        int, gauge("kv_transfer_leases_held", "Leases now granted or being read.")
    ] = 0
    """A prefill engine's pinned work."""
    leases_granted: Annotated[int, _LEASES.of("granted")] = 0
    leases_released: Annotated[int, _LEASES.of("released")] = 0
    leases_revoked: Annotated[int, _LEASES.of("revoked")] = 0
    leases_expired: Annotated[int, _LEASES.of("expired")] = 0
    blocks_held: Annotated[int, gauge("kv_transfer_blocks_held", "KV blocks pinned by leases.")] = 0
    loads_in_flight: Annotated[
        int, gauge("kv_transfer_loads_in_flight", "Requests whose blocks are on their way.")
    ] = 0
    """Loads that were started and have not ended (a decode engine's side)."""
    loads_completed: Annotated[int, _LOADS.of("completed")] = 0
    loads_failed: Annotated[int, _LOADS.of("failed")] = 0
    blocks_received: Annotated[
        int, counter("kv_transfer_blocks_received", "KV blocks received.")
    ] = 0
    """This engine's blocks that completed loads have filled."""
    bytes_received: Annotated[
        int, counter("kv_transfer_bytes_received", "Bytes of KV received.")
    ] = 0
    """Bytes as they arrived: what prefill engines have sent for these loads, whatever the size of
    their blocks."""
    seconds_receiving: Annotated[
        float,
        counter(
            "kv_transfer_receive_seconds", "Sum over loads, from the open to the validated close."
        ),
    ] = 0.0
    """Sum over completed loads of the time that the request waited for the load, up to the
    validated close."""
    blocks_sent: Annotated[int, counter("kv_transfer_blocks_sent", "KV blocks sent.")] = 0
    bytes_sent: Annotated[int, counter("kv_transfer_bytes_sent", "Bytes of KV sent.")] = 0
    stale_reads_refused: Annotated[
        int,
        counter("kv_transfer_stale_reads_refused", "Reads that were not validated, so not used."),
    ] = 0
    transport: str = ""
    """What UCX uses on the newest connection, for example `tcp` or `cma`."""
    leases_promised: Annotated[int, _LEASES.of("promised")] = 0
    """Every lease is promised before it is granted, even if both happen at the same moment."""
    leases_withdrawn: Annotated[int, _LEASES.of("withdrawn")] = 0
    """Promises that ended before they were granted."""
    leases_promised_now: Annotated[
        int, gauge("kv_transfer_leases_promised_now", "Leases of prompts that are still computed.")
    ] = 0
    """Promises that have been neither granted nor withdrawn yet."""
    leases_draining: Annotated[
        int,
        gauge(
            "kv_transfer_leases_draining",
            "Leases that have ended, whose blocks are still being sent.",
        ),
    ] = 0
    leases_rejected: Annotated[
        int,
        counter("kv_transfer_rejections_received", "Leases that ended because nobody wanted them."),
    ] = 0
    """Leases that ended because another engine did not need them."""
    loads_started: Annotated[
        int, counter("kv_transfer_loads_started", "Loads that were begun.")
    ] = 0
    leases_refused_here: Annotated[
        int, counter("kv_transfer_rejections_sent", "Times that another engine was told so.")
    ] = 0
    early_loads: Annotated[int, _EARLY.of("begun")] = 0
    """Loads begun for requests that were only announced."""
    early_loads_adopted: Annotated[int, _EARLY.of("adopted")] = 0
    early_loads_dropped: Annotated[int, _EARLY.of("dropped")] = 0
    """Early loads that failed, or whose request did not come."""
    early_loads_now: Annotated[
        int, gauge("kv_transfer_early_loads_now", "Loads for requests that are only announced.")
    ] = 0
    hand_off_counts: list[int] = msgspec.field(default_factory=list)
    """Hand-offs by how long a request waited for them; see `HAND_OFF_BOUNDS_S`."""
    loads_waiting_for_room: Annotated[
        int,
        gauge(
            "kv_transfer_loads_waiting_for_room", "Loads of another geometry that cannot begin yet."
        ),
    ] = 0
    """Loads in flight that wait for room in the staging area."""
    staging_bytes: Annotated[
        int, gauge("kv_transfer_staging_bytes", "Bytes reserved for KV that is to be repacked.")
    ] = 0
    prefix_fetches: Annotated[int, _FETCHES.of("asked")] = 0
    """Prefixes requested from an engine that probably has them."""
    prefix_fetches_completed: Annotated[int, _FETCHES.of("fetched")] = 0
    prefix_fetches_failed: Annotated[int, _FETCHES.of("computed")] = 0
    """Requests for prefixes that brought nothing, so that the prefix is computed."""
    prefix_fetches_now: Annotated[
        int, gauge("kv_transfer_prefix_fetches_now", "Prefixes that are on their way.")
    ] = 0
    prefix_tokens_fetched: Annotated[
        int,
        counter(
            "kv_transfer_prefix_tokens_fetched", "Prompt tokens whose KV another engine remembered."
        ),
    ] = 0
    """Tokens that completed fetches brought, and that were not here already."""
    prefix_seconds: Annotated[
        float,
        counter(
            "kv_transfer_prefix_seconds",
            "Sum of the time that requests waited for fetched prefixes.",
        ),
    ] = 0.0
    prefixes_lent: Annotated[int, _ASKED.of("lent")] = 0
    """Leases of prefixes that other engines asked for."""
    prefixes_refused: Annotated[int, _ASKED.of("refused")] = 0
    """Prefixes that other engines asked for without success."""
    newest_moves: list[Move] = []
    """The newest completed moves to this engine, the newest last, at most `MAX_MOVES_TOLD`. All
    others are only in the totals."""
    rejections_ignored: Annotated[
        int,
        counter(
            "kv_transfer_rejections_ignored",
            "Times that a report of a refused request named no lease.",
        ),
    ] = 0
    """How often somebody reported a refused request without naming a lease, or without proof."""
    late_reads: Annotated[
        int,
        counter(
            "kv_transfer_late_reads", "Times that blocks were read after their lease had ended."
        ),
    ] = 0
    """How often an engine that does not check KV reported such a read of this engine's blocks."""


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A snapshot of one engine: gauges, and running totals since its start."""

    num_running: Annotated[int, gauge("num_requests_running", "Requests in the running batch.")] = 0
    num_waiting: Annotated[int, gauge("num_requests_waiting", "Requests waiting to run.")] = 0
    num_waiting_for_remote_kv: Annotated[
        int,
        gauge(
            "num_requests_waiting_for_remote_kv", "Requests waiting for blocks from another engine."
        ),
    ] = 0
    blocks_total: Annotated[int, gauge("kv_cache_blocks", "KV blocks of the engine.")] = 0
    blocks_free: Annotated[
        int, gauge("kv_cache_blocks_free", "KV blocks that no request and no lease holds.")
    ] = 0
    """Cached prefixes count as free."""
    queued_prompt_tokens: Annotated[
        int, gauge("queued_prompt_tokens", "Prompt tokens that steps have yet to compute.")
    ] = 0
    """Prompt tokens that no step has computed and no cached prefix or hand-off covers."""
    prompt_tokens_computed: Annotated[
        int, counter("engine_prompt_tokens_computed", "Prompt tokens computed.")
    ] = 0
    tokens_generated: Annotated[int, counter("engine_tokens_generated", "Tokens sampled.")] = 0
    prefix_cache_queries: Annotated[
        int, counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
    ] = 0
    prefix_cache_hits: Annotated[
        int, counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
    ] = 0
    remote_kv_tokens: Annotated[
        int,
        counter("external_prefix_cache_hits", "Prompt tokens whose KV came from another engine."),
    ] = 0
    num_preemptions: Annotated[
        int, counter("num_preemptions", "Requests that lost their blocks to another.")
    ] = 0
    steps: Annotated[
        int, counter("engine_steps", "Steps of the engine; stands still when it does.")
    ] = 0
    kv_transfer: KVTransferStats | None = None
    draining: Annotated[bool, gauge("engine_draining", "1 while the engine is about to leave.")] = (
        False
    )
    """Send it no new requests, and take back those that can move."""
    paused: Annotated[
        bool, gauge("engine_paused", "1 while new requests wait for the end of a pause.")
    ] = False
    sleep_level: Annotated[
        int,
        gauge(
            "engine_sleep_level",
            "1: without KV cache, weights put aside; 2: without weights; 0: awake, or only paused.",
        ),
    ] = 0
    num_waiting_for_input: Annotated[
        int,
        gauge(
            "num_requests_waiting_for_input", "Requests waiting for the next piece of their prompt."
        ),
    ] = 0
    """They may hold blocks."""
    dummy_steps: int = 0
    """Steps without requests, made because other cores of the engine make a step."""
    cpu_level: str = ""
    """The instruction level of the kernels; empty if the model runs on a GPU."""
    cpu_kernels_set_aside: Annotated[
        int,
        gauge(
            "cpu_kernels_set_aside",
            "Kernels wrong at start, or not to be had; torch computes instead.",
        ),
    ] = 0
    malformed_messages: Annotated[
        int, counter("malformed_messages", "Messages of clients that the engine could not read.")
    ] = 0
    images_encoded: Annotated[
        int, counter("images_encoded", "Images that the vision tower computed.")
    ] = 0
    encoder_cache_hits: Annotated[
        int, counter("encoder_cache_hits", "Images needed again whose features were kept.")
    ] = 0
    encoder_cache_tokens: int = 0
    """Image tokens whose features are cached."""
    seconds_stepping: float = 0.0
    """The total time of all steps, from a step's start until its results were there."""
    adapters_loaded: int = 0
    """The number of loads of adapters."""
    seconds_loading_adapters: float = 0.0
    """The total time of these loads."""
    queued_tokens_of: dict[str, int] = {}
    """The tokens of `queued_prompt_tokens` by tenant, of the `MAX_TENANTS_TOLD` tenants that have
    most; empty if no request names a tenant."""
    blocks_remembered: int = 0
    """Those of `blocks_free` that contain a prefix which a later prompt would find."""
    blocks_arriving: int = 0
    """Blocks reserved for KV that is on its way from another engine."""
    holders: list[Holder] = []
    """Requests with blocks, those under way before those that wait for KV, at most
    `MAX_HOLDERS_TOLD`. Blocks of the others, and of leases, are only in the totals."""
    drafts: Annotated[
        int, counter("spec_decode_num_drafts", "Steps of requests that had guessed tokens.")
    ] = 0
    draft_tokens: Annotated[int, counter("spec_decode_num_draft_tokens", "Tokens guessed.")] = 0
    draft_tokens_accepted: Annotated[
        int, counter("spec_decode_num_accepted_tokens", "Guessed tokens that were right.")
    ] = 0
    accepted_at: list[int] = msgspec.field(default_factory=list)
    """Those by their place among the guesses of a step, the first first."""
    disk_blocks: Annotated[int, gauge("kv_disk_blocks", "KV blocks on disk.")] = 0
    disk_blocks_written: Annotated[
        int, counter("kv_disk_blocks_written", "KV blocks written to disk.")
    ] = 0
    disk_blocks_damaged: Annotated[
        int, counter("kv_disk_blocks_damaged", "KV blocks on disk that were not as written.")
    ] = 0
    disk_tokens: Annotated[
        int, counter("kv_disk_tokens", "Prompt tokens whose KV was read from disk.")
    ] = 0
    blocks_pinned: Annotated[
        int, gauge("kv_cache_blocks_pinned", "KV blocks that a next turn is expected to need.")
    ] = 0
    disk_reads: Annotated[
        int, counter("kv_disk_reads", "Prefixes that were read from disk, in part or whole.")
    ] = 0
    disk_blocks_read: int = 0
    """The blocks of all of them."""
    seconds_reading_disk: Annotated[
        float,
        counter("kv_disk_seconds_reading", "Total time that prefixes took to come from disk."),
    ] = 0.0
