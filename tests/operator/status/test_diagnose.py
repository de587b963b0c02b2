"""Raw pods as clusters really report them, and the words that a user gets for them."""

from __future__ import annotations

from typing import Any

import pytest
from cases import each

from diptych_operator.status.diagnose import (
    MAX_QUOTE,
    Finding,
    Severity,
    diagnose,
    progress_text,
    shorten,
    telling_line,
)
from diptych_operator.status.observed import Observed, observe
from diptych_operator.status.reasons import Reason

IMAGE = "registry.example/engine:2"


def pod(
    name: str = "svc-decode-1a2b3c4d-7c9d-abcde",
    role: str = "decode",
    revision: str = "1a2b3c4d",
    phase: str = "Running",
    ready: bool = False,
    **rest: Any,
) -> dict[str, Any]:
    """A pod as the API server gives it; `rest` goes into its status."""
    labels = {"diptych.dev/role": role, "diptych.dev/revision": revision}
    conditions = [{"type": "Ready", "status": str(ready)}, *rest.pop("conditions", [])]
    return {
        "metadata": {"name": name, "labels": labels, **rest.pop("metadata", {})},
        "status": {"phase": phase, "conditions": conditions, **rest},
    }


def container(
    name: str = "engine",
    *,
    waiting: tuple[str, str] | None = None,
    ended: dict[str, Any] | None = None,
    last: dict[str, Any] | None = None,
    restarts: int = 0,
) -> dict[str, Any]:
    """A containerStatus: waiting, ended, or else running."""
    if waiting:
        state: dict[str, Any] = {"waiting": {"reason": waiting[0], "message": waiting[1]}}
    elif ended:
        state = {"terminated": ended}
    else:
        state = {"running": {"startedAt": "2026-11-21T07:00:00Z"}}
    return {
        "name": name,
        "image": IMAGE,
        "restartCount": restarts,
        "state": state,
        "lastState": {"terminated": last} if last else {},
    }


def waits(reason: str, message: str = "", phase: str = "Pending") -> dict[str, Any]:
    return pod(phase=phase, containerStatuses=[container(waiting=(reason, message))])


def crashed(words: str, *, reason: str = "Error", code: int = 2, **options: Any) -> dict[str, Any]:
    """CrashLoopBackOff after the given last words."""
    back_off = "back-off 2m40s restarting failed container=engine pod=svc-decode_default(3f2a)"
    last = {"exitCode": code, "reason": reason, "message": words}
    status = container(waiting=("CrashLoopBackOff", back_off), last=last, restarts=5)
    return pod(containerStatuses=[status], **options)


def one(raw: dict[str, Any], role: str = "decode") -> Finding:
    found = diagnose(observe([], [raw]), role)
    assert len(found) == 1
    return found[0]


