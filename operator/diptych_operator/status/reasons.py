"""Every condition and every reason that a status may carry, with what it means and what to do.

`docs/reference_pages.py` writes them into docs/status.md. Reasons are stable: scripts and alerts
compare them, so one that has been released keeps its name and its meaning.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class ConditionType(StrEnum):
    """The conditions of an InferenceService, all always present, in this order."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    AVAILABLE = (
        "Available",
        (
            "Requests are answered: a router is ready and lets clients in, and a prefill and a "
            "decode pod of one revision that serves; with `transfer.verify: Required` a canary has "
            "crossed between them."
        ),
    )
    PROGRESSING = "Progressing", "The service is starting, or a change of it is rolling out."
    DEGRADED = (
        "Degraded",
        (
            "Something wants attention, whether or not requests are answered. The reason is that "
            "of the worst; the message tells all."
        ),
    )
    PREFILL_READY = "PrefillReady", "As many prefill pods are ready as are wanted."
    DECODE_READY = "DecodeReady", "As many decode pods are ready as are wanted."
    ROUTER_READY = "RouterReady", "As many router pods are ready as are wanted."
    KV_TRANSFER_VERIFIED = (
        "KVTransferVerified",
        (
            "A real request crossed the hinge of the newest revision that could be tried: its KV "
            "blocks moved, and decode computed nothing of the prompt."
        ),
    )
    READY = (
        "Ready",
        (
            "Everything is as the newest spec asks: all wanted pods are ready, of the newest "
            "revision, and requests are answered; or, if it is suspended, no pod is left."
        ),
    )
    RECONCILING = (
        "Reconciling",
        "Something is on its way to what the spec asks, or has to come back. Never with Stalled.",
    )
    STALLED = (
        "Stalled",
        "It comes no further until somebody changes an object; the message says which.",
    )


class Group(StrEnum):
    """The groups of reasons in the reference."""

    WELL = "As it should be"
    UNDER_WAY = "Under way"
    PODS = "Pods that fail"
    SERVICE = "The service as a whole"
    OPERATOR = "What the operator ran into"
    EVENTS = "In events only"


