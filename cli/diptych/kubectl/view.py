"""Turns raw objects into tables and plain values for `kubectl diptych status`, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from diptych.kubectl.cluster import Raw
from diptych.watching import bare_table
from diptych_operator.api.status import Condition, PoolStatus, Status
from diptych_operator.status.canaries import duration, size

POOLS = ("prefill", "decode", "router")
_WORDS = {"True": "yes", "False": "no", "Unknown": "?"}
_GOOD_WHEN_FALSE = frozenset({"Degraded", "Stalled"})
_NEUTRAL = frozenset({"Progressing", "Reconciling"})


@dataclass(frozen=True, slots=True)
class ServiceView:
    """The parts of one InferenceService that the plugin shows."""

    namespace: str
    name: str
    generation: int
    model: str
    status: Status
    kept_by: tuple[str, ...] | None = None
    """The finalizers of one that is being deleted; None: it is not."""

    @property
    def reported(self) -> bool:
        """Whether an operator has processed the newest spec. It looks at none that is deleted."""
        looked = bool(self.status.conditions) and self.kept_by is None
        return looked and self.status.observed_generation >= self.generation

    def condition(self, kind: str) -> Condition:
        """Return what is told of it, whose status is Unknown if that is nothing."""
        untold = Condition(
            type=kind, status="Unknown", reason="", message="", last_transition_time=""
        )
        return self.status.condition(kind) or untold


def service_view(raw: Raw) -> ServiceView:
    """Read an object leniently: it may come from an older or a newer operator."""
    meta, spec = raw.get("metadata") or {}, raw.get("spec") or {}
    try:
        status = msgspec.convert(raw.get("status") or {}, Status, strict=False)
    except msgspec.ValidationError:
        status = Status()
    return ServiceView(
        namespace=str(meta.get("namespace", "")),
        name=str(meta.get("name", "")),
        generation=int(meta.get("generation", 0)),
        model=str((spec.get("model") or {}).get("uri", "")),
        status=status,
        kept_by=tuple(meta.get("finalizers") or ()) if meta.get("deletionTimestamp") else None,
    )


def as_json(views: Sequence[ServiceView]) -> list[Raw]:
    """Return values for programs: name, namespace, model, and the status as the cluster has it."""
    return [
        {
            "namespace": view.namespace,
            "name": view.name,
            "model": view.model,
            "reported": view.reported,
            "status": msgspec.to_builtins(view.status),
        }
        for view in views
    ]


def nothing(*, everywhere: bool) -> str:
    """What is said where there is no service."""
    where = "in this cluster" if everywhere else "in this namespace; -A looks in all"
    return f"no InferenceService {where}"


def listing(views: Sequence[ServiceView], *, everywhere: bool = False) -> RenderableType:
    """Format one line for each service."""
    if not views:
        return Text(nothing(everywhere=everywhere))
    table = bare_table(
        *(("NAMESPACE",) if everywhere else ()),
        *("NAME", "AVAILABLE", "REASON", "PREFILL", "DECODE", "ROUTER", "KV", "REVISION"),
        wrap=("REASON",),
    )
    for view in views:
        available = view.condition("Available") if view.kept_by is None else None
        unknown = "NotReported" if view.kept_by is None else "BeingDeleted"
        table.add_row(
            *((escape(view.namespace),) if everywhere else ()),
            escape(view.name),
            _word(available),
            escape((available.reason if available else "") or unknown),
            *(escape(_pool(view, role).summary or "-") for role in POOLS),
            _word(view.condition("KVTransferVerified")),
            escape(_revisions(view.status)),
        )
    return table


def details(view: ServiceView) -> RenderableType:
    """Format the whole status of one service."""
    status = view.status
    parts: list[RenderableType] = [
        Text(f"{view.namespace}/{view.name}  {view.model}", style="bold"),
        Text(f"url       {status.url or '-'}"),
        Text(f"access    {status.access or '-'}"),
        Text(f"revision  {_revisions(status)}"),
        Text(f"rollout   {_rollout(status)}"),
        Text(f"transfer  {_transfer(status)}"),
    ]
    if status.prefetched:
        parts.append(Text(f"prefetch  {status.prefetched} nodes"))
    if not view.reported:
        parts.append(Text(unreported(view), style="yellow"))
    return Group(*parts, Text(), _pools(view), Text(), _conditions(view))


def unreported(view: ServiceView) -> str:
    """Explain why the status does not describe the newest spec."""
    if view.kept_by is not None:
        told = "It is being deleted, and the operator no longer looks after it."
        # Kubernetes' own have no slash, and go by themselves.
        if others := [name for name in view.kept_by if "/" in name]:
            told += (
                f" The finalizer {', '.join(others)} keeps it: let its owner end, or take it off."
            )
        return told
    told = "No operator has reported on this service."
    if view.status.conditions:
        told = (
            f"The status speaks of generation {view.status.observed_generation}, the spec is at "
            f"{view.generation}: no operator has looked yet."
        )
    search = "kubectl get pods -A -l app.kubernetes.io/name=diptych-operator"
    return f"{told} Is it running? {search}"


def _pools(view: ServiceView) -> Table:
    table = bare_table("POOL", "READY", "UPDATED", "DRAINING")
    for role in POOLS:
        pool = _pool(view, role)
        table.add_row(role, escape(pool.summary or "-"), str(pool.updated), str(pool.draining))
    return table


def _conditions(view: ServiceView) -> Table:
    table = bare_table("CONDITION", "", "REASON", "SINCE", "MESSAGE", wrap=("REASON", "MESSAGE"))
    table.columns[-1].overflow = "fold"
    for condition in view.status.conditions:
        table.add_row(
            escape(condition.type),
            _word(condition),
            escape(condition.reason),
            escape(condition.last_transition_time),
            escape(condition.message),
        )
    return table


def _pool(view: ServiceView, role: str) -> PoolStatus:
    pools = {"prefill": view.status.prefill, "decode": view.status.decode}
    return pools.get(role, view.status.router)


def _word(condition: Condition | None) -> str:
    """yes, no or ?, in a colour that says whether that is good."""
    if condition is None:
        return "?"
    word = _WORDS[condition.status]
    if condition.status == "Unknown" or condition.type in _NEUTRAL:
        return word
    good = (condition.status == "True") != (condition.type in _GOOD_WHEN_FALSE)
    return f"[{'green' if good else 'red'}]{word}[/]"


def _revisions(status: Status) -> str:
    if not status.current_revision or status.current_revision == status.update_revision:
        return status.update_revision or "-"
    return f"{status.current_revision} -> {status.update_revision}"


def _rollout(status: Status) -> str:
    message = f": {status.rollout.message}" if status.rollout.message else ""
    return f"{status.rollout.phase or '-'}{message}"


def _transfer(status: Status) -> str:
    found = status.transfer
    if not found.verified_revision:
        return "not verified"
    over = f" over {found.transport}" if found.transport else ""
    return (
        f"{found.blocks} blocks, {size(found.bytes)} in {duration(found.milliseconds)}{over}, "
        f"{found.verified_engines} engines verified at {found.verified_at}"
    )
