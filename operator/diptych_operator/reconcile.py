"""One pass over one service: read, decide, act, report.

Every decision is made by a pure function elsewhere (`render`, `plan`, `autoscale`, `status`); here
they are called in order and their results carried out. A pass can be repeated at any time, by
another process too: nothing is remembered that the cluster does not say, except what saves work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from diptych_operator.api.base import Raw, ServiceKey, SpecError
from diptych_operator.api.images import Images
from diptych_operator.api.limits import Allowed, check_limits
from diptych_operator.api.names import UPGRADE_ANNOTATION, metadata
from diptych_operator.api.parse import parse_object
from diptych_operator.api.pools import NOTHING, Counts
from diptych_operator.api.service import API_VERSION, KIND, InferenceService
from diptych_operator.api.status import EventNote, ImagesStatus
from diptych_operator.autoscale import Memory, autoscale
from diptych_operator.executor import Executor
from diptych_operator.key_keeper import KeyKeeper, KeysHeldError, KeysLostError
from diptych_operator.kube.children import (
    REFUSAL_S,
    ChildId,
    Children,
    NotOursError,
    belongs_to,
    child_id,
    is_orphan_of,
)
from diptych_operator.kube.client import ApiError, Kube
from diptych_operator.kube.cluster import HTTP_ROUTE_KIND, Cluster
from diptych_operator.kube.event_log import SERVED_BY_ANOTHER, UPGRADE_WAITS, EventLog
from diptych_operator.kube.indexed import Indexed
from diptych_operator.kube.leader import LEASE_S
from diptych_operator.kube.rivals import Rivals, ServedByRivalError
from diptych_operator.kube.workloads import deployments_among
from diptych_operator.metrics import OperatorMetrics
from diptych_operator.plan import Evidence, Phase, Step, Trial, plan
from diptych_operator.plan.trial import TrialMemory
from diptych_operator.referents import Referents
from diptych_operator.render import KeySets, NoSetsError, fixed_counts
from diptych_operator.render.gateway import why_not_exposed
from diptych_operator.render.keys import secret_name
from diptych_operator.render.once import Renderings
from diptych_operator.revision import key_set, revision
from diptych_operator.routers import Routers
from diptych_operator.scalers import PoolScalers, with_sizes_from_outside
from diptych_operator.service_snapshot import (
    ServiceSnapshot,
    is_named_by_us,
    key_sets,
    keys_in_pods,
)
from diptych_operator.status.canaries import failures
from diptych_operator.status.observed import (
    TURNED_AWAY_S,
    Observed,
    PodView,
    Problem,
    foreign,
    observe,
    pod_view,
    prefetched,
    seconds_between,
)
from diptych_operator.status.progress import deadline_missed, lacks_room
from diptych_operator.status.reasons import Reason
from diptych_operator.status.references import Reference
from diptych_operator.status.status import build_status, count, events_between
from diptych_operator.upgrades import NEXT, Place, Standing, Upgrades, rendering
from diptych_protocol.admin import RouterReport, TrialReport

log = logging.getLogger(__name__)


BUSY_INTERVAL_S = 2.0
"""While something changes, routers are polled at this interval; the API server is not."""
AUTOSCALE_INTERVAL_S = 5.0
REST_INTERVAL_S = 120.0
"""At rest, only routers are polled, to learn whether the hand-off still works."""
LATE_S = 60.0
"""So long after it was to end at the latest, a pod that is still there is one that stays."""
SECRETS_INTERVAL_S = 60.0
"""The same where routers read Secrets of the user's, of whose changes only they tell."""


@dataclass(slots=True)
class _Done:
    """What came of the acts of one pass."""

    problems: list[Problem] = field(default_factory=list)
    """Problems that the status reports."""
    failure: ApiError | None = None
    """An error after which the pass should be repeated."""
    changed: bool = False
    """A Deployment is no longer as it was when the pass read it."""


