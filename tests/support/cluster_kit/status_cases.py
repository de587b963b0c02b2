"""Situations of a service, and the status that they make: pods, routers' reports and plans.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych_operator.api.parse import parse
from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.api.status import Status
from diptych_operator.plan import Phase, Step
from diptych_operator.revision import revision as revision_of
from diptych_operator.status.observed import Observed, PodView
from diptych_operator.status.status import build_status
from diptych_protocol.admin import CanaryReport, EngineReport, RefusedSetting, RouterReport

T0, T1, T2 = "2026-11-21T07:00:00Z", "2026-11-21T07:05:00Z", "2026-11-21T07:30:00Z"

SERVICE = """
apiVersion: diptych.dev/v1alpha1
kind: InferenceService
metadata: {name: svc, namespace: ns, generation: 7}
spec:
  model: {uri: "dummy://?num_hidden_layers=1"}
  transfer: {verify: %s}
  prefill: %s
  decode: %s
  rollout: {progressDeadlineSeconds: 600}
  availability: {drainSeconds: 60}
  suspend: %s
  router: %s
"""
FIXED = "{replicas: 1}"
SLEEPER = "{autoscaling: {minReplicas: 0, maxReplicas: 2}}"


def service(
    verify: str = "Required", pool: str = FIXED, suspend: bool = False, router: str = "{}"
) -> InferenceService:
    return parse(SERVICE % (f'"{verify}"', pool, pool, str(suspend).lower(), router))


OLD, NEW = "aaaaaaaa", revision_of(service())


def pod(role: str, number: int = 0, revision: str = NEW, **rest: Any) -> PodView:
    """A ready pod, unless `rest` says otherwise."""
    revision = "" if role == "router" else revision
    name = f"{role[0]}{number}" if revision in ("", NEW) else f"{role[0]}{number}-old"
    ready: dict[str, Any] = {"phase": "Running", "ready": True, "terminating": False}
    return PodView(name, role, revision, **ready | rest)


def failing(role: str, number: int = 0, revision: str = NEW, words: str = "no model") -> PodView:
    said = f"diptych engine: error: {words}"
    return pod(role, number, revision, ready=False, last_exit=said, last_exit_reason="Error")


def engine(name: str, revision: str = NEW, verified: bool = True) -> EngineReport:
    return EngineReport(
        engine_id=name, role="prefill" if name.startswith("p") else "decode", revision=revision,
        usable=verified, listed=True, draining=False, verified=verified, open_tokens=0,
        num_running=0, num_waiting=0, queued_prompt_tokens=0, kv_usage=0.0, leases_held=0,
        blocks_held=0, loads_failed=0, leases_expired=0, stale_reads_refused=0,
    )  # fmt: skip


def canary(revision: str = NEW, at: float = 1e9, **rest: Any) -> CanaryReport:
    fields: dict[str, Any] = {
        "prefill": "p0", "decode": "d0", "ok": True, "prompt_tokens": 33, "blocks": 16,
        "bytes": 1_200_000, "milliseconds": 4.04, "transport": "tcp",
    }  # fmt: skip
    return CanaryReport(revision=revision, unix_time=at, **fields | rest)


BROKEN: dict[str, Any] = {
    "ok": False,
    "error": "no route to 10.0.0.7:5558",
    "blocks": 0,
    "bytes": 0,
}


def router(
    *canaries: CanaryReport,
    engines: Sequence[EngineReport] = (),
    reason: str = "",
    refused: Sequence[RefusedSetting] = (),
) -> RouterReport:
    return RouterReport(
        ready=not reason, reason=reason, open_requests=0, held_requests=0, serving_revisions=[],
        engines=list(engines or (engine("p0"), engine("d0"))), canaries=list(canaries),
        refused_settings=list(refused),
    )  # fmt: skip


PODS = (pod("prefill"), pod("decode"), pod("router"))
ROUTERS = (router(canary()),)
WHOLE = Observed(pods=PODS, routers=ROUTERS)
ONE_EACH = Counts(1, 1)
AT_REST = Step({NEW: ONE_EACH}, (NEW,), Phase.Idle, "", ())
NO_STATUS = Status()


@dataclass(frozen=True)
class Case:
    """What `build_status` is given; a service at rest unless changed."""

    service: InferenceService = field(default_factory=service)
    observed: Observed = WHOLE
    step: Step = AT_REST
    previous: Status = NO_STATUS
    target: str = NEW
    desired: Counts = ONE_EACH

    def at(self, now: str = T1) -> Status:
        return build_status(
            self.service, self.observed, self.step, self.previous, target=self.target,
            desired=self.desired, now=now,
        )  # fmt: skip

    def says(self, kind: str) -> tuple[str, str, str]:
        found = next(c for c in self.at().conditions if c.type == kind)
        return found.status, found.reason, found.message


def phase(name: Phase, message: str = "", serving: tuple[str, ...] = (NEW,)) -> Step:
    return Step({NEW: Counts(1, 1)}, serving, name, message, ())


def given_pods(*pods: PodView, routers: tuple[RouterReport, ...] = ROUTERS) -> Observed:
    return Observed(pods=pods, routers=routers)


RESTED = Case().at(T0)
SLEEPING = Case(
    service=service(pool=SLEEPER), observed=given_pods(PODS[2]), desired=NOTHING, previous=RESTED
)