BAD_MODEL = "model: /models/x.gguf does not exist; mount it or correct spec.model.uri"
TRACEBACK = """07:00:01 I [engine] diptych_engine.control.core: starting
Traceback (most recent call last):
  File "core.py", line 3, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""
UNAUTHORIZED = (
    'rpc error: code = Unknown desc = failed to pull and unpack image "registry.example/engine:2": '
    'failed to resolve reference "registry.example/engine:2": pull access denied, repository does '
    "not exist or may require authorization: authorization failed: no basic auth credentials"
)


def unscheduled(message: str, role: str = "decode") -> dict[str, Any]:
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return pod(role=role, phase="Pending", conditions=[{**reason, "message": message}])


def fetching(**options: Any) -> dict[str, Any]:
    engine = container(waiting=("PodInitializing", ""))
    return pod(
        phase="Pending",
        podIP="10.0.0.7",
        initContainerStatuses=[container("model", **options)],
        containerStatuses=[engine],
    )


def test_a_pod_that_waits_for_a_readiness_gate_has_a_node_that_is_heard_of() -> None:
    said = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
    raw = pod(conditions=said) | {"spec": {"readinessGates": [{"conditionType": "in-balancer"}]}}
    assert not diagnose(observe([], [raw]), "decode")


FETCH_FAILED = {
    "exitCode": 2,
    "reason": "Error",
    "message": "diptych fetch: error: hf://org/repo: 401: the repository is gated\n",
}

CASES = {
    "pull, told why": (
        waits("ErrImagePull", UNAUTHORIZED),
        Reason.IMAGE_CANNOT_BE_PULLED,
        ['"registry.example/engine:2"', "no basic auth credentials", "Check spec.engine.image",
         "imagePullSecrets in spec.decode.podTemplate"],
    ),
    "pull, no such registry": (
        waits("ErrImagePull", 'rpc error: code = Unknown desc = failed to pull and unpack image '
              '"nowhere.invalid/x:1": failed to resolve reference "nowhere.invalid/x:1": failed to '
              'do request: Head "https://nowhere.invalid/v2/x/manifests/1": dial tcp: lookup '
              "x on 10.9.9.53:53: read udp 10.99.0.1:41781->10.9.9.53:53: i/o timeout"),
        Reason.IMAGE_CANNOT_BE_PULLED,
        ["(failed to do request: Head", "read udp 10.9.9.53:53: i/o timeout). "],
    ),
    "pull, backing off": (
        waits("ImagePullBackOff", f'Back-off pulling image "{IMAGE}"'),
        Reason.IMAGE_CANNOT_BE_PULLED,
        [f'cannot pull image "{IMAGE}". Check'],
    ),
    "pull, backing off, as newer kubelets tell it": (
        waits("ImagePullBackOff", f'Back-off pulling image "{IMAGE}": ErrImagePull: rpc error: '
              "code = NotFound desc = manifest unknown"),
        Reason.IMAGE_CANNOT_BE_PULLED,
        [f'cannot pull image "{IMAGE}" (manifest unknown). Check'],
    ),
    "image name": (
        waits("InvalidImageName", 'Failed to apply default image tag "a::b": couldn\'t parse image '
              'reference "a::b": invalid reference format'),
        Reason.IMAGE_CANNOT_BE_PULLED,
        ["invalid reference format", "Correct spec.engine.image"],
    ),
    "crash, our own words": (
        crashed(f"diptych engine core: error: {BAD_MODEL}\n"
                "diptych svc-decode-0: error: the engine core (pid 12) exited with code 2\n"),
        Reason.CONTAINER_CRASHING,
        [f"keeps crashing ({BAD_MODEL}). ", "kubectl logs --previous"],
    ),
    "crash, the core's traceback": (
        crashed(f"{TRACEBACK}\n"
                "diptych svc-decode-0: error: the engine core (pid 12) exited with code 1\n"),
        Reason.CONTAINER_CRASHING,
        ["(torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB)"],
    ),
    "crash, a traceback": (
        crashed(TRACEBACK, code=1),
        Reason.CONTAINER_CRASHING,
        ["(torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB)"],
    ),
    "crash, ending well again and again": (
        pod(containerStatuses=[container(waiting=("CrashLoopBackOff", "back-off 10s"),
                                         last={"exitCode": 0, "reason": "Completed"})]),
        Reason.CONTAINER_CRASHING,
        ["keeps crashing. "],
    ),
    "crashed just now": (
        pod(containerStatuses=[container(ended={"exitCode": 1, "reason": "Error",
                                                "message": "diptych engine: error: no"})]),
        Reason.CONTAINER_CRASHING,
        ["keeps crashing (no). "],
    ),
    "crashed and running again": (
        pod(containerStatuses=[container(last={"exitCode": 1, "reason": "Error",
                                               "message": "diptych engine: error: no"})]),
        Reason.CONTAINER_CRASHING,
        ["keeps crashing (no). "],
    ),
    "out of memory": (
        crashed("", reason="OOMKilled", code=137),
        Reason.OUT_OF_MEMORY,
        ["Raise spec.decode.resources.limits.memory or lower spec.engine.kvCacheMemory."],
    ),
    "out of memory, the core alone": (
        crashed("diptych svc-1a2b3c4d-decode-5b7c9-x2z4q: error: the engine core (pid 12) was "
                "killed by signal 9", code=1),
        Reason.OUT_OF_MEMORY,
        ["killed, as happens at a memory limit", "spec.decode.resources.limits.memory"],
    ),
    "no GPU": (
        unscheduled("0/1 nodes are available: 1 Insufficient nvidia.com/gpu."),
        Reason.UNSCHEDULABLE,
        ["fits no node (0/1 nodes are available: 1 Insufficient nvidia.com/gpu). ",
         "Add nodes with free nvidia.com/gpu, or ask for less in spec.decode.resources, or for"],
    ),
    "no memory and tainted": (
        unscheduled("0/3 nodes are available: 1 Insufficient memory, 2 node(s) had untolerated "
                    "taint {gpu: yes}. preemption: 0/3 nodes are available: 3 Preemption is not "
                    "helpful for scheduling."),
        Reason.UNSCHEDULABLE,
        ["taint {gpu: yes}). ", "free memory, or", "spec.decode.podTemplate.spec.tolerations"],
    ),
    "a node that is lost": (
        pod(conditions=[{"type": "Ready", "status": "False"},
                        {"type": "ContainersReady", "status": "True"}],
            containerStatuses=[container(last={"exitCode": 1, "reason": "Error"})]),
        Reason.NODE_SILENT,
        ["its node is not heard of. Bring the node back (`kubectl get nodes`), or delete it"],
    ),
    "no volume": (
        unscheduled('0/1 nodes are available: 1 persistentvolumeclaim "weights" not found.'),
        Reason.UNSCHEDULABLE,
        ['Create the PersistentVolumeClaim "weights", or correct spec.model'],
    ),
    "cordoned": (
        unscheduled("0/1 nodes are available: 1 node(s) were unschedulable."),
        Reason.UNSCHEDULABLE,
        ["(0/1 nodes are available: 1 node(s) were unschedulable). Let pods onto nodes again: "],
    ),
    "sick nodes and a taint of somebody's": (
        unscheduled("0/3 nodes are available: 1 node(s) had taint {node.kubernetes.io/not-ready: "
                    "}, that the pod didn't tolerate, 1 node(s) had untolerated taint "
                    "{node.cloudprovider.kubernetes.io/uninitialized: true}, 1 node(s) had "
                    "untolerated taint {gpu: yes}."),
        Reason.UNSCHEDULABLE,
        ["{gpu: yes}). Mend the nodes: `kubectl describe nodes` says what they lack. Tolerate the"],
    ),
    "a sick node": (
        unscheduled("0/1 nodes are available: 1 node(s) had untolerated taint "
                    "{node.kubernetes.io/disk-pressure: }."),
        Reason.UNSCHEDULABLE,
        ["disk-pressure: }). Mend the nodes: `kubectl describe nodes` says what they lack."],
    ),
    "a volume of another zone": (
        unscheduled("0/3 nodes are available: 3 node(s) had volume node affinity conflict."),
        Reason.UNSCHEDULABLE,
        ["affinity conflict). Let pods run where their volumes are (`kubectl get pv`), or correct "
         "spec.model or the podTemplate."],
    ),
    "wrong labels": (
        unscheduled("0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector"),
        Reason.UNSCHEDULABLE,
        ["Check nodeSelector and affinity in spec.decode.podTemplate.spec."],
    ),
    "no node at all": (
        unscheduled("no nodes available to schedule pods"), Reason.UNSCHEDULABLE, ["Add nodes"],
    ),
    "no Secret": (
        waits("CreateContainerConfigError", 'secret "hf-token" not found'),
        Reason.CONTAINER_CONFIG_ERROR,
        ['Create the Secret "hf-token" in this namespace.'],
    ),
    "no ConfigMap": (
        waits("CreateContainerConfigError", 'configmap "prompts" not found'),
        Reason.CONTAINER_CONFIG_ERROR,
        ['Create the ConfigMap "prompts" in this namespace.'],
    ),
    "no key": (
        waits("CreateContainerConfigError", "couldn't find key token in Secret default/hf-token"),
        Reason.CONTAINER_CONFIG_ERROR,
        ['Add the key "token" to the Secret "default/hf-token".'],
    ),
    "no command": (
        waits("RunContainerError", 'failed to start container "' + "0f" * 32 + '": exec: "pyton": '
              "executable file not found in $PATH"),
        Reason.CONTAINER_CANNOT_START,
        ['failed to start container "…"', '"pyton"', "Check the image"],
    ),
    "no command, backing off": (
        crashed('exec: "pyton": executable file not found in $PATH', reason="StartError", code=128),
        Reason.CONTAINER_CANNOT_START,
        ['"pyton"'],
    ),
    "a reason that nobody foresaw": (
        waits("PostStartHookError", "hook said no"),
        Reason.CONTAINER_CANNOT_START,
        ["(PostStartHookError: hook said no). "],
    ),
    "fetch, backing off": (
        fetching(waiting=("CrashLoopBackOff", "back-off 20s"), last=FETCH_FAILED, restarts=2),
        Reason.MODEL_CANNOT_BE_FETCHED,
        ["cannot fetch the model (hf://org/repo: 401: the repository is gated). ",
         "model.credentials"],
    ),
    "fetch, running again": (
        fetching(last=FETCH_FAILED, restarts=2),
        Reason.MODEL_CANNOT_BE_FETCHED,
        ["cannot fetch the model (hf://org/repo: 401: the repository is gated). "],
    ),
    "an init container of the user's": (
        pod(phase="Pending",
            initContainerStatuses=[container("warm-up", waiting=("CrashLoopBackOff", "back-off"),
                                             last={"exitCode": 7, "reason": "Error"})]),
        Reason.CONTAINER_CRASHING,
        ["keeps crashing (the container warm-up ended with code 7, without words). "],
    ),
}  # fmt: skip


@each(("raw", "reason", "words"), CASES.values(), ids=CASES.keys())
def test_what_is_wrong_with_a_pod_is_said_in_words(
    raw: dict[str, Any], reason: Reason, words: list[str]
) -> None:
    found = one(raw)
    assert found.reason is reason
    assert found.message.startswith("decode pod svc-decode-1a2b3c4d-7c9d-abcde: ")
    for text in words:
        assert text in found.message
    assert found.message.endswith(".")
    assert "back-off" not in found.message, "how long it waits changes while nothing changes"


def test_a_crash_tells_the_same_in_all_states_that_take_turns() -> None:
    """Else the status would be written at every restart."""
    words = "diptych engine: error: no"
    ended = {"exitCode": 2, "reason": "Error", "message": words}
    states = [
        crashed(words),
        pod(containerStatuses=[container(ended=ended, restarts=6)]),
        pod(containerStatuses=[container(last=ended, restarts=7)]),
    ]
    assert len({one(state) for state in states}) == 1


@pytest.mark.parametrize(
    "raw",
    [
        pod(ready=True, containerStatuses=[container(last={"exitCode": 1, "reason": "Error"})]),
        pod(containerStatuses=[container()]),
        pod(phase="Pending"),
        waits("ContainerCreating"),
        fetching(),
        crashed("x", metadata={"deletionTimestamp": "2026-11-21T07:00:00Z"}),
        crashed("x", phase="Failed"),
    ],
    ids=["ready again", "loading", "new", "creating", "fetching", "leaving", "evicted"],
)
def test_pods_that_only_take_their_time_or_leave_are_no_finding(raw: dict[str, Any]) -> None:
    assert diagnose(observe([], [raw]), "decode") == []


def test_pods_that_fail_alike_are_told_of_once() -> None:
    alike = [
        pod(f"p-{i}", containerStatuses=[container(waiting=("ImagePullBackOff", ""))])
        for i in range(3)
    ]
    told = pod("p-9", containerStatuses=[container(waiting=("ErrImagePull", "no such host"))])
    (found,) = diagnose(observe([], [*alike, told]), "decode")
    assert found.what.startswith("decode pod p-0 and 3 others: ")
    assert found.says == "no such host"


def test_the_worst_stands_first_and_only_of_the_role_asked_for() -> None:
    raws = [
        unscheduled("0/1 nodes are available"),
        crashed("diptych engine: error: no", name="b"),
        pod("c", containerStatuses=[container(waiting=("ErrImagePull", "gone"))]),
        crashed("x", name="other", revision="ffffffff"),
        crashed("x", name="router", role="router", revision=""),
    ]
    found = diagnose(observe([], raws), "decode")
    assert [f.severity for f in found] == [Severity.BLOCKED, Severity.FAILING, Severity.WAITING]
    assert not any("router" in f.message for f in found)
    assert found[1].what.startswith("decode pod b and 1 other:"), "of whatever revision"
    (router,) = diagnose(observe([], raws), "router")
    assert router.reason is Reason.CONTAINER_CRASHING


def test_a_router_waits_for_the_volume_of_its_batches() -> None:
    said = '0/1 nodes are available: 1 persistentvolumeclaim "files" not found.'
    found = one(unscheduled(said, "router"), "router")
    assert "or correct spec.router.batches or the podTemplate" in found.remedy


@pytest.mark.parametrize(
    ("message", "says", "remedy"),
    [
        (
            'pods "svc-decode-7c9d-abcde" is forbidden: exceeded quota: compute, requested: '
            "cpu=4, used: cpu=8, limited: cpu=10",
            "exceeded quota: compute, requested: cpu=4",
            "Raise the namespace's ResourceQuota, or ask for less in spec.decode.resources.",
        ),
        (
            'pods "svc-decode-7c9d-fghij" is forbidden: violates PodSecurity "restricted:latest": '
            "host namespaces (hostNetwork=true)",
            'violates PodSecurity "restricted:latest"',
            "Correct spec.decode.podTemplate",
        ),
        (
            'pods "svc-decode-7c9d-klmno" is forbidden: failed quota: q: must specify requests.cpu',
            "failed quota: q: must specify requests.cpu",
            "Say in spec.decode.resources what it names.",
        ),
        (
            'pods "svc-decode-7c9d-klmno" is forbidden: minimum memory usage per Container is 8Gi, '
            "but request is 256Mi",
            "minimum memory usage per Container is 8Gi",
            "Say in spec.decode.resources what the namespace's LimitRange allows, or change that.",
        ),
        (
            'Pod "svc-decode-7c9d-klmno" is invalid: spec.containers[0].resources.requests: '
            'Invalid value: "256Mi": must be less than or equal to memory limit',
            "spec.containers[0].resources.requests: Invalid value",
            "Say in spec.decode.resources what the namespace's LimitRange allows, or change that.",
        ),
    ],
)
def test_pods_that_cannot_be_created_at_all(message: str, says: str, remedy: str) -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "message": message}
    labels = {"diptych.dev/role": "decode", "diptych.dev/revision": "1a2b3c4d"}
    raw = {
        "metadata": {"name": "svc-decode-1a2b3c4d", "labels": labels},
        "status": {"conditions": [condition]},
    }
    (found,) = diagnose(observe([raw], []), "decode")
    assert (found.reason, found.severity) == (Reason.PODS_REFUSED, Severity.BLOCKED)
    assert found.says.startswith(says)
    assert remedy in found.message
    assert "7c9d" not in found.message, "the next try has another name"


def test_how_far_pods_have_come() -> None:
    raws = [
        pod("a", ready=True),
        pod("b", containerStatuses=[container()]),
        pod("c", phase="Pending"),
        waits("ContainerCreating") | {"metadata": pod("d")["metadata"]},
        fetching() | {"metadata": pod("e")["metadata"]},
        crashed("x", name="f"),
        crashed("x", name="g", metadata={"deletionTimestamp": "2026-11-21T07:00:00Z"}),
        pod("h", revision="ffffffff", ready=True),
    ]
    assert progress_text(observe([], raws), "decode", 7, ["1a2b3c4d"]) == (
        "1 of 7 pods ready; 1 being started by the node; 1 failing; 1 fetching the model; "
        "1 loading the model; 1 not created yet; 1 waiting for a node"
    )
    assert progress_text(observe([], raws), "decode", 2).startswith("2 of 2 pods ready")
    assert progress_text(Observed(), "prefill", 1) == "0 of 1 pods ready; 1 not created yet"


def test_a_quote_is_found_again_in_an_earlier_message() -> None:
    told = one(waits("ErrImagePull", "no such host"))
    silent = one(waits("ImagePullBackOff", ""))
    assert silent.said_in(f"1 of 2 pods ready. {told.message} Another.") == "no such host"
    assert silent.said_in(silent.message) is None
    assert silent.said_in("") is None


@each(
    ("log", "line"),
    [
        ("", ""),
        ("\n \n", ""),
        ("a\nb\n", "b"),
        ("07:12:01 E [engine] x: lost\n", "E [engine] x: lost"),
        ("2026-11-21T07:12:01.5Z lost\n", "lost"),
        ("diptych engine: error: one\nlater noise\n", "one"),
        ("diptych model-fetch: error: one\nlater noise\n", "one"),
        ("ValueError: no\nnoise\n", "ValueError: no"),
        ("Terminated\n", "Terminated"),
    ],
)
def test_the_most_telling_line(log: str, line: str) -> None:
    assert telling_line(log) == line


def evicted(made: str, revision: str = "1a2b3c4d") -> dict[str, Any]:
    """The record that a node leaves."""
    words = 'Usage of EmptyDir volume "model-cache" exceeds the limit "1Gi". '
    meta = {"creationTimestamp": made}
    return pod("svc-decode-0", revision=revision, phase="Failed", reason="Evicted", message=words,
               metadata=meta)  # fmt: skip


def test_a_pod_that_its_node_evicted_is_told_of_while_the_next_one_is_not_ready() -> None:
    """A pod that outgrows its disk looks like one that starts, again and again."""
    made = {"creationTimestamp": "2026-11-21T08:30:00Z"}
    lately, once = evicted("2026-11-21T08:29:00Z"), evicted("2026-11-21T07:00:00Z")
    starts, serves = pod(metadata=made), pod(ready=True, metadata=made)
    (found,) = diagnose(observe([], [lately, starts]), "decode")
    assert found.reason is Reason.POD_EVICTED
    assert (
        'svc-decode-0: was evicted by its node (Usage of EmptyDir volume "model-' in found.message
    )
    assert "model.cache.ephemeral" in found.message
    for others in ([lately, serves], [once, starts], [lately],
                   [evicted("2026-11-21T08:29:00Z", "0" * 8), starts]):  # fmt: skip
        assert not diagnose(observe([], others), "decode")


def test_long_words_are_shortened_to_one_line() -> None:
    assert shorten("a  b\nc", 80) == "a b c"
    assert shorten("x" * 20, 10) == "x" * 9 + "…"
    assert len(telling_line("y" * 9000)) == MAX_QUOTE
    pulled = one(waits("ErrImagePull", "z" * 5000 + " at last"))
    assert pulled.says.startswith("…z")
    assert pulled.says.endswith(" at last")
    assert len(pulled.message) < 1024