class Reason(StrEnum):
    """The reasons, with `group`, `meaning` and `remedy` (empty if there is nothing to do)."""

    group: Group
    meaning: str
    remedy: str

    def __new__(cls, value: str, group: Group, meaning: str, remedy: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.group, member.meaning, member.remedy = group, meaning, remedy
        return member

    @classmethod
    def named(cls, text: str) -> Reason:
        """Return the reason of that name; `OperatorProblem` for a name that is not listed here."""
        return next((reason for reason in cls if reason == text), cls.OPERATOR_PROBLEM)

    SERVING = "Serving", Group.WELL, "The service answers requests."
    PODS_READY = "PodsReady", Group.WELL, "All wanted pods are ready."
    IDLE = "Idle", Group.WELL, "Nothing is being changed."
    AS_EXPECTED = "AsExpected", Group.WELL, "Nothing wants attention."
    TRANSFER_VERIFIED = (
        "TransferVerified", Group.WELL, "A canary crossed the hinge; the message has its figures.",
    )  # fmt: skip
    VERIFICATION_OFF = (
        "Disabled", Group.WELL, "`transfer.verify` is Off, so nothing is known of the hinge.",
        "Set transfer.verify to Warn or Required to learn whether KV blocks really move.",
    )  # fmt: skip
    ONE_POOL = (
        "OnePool", Group.WELL,
        "The service has no prefill pool: its decode pods compute prompts too, and hand no KV "
        "over.",
    )  # fmt: skip
    ASLEEP = (
        "Asleep", Group.WELL,
        "Both pools are scaled to zero. Routers hold the next request until pods are back.",
    )  # fmt: skip
    SUSPENDED = (
        "Suspended", Group.WELL, "`spec.suspend` is true: there are no pods.",
        "Set spec.suspend to false to serve again.",
    )  # fmt: skip

    WAKING = "Waking", Group.UNDER_WAY, "Pods start after sleep; routers hold the requests."
    STARTING = "Starting", Group.UNDER_WAY, "Pods are starting; nothing has failed."
    ROLLING_OUT = "RollingOut", Group.UNDER_WAY, "A new revision replaces the one that serves."
    VERIFYING = (
        "Verifying", Group.UNDER_WAY, "Engines are up, and their canary has not come back yet.",
    )  # fmt: skip
    SWITCHING = "Switching", Group.UNDER_WAY, "Routers turn to the new revision."
    WAITING_FOR_ENGINES = (
        "WaitingForEngines", Group.UNDER_WAY,
        "There is no pair of ready engines that a canary could go through.",
    )  # fmt: skip

    PODS_REFUSED = (
        "PodsRefused", Group.PODS, "Kubernetes does not let the pods be created.",
        "Raise the namespace's ResourceQuota, or satisfy the admission rule that it names.",
    )  # fmt: skip
    IMAGE_CANNOT_BE_PULLED = (
        "ImageCannotBePulled", Group.PODS, "The node cannot get a container's image.",
        "Check spec.engine.image (spec.router.image); left out, it is the chart's images.engine "
        "(images.router). For a private registry set imagePullSecrets through the podTemplate.",
    )  # fmt: skip
    CONTAINER_CONFIG_ERROR = (
        "ContainerConfigError", Group.PODS,
        "A container needs a Secret or ConfigMap that is not there, or may not run as set up.",
        "Create what the message names, or correct the podTemplate or model.credentials.",
    )  # fmt: skip
    CONTAINER_CANNOT_START = (
        "ContainerCannotStart", Group.PODS, "The node has the image but cannot start it.",
        "Check the image, and the command and mounts of the podTemplate.",
    )  # fmt: skip
    MODEL_CANNOT_BE_FETCHED = (
        "ModelCannotBeFetched", Group.PODS, "The init container that fetches the model fails.",
        "Check spec.model.uri and revision, model.credentials, and the way to that host.",
    )  # fmt: skip
    OUT_OF_MEMORY = (
        "OutOfMemory", Group.PODS, "The kernel ended a container at its memory limit.",
        "Raise resources.limits.memory of the pool, or lower engine.kvCacheMemory.",
    )  # fmt: skip
    POD_EVICTED = (
        "PodEvicted", Group.PODS, "A node evicted a pod, and the next is not ready.",
        "Raise the limit that the words name (model.cache.ephemeral is one), or request in "
        "resources what the pod uses.",
    )  # fmt: skip
    CONTAINER_CRASHING = (
        "ContainerCrashing", Group.PODS, "A container ends again and again; its last words follow.",
        "Correct what the words name; `kubectl logs --previous` has the rest.",
    )  # fmt: skip
    UNSCHEDULABLE = (
        "Unschedulable", Group.PODS, "No node fits the pod.",
        "Add nodes, lower resources.requests or replicas, or add what the podTemplate lacks.",
    )  # fmt: skip
    NODE_SILENT = (
        "NodeSilent", Group.PODS, "The pod's node is not heard of.",
        "Bring the node back (`kubectl get nodes`), or delete it: its pods move.",
    )  # fmt: skip

    PREFILL_NOT_READY = (
        "PrefillNotReady", Group.SERVICE, "No prefill pod of a serving revision is ready.",
        "See the condition PrefillReady.",
    )  # fmt: skip
    DECODE_NOT_READY = (
        "DecodeNotReady", Group.SERVICE, "No decode pod of a serving revision is ready.",
        "See the condition DecodeReady.",
    )  # fmt: skip
    NO_MATCHING_PAIR = (
        "NoMatchingPair", Group.SERVICE,
        "Prefill and decode pods are ready, but of different revisions, which never exchange KV.",
        "See which pool of the new revision lacks pods, and why.",
    )  # fmt: skip
    ROUTER_NOT_READY = (
        "RouterNotReady", Group.SERVICE, "No router is ready; the message has its own words.",
        "If the words speak of a pool, see that pool's condition.",
    )  # fmt: skip
    TRANSFER_NOT_VERIFIED = (
        "TransferNotVerified", Group.SERVICE,
        "The pods are ready, but no canary has crossed the hinge and `transfer.verify` is "
        "Required.",
        "See the condition KVTransferVerified.",
    )  # fmt: skip
    TRANSFER_FAILED = (
        "TransferFailed", Group.SERVICE, "A canary did not cross the hinge; the message says why.",
        "Check spec.transfer.transport, and that pods reach each other on port 5558, or on 5600 "
        "with transfer.connector nixl (NetworkPolicy, RDMA devices). Routers try again by "
        "themselves.",
    )  # fmt: skip
    ROLLOUT_FAILED = (
        "RolloutFailed", Group.SERVICE,
        "The new revision came no further for rollout.progressDeadlineSeconds. What served "
        "before keeps serving.",
        "Correct the spec, or set it back; raise the deadline if loading just takes longer, and "
        "see rollout.whenFull if pods found no node.",
    )  # fmt: skip
    ROUTER_SETTING_REFUSED = (
        "RouterSettingRefused", Group.SERVICE,
        "A field of spec.router asks for what a router does not have, such as a policy. It never "
        "gets ready; routers that were there before serve on.",
        "Correct that field, or set spec.router.image to a router that has it.",
    )  # fmt: skip
    ROUTER_UNREACHABLE = (
        "RouterUnreachable", Group.SERVICE,
        "A router is ready, but the operator gets no report from its admin port.",
        "Let the operator reach port 8081 of the router pods (NetworkPolicy); if routers refuse "
        "its token, rotate the keys.",
    )  # fmt: skip

    SPEC_INVALID = (
        "SpecInvalid", Group.OPERATOR, "The spec can never work as written.",
        "Correct the field that the message names.",
    )  # fmt: skip
    POD_TEMPLATE_REJECTED = (
        "PodTemplateRejected", Group.OPERATOR,
        "The API server refuses the pods as the podTemplate makes them; its words follow.",
        "Correct spec.prefill.podTemplate, spec.decode.podTemplate or spec.router.podTemplate.",
    )  # fmt: skip
    OBJECT_NOT_OURS = (
        "ObjectNotOurs", Group.OPERATOR,
        "An object that the service needs exists already and belongs to somebody else. One that "
        "nobody owns and that has all labels of the service's own objects is adopted instead.",
        "Delete or rename that object, or give the service another name.",
    )  # fmt: skip
    KEYS_LOST = (
        "KeysLost", Group.OPERATOR,
        "Somebody deleted the Secret with the service's keys while pods use them. They serve on, "
        "but no new pod can join them.",
        "Bring the Secret back from a backup, or ask for new keys: a new value of the annotation "
        "`diptych.dev/rotate-secrets` replaces all pods.",
    )  # fmt: skip
    POOL_SCALER_UNAVAILABLE = (
        "PoolScalerUnavailable", Group.OPERATOR,
        "A pool is to be scaled from outside, but its PoolScaler cannot be kept. The pool keeps "
        "its size.",
        "Apply the chart or crds/ of the operator's version, with its rights, or set "
        "autoscaling.by to Operator.",
    )  # fmt: skip
    GATEWAY_UNAVAILABLE = (
        "GatewayUnavailable", Group.OPERATOR,
        "spec.expose.gateway leads no requests here.",
        "Install the CRDs of the Gateway API and its inference extension, or do what the message "
        "says.",
    )  # fmt: skip
    SET_UNAVAILABLE = (
        "DisaggregatedSetUnavailable", Group.OPERATOR,
        "The cluster lacks what spec.workload asks for.",
        "Install LeaderWorkerSet.",
    )  # fmt: skip
    OPERATOR_PROBLEM = (
        "OperatorProblem", Group.OPERATOR, "The operator could not do its work; it tries again.",
        "Read the message; the operator's log has the rest.",
    )  # fmt: skip

    ROLLOUT_STARTED = "RolloutStarted", Group.EVENTS, "A rollout, or the first start, began."
    ROLLOUT_FINISHED = "RolloutFinished", Group.EVENTS, "The newest revision serves in full."
    SERVED_BY_ANOTHER = (
        "ServedByAnother", Group.EVENTS,
        "Another installation of the operator serves this already; the one that says so touches "
        "nothing.",
        "Uninstall one of the two, or give them different namespaces.",
    )  # fmt: skip
    UPGRADE_WAITS = (
        "UpgradeWaits", Group.EVENTS,
        "An upgraded operator would replace the pods; they wait for their turn, or a window.",
        "To have it now, set the annotation `diptych.dev/upgrade` anew.",
    )  # fmt: skip
    RECOVERED = "Recovered", Group.EVENTS, "What wanted attention does no more."
