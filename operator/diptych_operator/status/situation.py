"""The input and the output of the functions that judge conditions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from diptych_operator.api.base import camel_case
from diptych_operator.api.pools import Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.api.status import ConditionStatus, Status, TransferStatus
from diptych_operator.plan import Step
from diptych_operator.status.diagnose import Finding, shorten
from diptych_operator.status.observed import Observed
from diptych_operator.status.reasons import Reason

MAX_WORDS = 400
"""Characters of a router's own words that a message repeats."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The content of a condition; `build_status` adds when it began."""

    status: ConditionStatus
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of all conditions."""

    service: InferenceService
    observed: Observed
    step: Step
    previous: Status
    target: str
    desired: Counts
    current: str
    """The revision that last served at full size, as of now."""
    transfer: TransferStatus
    findings: Mapping[str, list[Finding]]
    """By role, the worst first."""

    @property
    def serving(self) -> tuple[str, ...]:
        """Revisions that may serve, the newest first."""
        serving = self.step.serving or self.observed.revisions()
        return tuple(sorted(serving, key=lambda name: (name != self.target, name)))

    @property
    def blind(self) -> bool:
        """Whether the operator met a problem before it could look at the pods."""
        found = self.observed.pods or self.observed.deployments
        return bool(self.observed.problems) and not found

    @property
    def refused_settings(self) -> list[str]:
        """The settings that routers do not have, in the routers' words, with the remedy."""
        refused = {
            f"spec.router.{camel_case(each.setting)}: {each.why}."
            for router in self.observed.routers
            for each in router.refused_settings
        }
        remedy = Reason.ROUTER_SETTING_REFUSED.remedy
        return [f"{shorten(text, MAX_WORDS)} {remedy}" for text in sorted(refused)]

    @property
    def keyless(self) -> str:
        """What to tell where a router knows no key by which it could let anybody in."""
        keys = self.service.spec.router.api_keys
        if keys is None or not any(router.admits_nobody for router in self.observed.routers):
            return ""
        return (
            f'The Secret "{keys.secret_name}" of spec.router.apiKeys has no entry that routers '
            "take as a key, so they refuse everybody. Add one: a line of visible ASCII."
        )

    @property
    def unusable_secrets(self) -> Iterator[str]:
        """What to tell of Secrets that are of no use."""
        keys, tls = self.service.spec.router.api_keys, self.service.spec.router.tls
        if self.keyless:
            yield self.keyless
        wrong = {text for router in self.observed.routers for text in router.left_out_keys}
        if keys is not None and wrong:
            yield (
                f'In the Secret "{keys.secret_name}" of spec.router.apiKeys, '
                f"{shorten('; '.join(sorted(wrong)), MAX_WORDS)}. Correct or remove what is named."
            )
        words = {router.refused_certificate for router in self.observed.routers} - {""}
        if tls is not None and words:
            yield (
                f'Routers cannot use the Secret "{tls.secret_name}" of spec.router.tls '
                f"({shorten(min(words), MAX_WORDS)}). They keep the former certificate, but none "
                "can start. Correct tls.crt and tls.key, a PEM certificate and its key."
            )
        ended = {router.expired_certificate for router in self.observed.routers} - {""}
        if tls is not None and ended:
            yield (
                f'The certificate of the Secret "{tls.secret_name}" of spec.router.tls ended at '
                f"{shorten(min(ended), MAX_WORDS)}, and clients refuse it. Renew it."
            )

    def wanted(self, role: str) -> int:
        if self.service.spec.suspend:
            return 0
        return self.service.spec.router.replicas if role == "router" else self.desired.of(role)

    def ready(self, role: str, revisions: Iterable[str] | None = None) -> int:
        return ready_pods(self.observed, role, revisions)

    def pair_ready(self, revision: str) -> bool:
        return all(self.ready(role, (revision,)) for role in self.observed.pools(revision))


def ready_pods(observed: Observed, role: str, revisions: Iterable[str] | None = None) -> int:
    """Return the ready pods that are to stay, of the given revisions or of any."""
    chosen = None if revisions is None else set(revisions)
    return sum(
        pod.ready and not pod.terminating and (chosen is None or pod.revision in chosen)
        for pod in observed.pods
        if pod.role == role
    )