class Reconciler:
    """Owns the children of every service that the watches show."""

    def __init__(
        self,
        kube: Kube,
        watched: Indexed,
        cluster: Cluster,
        routers: Routers,
        metrics: OperatorMetrics,
        images: Images,
        rivals: Rivals,
        allowed: Allowed | None = None,
        upgrades: Upgrades | None = None,
    ) -> None:
        """If `allowed` is given, services may ask for no more than it permits."""
        self._kube = kube
        self._rivals = rivals
        self._watched = watched
        self._routers = routers
        self._metrics = metrics
        self._images = images
        self._allowed = allowed
        self._keys = KeyKeeper(kube)
        self._children = Children(kube)
        self._renderings = Renderings(cluster)
        self._executor = Executor(kube, self._renderings, self._children, self._keys)
        self._scalers = PoolScalers(kube, cluster)
        self._events = EventLog(kube)
        self._referents = Referents(kube)
        self._upgrades = upgrades or Upgrades()
        metrics.pending = self._upgrades.waiting
        self._parsed: dict[ServiceKey, tuple[Raw, InferenceService]] = {}
        self._scaling: dict[ServiceKey, Memory] = {}
        self._trials: dict[ServiceKey, TrialMemory] = {}
        self._stands_back: set[ServiceKey] = set()
        self._silenced: set[ServiceKey] = set()
        """Services whose status the API server refuses."""

    async def reconcile(self, key: ServiceKey) -> float | None:
        """Bring one service closer to its spec. Returns the seconds until the next pass."""
        raw = self._watched.service(key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            self._forget(key)
            return None
        try:
            return await self._rivals.unless_served(key[0], lambda: self._attend(key, raw))
        except ServedByRivalError as exc:
            return await self._stand_back(key, raw, exc.rival)
        finally:  # one that cannot be looked at keeps no other waiting
            self._upgrades.places.setdefault(key, Place())

    async def _attend(self, key: ServiceKey, raw: Raw) -> float | None:
        self._stands_back.discard(key)
        with self._metrics.timed(key):
            try:
                service = self._parse(key, raw)
                # Whatever is wrong with a service, it can be stopped.
                if self._allowed is not None and not service.spec.suspend:
                    check_limits(raw["spec"], self._allowed)
                return await self._pass(key, service)
            except SpecError as exc:
                # The schema and the policy of a cluster refuse these before they get here, unless
                # they are older than it.
                await self._report_unusable(raw, exc)
                return None

    def _parse(self, key: ServiceKey, raw: Raw) -> InferenceService:
        """Read the object, unless it is the very one that the last pass read."""
        before, service = self._parsed.get(key, (None, None))
        if service is None or before is not raw:
            service = parse_object(raw, self._images)
            self._parsed[key] = raw, service
        return service

    async def _stand_back(self, key: ServiceKey, raw: Raw, rival: str) -> float:
        """Another operator serves the namespace: touch nothing, and say so once."""
        if key not in self._stands_back:
            self._forget(key)
            self._stands_back.add(key)
            words = f"{rival} serves the namespace {key[0]}; the cluster's operator stands back"
            log.warning("%s/%s: %s", *key, words)
            await self._events.post_about(raw, EventNote("Warning", SERVED_BY_ANOTHER, words))
        return LEASE_S

    def _forget(self, key: ServiceKey) -> None:
        self._stands_back.discard(key)
        self._silenced.discard(key)
        self._routers.follow(key, [], [])
        self._scaling.pop(key, None)
        self._trials.pop(key, None)
        self._upgrades.places.pop(key, None)
        self._keys.forget(key)
        self._parsed.pop(key, None)
        self._renderings.forget(key)
        self._executor.forget(key)
        self._children.forget(*key)
        self._metrics.forget(key)

    async def _pass(self, key: ServiceKey, service: InferenceService) -> float | None:
        try:
            if service.spec.suspend:  # before anything that can go wrong
                await self._executor.stop(service, self._watched.children(key))
            snapshot = await self._look(key, service)
        except NotOursError as exc:
            return await self._report_blocked(service, Problem("ObjectNotOurs", str(exc)))
        except KeysHeldError as exc:
            return await self._report_blocked(service, Problem("OperatorProblem", str(exc)))
        except ApiError as exc:
            if exc.will_last:
                await self._report_blocked(service, Problem("OperatorProblem", str(exc)))
            raise
        snapshot = await self._in_turn(key, snapshot)
        aim = snapshot.aim
        desired = self._desired(key, snapshot, aim)
        step = _decide(snapshot, desired, _rfc3339(self._kube.now))
        snapshot, standing = self._standing(key, snapshot, step)
        done = await self._act(snapshot, step, aim)
        opens = self._upgrades.places.get(key, Place()).opens
        self._upgrades.places[key] = Place(standing, len(snapshot.pods), not done.changed, opens)
        problems = (
            *snapshot.observed.problems,
            *done.problems,
            *self._not_exposed(snapshot),
            *_kept_by_others(snapshot, _rfc3339(self._kube.now)),
            *_nobodys(snapshot),
        )
        observed = replace(snapshot.observed, problems=problems, lags=done.changed)
        images = service.status.images if snapshot.held else None
        if images is not None and not snapshot.deployments(""):  # they come back as of now
            images = msgspec.structs.replace(images, router=service.spec.router.image)
        await self._report(service, observed, step, snapshot.target, desired, images)
        if done.failure is not None:
            raise done.failure  # the queue tries again, with back-off
        rest = REFUSAL_S if problems else _interval(snapshot, step)
        if snapshot.held and key in self._upgrades.waiting()[:NEXT]:
            if opens is None:
                return AUTOSCALE_INTERVAL_S
            until = max(0.0, (opens - self._kube.now).total_seconds())
            rest = until if rest is None else min(rest, until)
        observed = snapshot.observed
        waits = any(pod.turned_away_at or pod.terminating for pod in observed.pods)
        waits = waits or any(view.refused_at for view in observed.deployments)
        return min(rest or TURNED_AWAY_S, TURNED_AWAY_S) if waits else rest

    async def _in_turn(self, key: ServiceKey, snapshot: ServiceSnapshot) -> ServiceSnapshot:
        """Hold the pods as they are if only this operator, and not the user, wants others."""
        service, last = snapshot.service, snapshot.last_rendered
        try:
            new = rendering(self._renderings, service, snapshot.target, snapshot.keys)
        except SpecError:
            return snapshot  # the acts report it
        if last is None or last.intent != new.intent or not snapshot.pods:
            return replace(snapshot, rendered=new)
        if last.pods == new.pods:
            return replace(snapshot, rendered=last)
        if snapshot.lacks_parts(last.revision):
            return replace(snapshot, rendered=new)  # only what is asked for now can be made anew
        before = self._upgrades.places.get(key, Place())
        services = self._watched.service_keys()
        if self._upgrades.take(key, len(snapshot.pods), services, self._kube.now):
            return replace(snapshot, rendered=new._replace(under_way=True))
        opens = self._upgrades.places[key].opens
        if before.standing is not Standing.Waits or opens not in (None, before.opens):
            words = "their turn" if opens is None else f"a rollout window, until {_rfc3339(opens)}"
            note = EventNote("Normal", UPGRADE_WAITS, _WAITS.format(words))
            await self._events.post(service, note)
        return replace(snapshot, target=last.revision, rendered=last, held=True)

    def _standing(
        self, key: ServiceKey, snapshot: ServiceSnapshot, step: Step
    ) -> tuple[ServiceSnapshot, Standing]:
        """Where the service is among those that upgrade; what ended is no longer under way."""
        rendered = snapshot.rendered
        if snapshot.held:
            return snapshot, Standing.Waits
        if rendered is None or not rendered.under_way:
            return snapshot, Standing.Settled
        if step.phase is Phase.Failed:
            return snapshot, Standing.Failed
        if step.unjudged:
            return snapshot, Standing.Unjudged
        over = step.phase in (Phase.Idle, Phase.Suspended) and snapshot.at_rest
        if not self._upgrades.ended(key, at_rest=over and rendered == snapshot.last_rendered):
            return snapshot, Standing.Rolls
        return replace(snapshot, rendered=rendered._replace(under_way=False)), Standing.Settled

    async def _look(self, key: ServiceKey, service: InferenceService) -> ServiceSnapshot:
        """Everything that is known of the service now."""
        found = (raw for raw in self._watched.children(key) if is_named_by_us(raw, service))
        children = {child_id(raw): raw for raw in found}
        deployments = deployments_among(children.values())
        pods = self._watched.pods(key)
        views = [pod_view(raw) for raw in pods]
        keys = key_sets(key_set(service), deployments)
        # An earlier service's pods go with its Deployments, and need no keys of this one.
        own = [raw for raw in deployments if belongs_to(raw, service) or is_orphan_of(raw, service)]
        in_use = keys.current in keys_in_pods(own, views)
        made = secret_name(service, keys.current)
        holders = {pod.name for pod in views if pod.has_volumes and made in pod.key_secrets}
        problems: tuple[Problem, ...] = ()
        try:
            current = await self._keys.ensure(
                service, keys.current, in_use=in_use, holders=holders,
                doubted=any(pod.mounts for pod in views),
            )  # fmt: skip
        except KeysLostError as exc:  # without its keys it cannot grow, but it serves
            current, problems = exc.token, (Problem(Reason.KEYS_LOST, str(exc)),)
        older = await self._keys.token(service, keys.previous)
        # Routers report from their first moments on: they are not ready before a canary was.
        routers = [p for p in views if p.role == "router" and not (p.terminating or p.gone)]
        asked = [pod.ip for pod in routers if pod.ip]
        tokens = list(filter(None, (current, older)))
        answers = await self._routers.poll(asked, tokens)
        reports = tuple(filter(None, answers.values()))
        observed = observe(deployments, pods, reports, len(answers) - len(reports))
        missing = await self._referents.missing(service, _foreign(service, views, children, keys))
        observed = replace(
            observed, problems=problems, missing=missing, prefetched=prefetched(children.values())
        )
        lost = frozenset({keys.previous} if older is None else ())
        snapshot = ServiceSnapshot(
            service, revision(service), keys, children, pods, observed, lost,
            earlier_trials=self._earlier_trials(key, service, answers),
        )  # fmt: skip
        self._routers.follow(key, asked if snapshot.asleep else [], tokens)
        return snapshot

    def _earlier_trials(
        self, key: ServiceKey, service: InferenceService, answers: Mapping[str, RouterReport | None]
    ) -> Sequence[TrialReport]:
        """See `Evidence.earlier`."""
        trial = Trial.read(service.status.rollout.canary)
        if trial is None:
            self._trials.pop(key, None)
            return ()
        told = {at: each.trial for at, each in answers.items() if each is not None}
        return self._trials.setdefault(key, TrialMemory()).earlier(trial, told)

    async def _act(self, snapshot: ServiceSnapshot, step: Step, aim: Counts) -> _Done:
        """Do all that is to be done; one part that fails keeps no other from being done."""
        done = _Done()
        for part in (
            partial(self._carry_out, snapshot, step, done),
            partial(self._scalers.keep, snapshot, aim),
        ):
            try:
                problem = await part()
            except ApiError as exc:
                done.failure = exc
                problem = Problem("OperatorProblem", str(exc)) if exc.will_last else None
            if problem is not None:
                done.problems.append(problem)
        return done

    def _not_exposed(self, snapshot: ServiceSnapshot) -> list[Problem]:
        service = snapshot.service
        meta = metadata(service, "router", "router")
        route = snapshot.children.get((meta["namespace"], HTTP_ROUTE_KIND, meta["name"]))
        why = why_not_exposed(service, self._renderings.cluster.has_gateways, route)
        return [Problem(Reason.GATEWAY_UNAVAILABLE, f"expose.gateway: {why}")] if why else []

    async def _carry_out(
        self, snapshot: ServiceSnapshot, step: Step, done: _Done
    ) -> Problem | None:
        """What the user has to mend comes back, all else is raised."""
        try:
            done.changed = await self._executor.carry_out(snapshot, step)
        except NoSetsError as exc:
            return Problem(Reason.SET_UNAVAILABLE, str(exc))
        except SpecError as exc:
            return Problem("PodTemplateRejected", f"{exc}; correct the spec")
        except NotOursError as exc:
            return Problem("ObjectNotOurs", str(exc))
        except ApiError as exc:
            if not exc.is_refusal:
                raise  # not the service's fault
            if exc.kind != "Deployment" or not exc.blames_object:
                what = f"a {exc.kind}" if exc.kind else "a request"
                return Problem("OperatorProblem", f"the API server refuses {what}: {exc}")
            spec = f"spec.{exc.component}"
            words = str(exc).rstrip(".")
            return Problem(
                "PodTemplateRejected",
                f"the API server refuses the {exc.component} pods: {words}. "
                f"Correct {spec}.podTemplate or {spec}.resources.",
            )
        return None

    def _desired(self, key: ServiceKey, snapshot: ServiceSnapshot, aim: Counts) -> Counts:
        """Pods that each pool should have: what the spec, others or the load ask for."""
        service = with_sizes_from_outside(snapshot.service, snapshot.children, aim)
        if service.spec.suspend or not any(pool.autoscaling for pool in service.pools.values()):
            self._scaling.pop(key, None)
            return fixed_counts(service)
        observed, revisions = snapshot.observed, snapshot.observed.revisions()
        scaling = autoscale(
            service.spec.prefill,
            service.spec.decode,
            aim,
            sum(map(observed.ready, revisions), NOTHING),
            observed.routers,
            self._scaling.get(key, Memory()),
            time.monotonic(),
            block_size=service.spec.engine.block_size,
            unreachable_routers=observed.unreachable_routers,
            rolls=any(observed.wanted(name) for name in revisions if name != snapshot.target),
        )
        self._scaling[key] = scaling.memory
        if scaling.desired != aim:
            log.info("%s/%s: %s", *key, scaling.reason)
        return scaling.desired

    # --- the status ---------------------------------------------------------------------------

    async def _report(
        self,
        service: InferenceService,
        observed: Observed,
        step: Step,
        target: str,
        desired: Counts,
        images: ImagesStatus | None = None,
    ) -> None:
        """Write the status if it says anything new, and then tell of what changed. images: those
        of pods that are held; None: those of the spec."""
        before = service.status
        after = build_status(
            service,
            observed,
            step,
            before,
            target=target,
            desired=desired,
            now=_rfc3339(self._kube.now),
        )
        if images is not None:
            after = msgspec.structs.replace(after, images=images)
        meta = service.metadata
        self._metrics.saw((meta.namespace, meta.name), after)
        if after == before:
            return
        named = {"name": meta.name, "namespace": meta.namespace}
        about = {"apiVersion": API_VERSION, "kind": KIND, "metadata": named}
        try:
            dropped = await self._kube.apply_status(about, msgspec.to_builtins(after))
        except ApiError as exc:
            if not exc.is_refusal:
                raise
            words = f"out of date, because the API server refuses it: {exc}"
            await self._tell_without_status(service, words)
            return
        if dropped:  # what is remembered there is forgotten, such as the step of a canary
            words = f"incomplete, because the API server drops {', '.join(dropped)}"
            await self._tell_without_status(service, words)
        else:
            self._silenced.discard((meta.namespace, meta.name))
        for note in events_between(before, after):
            await self._events.post(service, note)

    async def _tell_without_status(self, service: InferenceService, how: str) -> None:
        """Say once that the status is not to be believed; all else goes on."""
        key = service.metadata.namespace, service.metadata.name
        if key not in self._silenced:
            self._silenced.add(key)
            words = f"the status is {how}; apply the chart or crds/ of the operator's version"
            await self._events.post(service, EventNote("Warning", Reason.OPERATOR_PROBLEM, words))

    async def _report_blocked(self, service: InferenceService, problem: Problem) -> float:
        """Nothing could be done at all."""
        step = Step({}, (), Phase.Failed, problem.message, ())
        observed = Observed(problems=(problem,))
        await self._report(service, observed, step, revision(service), fixed_counts(service))
        return REFUSAL_S

    async def _report_unusable(self, raw: Raw, error: SpecError) -> None:
        """Say what is wrong with a spec that cannot even be read; pods that run are left alone,
        unless it says `suspend`."""
        problem = Problem("SpecInvalid", f"{error}; correct the spec")
        spec = _READABLE_SPEC | {"suspend": raw["spec"].get("suspend") is True}
        service = parse_object({**raw, "spec": spec}, self._images)
        if service.spec.suspend:
            meta = service.metadata
            children = self._watched.children((meta.namespace, meta.name))
            await self._executor.stop(service, children)
        await self._report_blocked(service, problem)


_WAITS = (
    "this operator would replace the pods, which wait for {}; to have it now, set the "
    f"annotation {UPGRADE_ANNOTATION} to a new value"
)
_READABLE_SPEC: dict[str, Any] = {"model": {"uri": "dummy://"}, "prefill": {}, "decode": {}}
"""Stands in for one that is not, so that a status can be written for it."""


def _kept_by_others(snapshot: ServiceSnapshot, now: str) -> Iterator[Problem]:
    """Objects that are deleted, and stay until somebody takes a finalizer off or mends a node. None
    of the same name can be made before, and who waits for the end of pods waits for ever."""
    late = [
        pod
        for pod in snapshot.pods
        if seconds_between(pod["metadata"].get("deletionTimestamp", ""), now) > LATE_S
    ]
    for raw in (*snapshot.children.values(), *late):
        meta = raw["metadata"]
        # Kubernetes' own have no slash, or are those of load balancers, and go by themselves.
        names = [
            name
            for name in meta.get("finalizers") or ()
            if "/" in name and not name.startswith("service.kubernetes.io/")
        ]
        if names and "deletionTimestamp" in meta:
            yield Problem(
                "OperatorProblem",
                f"the {raw['kind']} {meta['name']} is deleted, but kept by the finalizer "
                f"{', '.join(names)}; let its owner end, or take it off",
            )
        elif raw["kind"] == "Pod":
            yield Problem(
                "OperatorProblem",
                f"the Pod {meta['name']} was to end by {meta['deletionTimestamp']}, and its node "
                f"{raw['spec'].get('nodeName', '')} does not say that it has; bring the node back, "
                "or delete the node if it is lost",
            )


def _nobodys(snapshot: ServiceSnapshot) -> Iterator[Problem]:
    """Pods that Kubernetes let go of, as it does when somebody changes the labels that it chose
    them by. No rollout ends them, and they still count wherever their other labels lead."""
    for raw in snapshot.pods:
        meta = raw["metadata"]
        ends = "deletionTimestamp" in meta or pod_view(raw).gone
        if not (meta.get("ownerReferences") or ends):
            yield Problem(
                "OperatorProblem",
                f"the Pod {meta['name']} belongs to nothing, as after a change of its labels, so "
                "it stays for ever; delete it, or give it the labels of its like again",
            )


def _foreign(
    service: InferenceService, pods: Iterable[PodView], ours: Collection[ChildId], keys: KeySets
) -> set[Reference]:
    """What waiting pods refer to, but for what we make: that is known already."""
    made = {Reference(kind, name) for _, kind, name in ours}
    made |= {Reference("Secret", secret_name(service, k)) for k in (keys.current, keys.previous)}
    return foreign(pods, made)


def _decide(snapshot: ServiceSnapshot, desired: Counts, now: str) -> Step:
    """`now`: an RFC 3339 time."""
    service, status = snapshot.service, snapshot.service.status
    counted = count(snapshot.observed, snapshot.target, status.transfer, now)
    step = plan(
        snapshot.target,
        desired,
        service.spec.rollout,
        snapshot.revision_states(now),
        verify=service.verification == "Required",
        failed=deadline_missed(status.rollout, service, counted, now),
        full=lacks_room(status.rollout, counted),
        routers_serving=[
            *(tuple(router.serving_revisions) for router in snapshot.observed.routers),
            *[None] * snapshot.observed.unreachable_routers,
        ],
        suspend=service.spec.suspend,
        evidence=_evidence(snapshot, now),
    )
    rollout = service.spec.rollout
    if rollout.when_full != "ReplaceInPlace" or not rollout.max_surge:
        return step
    return replace(step, in_place=snapshot.observed.cramped(snapshot.target, now))


def _evidence(snapshot: ServiceSnapshot, now: str) -> Evidence:
    """What is known of a canary at an RFC 3339 time."""
    service, status, observed = snapshot.service, snapshot.service.status, snapshot.observed
    before = Trial.read(status.rollout.canary)
    distrusted = service.verification == "Required"
    return Evidence(
        stable=status.current_revision,
        before=before,
        now=now,
        held_s=0.0 if before is None else seconds_between(before.since, now),
        reports=[
            *(router.trial for router in observed.routers),
            *[None] * observed.unreachable_routers,
        ],
        earlier=snapshot.earlier_trials,
        untrusted=failures(observed, (snapshot.target,)) if distrusted else (),
        again=status.observed_generation != service.metadata.generation,
    )


def _interval(snapshot: ServiceSnapshot, step: Step) -> float | None:
    """Until the next pass, if nothing happens before; None if only an event can bring news."""
    service = snapshot.service
    if service.spec.suspend and step.phase is Phase.Suspended:
        return None
    if step.phase not in (Phase.Idle, Phase.Suspended):
        return BUSY_INTERVAL_S
    scalings = (pool.autoscaling for pool in service.pools.values())
    by_load = any(scaling is not None and scaling.by == "Operator" for scaling in scalings)
    observed = snapshot.observed
    unwell = observed.unreachable_routers or any(not report.ready for report in observed.routers)
    if (by_load or unwell or service.spec.router.elastic_roles) and not snapshot.asleep:
        return AUTOSCALE_INTERVAL_S  # no event tells of what only routers know
    router = service.spec.router
    return SECRETS_INTERVAL_S if router.api_keys or router.tls else REST_INTERVAL_S


def _rfc3339(now: datetime) -> str:
    """In whole seconds, as Kubernetes writes times."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
