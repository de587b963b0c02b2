"""What the kubectl plugin makes of raw objects: tables, words and load. Nothing is asked for."""

from __future__ import annotations

import io
from typing import Any

import pytest
from cases import each
from rich.console import Console, RenderableType

from diptych import engine_load as top
from diptych.kubectl import view, why
from diptych_operator.status.reasons import Reason

SINCE = "2026-11-21T07:00:00Z"
WELL = {
    "Available": ("True", "Serving", "A router and both pools of revision aaaaaaaa are ready."),
    "Progressing": ("False", "Idle", "whole"),
    "Degraded": ("False", "AsExpected", "Nothing wants attention."),
    "PrefillReady": ("True", "PodsReady", "1 ready, 1 wanted."),
    "DecodeReady": ("True", "PodsReady", "2 ready, 2 wanted."),
    "RouterReady": ("True", "PodsReady", "1 ready, 1 wanted."),
    "KVTransferVerified": ("True", "TransferVerified", "16 blocks"),
}
CRASH = "decode pod svc-decode-1: keeps crashing (model: [x] does not exist). Correct the spec."


def raw(generation: int = 7, observed: int = 7, **conditions: tuple[str, str, str]) -> Any:
    """An InferenceService at rest, but for the conditions given."""
    return {
        "metadata": {"name": "svc", "namespace": "ns", "generation": generation},
        "spec": {"model": {"uri": "hf://org/repo"}},
        "status": {
            "observedGeneration": observed,
            "url": "http://svc-router.ns.svc:8000/v1",
            "currentRevision": "aaaaaaaa",
            "updateRevision": "bbbbbbbb",
            "prefill": {"summary": "1/1", "ready": 1, "updated": 1},
            "decode": {"summary": "2/2", "ready": 2, "updated": 2, "draining": 3},
            "router": {"summary": "1/1"},
            "transfer": {
                "verifiedRevision": "aaaaaaaa", "verifiedAt": SINCE, "verifiedEngines": 3,
                "blocks": 16, "bytes": 1_200_000, "milliseconds": 4, "transport": "tcp",
            },
            "prefetched": "5/5",
            "rollout": {"phase": "Progressing", "message": "one by one"},
            "conditions": [
                {"type": kind, "status": status, "reason": reason, "message": message,
                 "lastTransitionTime": SINCE}
                for kind, (status, reason, message) in (WELL | conditions).items()
            ],
            "fieldOfANewerOperator": {},
        },
    }  # fmt: skip


def deleted(*finalizers: str) -> Any:
    """It waits for whoever put the finalizers on it."""
    service = raw(generation=8)
    service["metadata"] |= {"deletionTimestamp": SINCE, "finalizers": [*finalizers]}
    return service


def shown(picture: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(picture: RenderableType) -> list[str]:
    """Without the spaces that align the columns."""
    return [" ".join(line.split()) for line in shown(picture).splitlines()]


# --- status -----------------------------------------------------------------------------------


def test_the_listing_has_a_line_for_each_service() -> None:
    down = raw(Available=("False", "DecodeNotReady", "no"))
    new = {"metadata": {"name": "new", "namespace": "ns", "generation": 1}, "spec": {}}
    views = [view.service_view(item) for item in (raw(), down, new, deleted())]
    head, *rows = lines(view.listing(views, everywhere=True))
    assert head == "NAMESPACE NAME AVAILABLE REASON PREFILL DECODE ROUTER KV REVISION"
    assert rows == [
        "ns svc yes Serving 1/1 2/2 1/1 yes aaaaaaaa -> bbbbbbbb",
        "ns svc no DecodeNotReady 1/1 2/2 1/1 yes aaaaaaaa -> bbbbbbbb",
        "ns new ? NotReported - - - ? -",
        "ns svc ? BeingDeleted 1/1 2/2 1/1 yes aaaaaaaa -> bbbbbbbb",
    ]
    assert "NAMESPACE" not in shown(view.listing(views))


def test_an_empty_listing_says_where_it_looked() -> None:
    assert "in this namespace; -A looks in all" in shown(view.listing([]))
    assert "in this cluster" in shown(view.listing([], everywhere=True))


def test_the_details_say_everything() -> None:
    text = shown(
        view.details(view.service_view(raw(Degraded=("True", "ContainerCrashing", CRASH))))
    )
    for words in (
        "ns/svc  hf://org/repo",
        "http://svc-router.ns.svc:8000/v1",
        "aaaaaaaa -> bbbbbbbb",
        "Progressing: one by one",
        "5/5 nodes",
        "16 blocks, 1.2 MB in 4.0 ms over tcp, 3 engines verified at 2026-11-21T07:00:00Z",
        "decode   2/2    2        3",
        "(model: [x] does not exist)",
    ):
        assert words in text
    assert "no operator has looked" not in text


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (raw(generation=8), "spec is at 8: no operator has looked yet. Is it running? kubectl get"),
        ({"metadata": {"name": "svc"}, "status": {}}, "No operator has reported"),
        ({"metadata": {"name": "svc"}, "status": {"conditions": "odd"}}, "No operator"),
        (
            deleted("foregroundDeletion"),
            "being deleted, and the operator no longer looks after it.",
        ),
        (deleted("x.io/f"), "The finalizer x.io/f keeps it: let its owner end, or take it off."),
    ],
)
def test_a_status_that_is_not_up_to_date_is_said_to_be_so(item: Any, words: str) -> None:
    seen = view.service_view(item)
    assert words in shown(view.details(seen))
    assert view.as_json([seen])[0]["reported"] is False
    explained = why.explain(seen, [event("svc", "OperatorProblem", "the status is refused")])
    assert not explained.healthy
    assert words in explained.causes[0].message
    assert "OperatorProblem: the status is refused" in explained.events[0]


# --- why --------------------------------------------------------------------------------------


def explain(*warnings: Any, **conditions: Any) -> why.ServiceExplanation:
    return why.explain(view.service_view(raw(**conditions)), warnings)


def test_a_service_that_is_well_is_said_to_be_so_in_one_line() -> None:
    found = explain(event("svc-decode-1", "Unhealthy", "probe failed"))
    assert found == why.ServiceExplanation(
        True, "ns/svc is available. A router and both pools of revision aaaaaaaa are ready."
    )


STARTING = ("False", "Starting", "Starting: 0 of 1 pods ready.")


@each(
    ("conditions", "healthy", "headline", "causes"),
    [
        (
            {"Degraded": ("True", "ContainerCrashing", CRASH)},
            False, "answers requests, but wants attention", ["Degraded"],
        ),
        (
            {
                "Available": ("False", "DecodeNotReady", f"No decode pod is ready. {CRASH}"),
                "DecodeReady": ("False", "ContainerCrashing", f"0 of 2 pods ready. {CRASH}"),
                "Degraded": ("True", "ContainerCrashing", CRASH),
                "KVTransferVerified": ("Unknown", "WaitingForEngines", "no pair"),
            },
            False, "is not available.",
            ["Degraded", "Available", "KVTransferVerified", "DecodeReady"],
        ),
        (
            {
                "Available": ("False", "PrefillNotReady", "No prefill pod is ready."),
                "PrefillReady": STARTING,
                "DecodeReady": STARTING,
                "Progressing": ("True", "Starting", "waiting for pods"),
            },
            False, "is not available yet; it is on its way, and nothing has failed",
            ["Available", "PrefillReady", "Progressing"],
        ),
        (
            {"Progressing": ("False", "RolloutFailed", "No progress for 600 s.")},
            False, "answers requests, but wants attention", ["Progressing"],
        ),
        (
            {
                "Available": ("Unknown", "SpecInvalid", "Not known; see Degraded."),
                "Degraded": ("True", "SpecInvalid", "spec.rollout.type: correct the spec."),
            },
            False, "is not known to answer requests", ["Degraded", "Available"],
        ),
        (
            {"Available": ("False", "Suspended", "spec.suspend is true: requests are refused.")},
            False, "is suspended", ["Available"],
        ),
        (
            {"Progressing": ("True", "RollingOut", "one by one")},
            True, "is available", ["Progressing"],
        ),
        (
            {"KVTransferVerified": ("Unknown", "Disabled", "transfer.verify is Off.")},
            True, "is available", [],
        ),
        (
            {"KVTransferVerified": ("False", "TransferFailed", "no route")},
            True, "is available", ["KVTransferVerified"],
        ),
    ],
)  # fmt: skip
def test_what_is_not_as_wanted_is_told_worst_first(
    conditions: dict[str, Any], healthy: bool, headline: str, causes: list[str]
) -> None:
    found = explain(**conditions)
    assert found.healthy is healthy
    assert headline in found.headline
    assert [cause.what.split()[0] for cause in found.causes] == causes


def test_a_cause_carries_the_remedy_once() -> None:
    (told,) = explain(Degraded=("True", "ObjectNotOurs", "Service svc-router is not ours")).causes
    assert told.what == f"Degraded is True (ObjectNotOurs) since {SINCE}"
    assert told.remedy.startswith("Delete or rename that object")
    again = f"it is not ours. {told.remedy}"
    assert explain(Degraded=("True", "ObjectNotOurs", again)).causes[0].remedy == ""
    assert explain(Degraded=("True", "OfANewerOperator", "x")).causes[0].remedy == ""


def test_what_says_of_a_secret_or_a_pod_what_to_do_gets_no_general_advice_behind_it() -> None:
    words = 'The certificate of the Secret "x" of spec.router.tls ended. Renew it.'
    (told,) = explain(Degraded=("True", "ContainerConfigError", words)).causes
    assert (told.message, told.remedy) == (words, "")


def test_a_canary_that_failed_gets_no_other_remedy_than_its_own() -> None:
    item = raw(Progressing=("False", "RolloutFailed", "3 of 9 requests failed; change the spec"))
    for failed, remedy in (({}, Reason.ROLLOUT_FAILED.remedy), ({"failed": "3 of 9"}, "")):
        item["status"]["rollout"]["canary"] = {"revision": "bbbbbbbb", **failed}
        (told,) = why.explain(view.service_view(item)).causes
        assert told.remedy == remedy


ENDED = {"exitCode": 1, "reason": "Error", "message": "no such repository"}


def test_what_keeps_a_node_without_model_and_images_is_told_though_the_service_is_well() -> None:
    item = raw()
    item["status"]["prefetched"] = "3/5"
    pod = {
        "metadata": {
            "name": "svc-decode-prefetch-1",
            "labels": {"app.kubernetes.io/component": "decode-prefetch"},
        },
        "status": {
            "phase": "Pending",
            "initContainerStatuses": [
                {
                    "name": "model", "image": "x", "state": {"waiting": {}},
                    "lastState": {"terminated": ENDED},
                }
            ],
        },
    }  # fmt: skip
    warning = event("svc-decode-prefetch", "FailedCreate", "exceeded quota", kind="DaemonSet")
    seen = view.service_view(item)
    found = why.explain(seen, [warning], [pod])
    (cause,) = (each for each in found.causes if each.what == "Prefetched on 3/5 nodes")
    assert found.healthy
    assert "decode pod svc-decode-prefetch-1: cannot fetch the model (no such" in cause.message
    (cause,) = (each for each in why.explain(seen, [warning]).causes if "3/5" in each.what)
    assert "has made no pod for it" in cause.message
    assert "exceeded quota" in found.events[0]
    item["status"]["prefetched"] = "5/5"
    assert not why.explain(view.service_view(item), [warning], [pod]).causes


def event(name: str, reason: str, message: str, at: str = SINCE, kind: str = "Pod") -> Any:
    return {
        "involvedObject": {"kind": kind, "name": name},
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
    }


def test_the_newest_warnings_of_the_service_and_its_own() -> None:
    found = explain(
        event("svc-decode-1", "BackOff", "again", "2026-11-21T07:00:01Z"),
        event("svc", "RolloutFailed", "no\nprogress", "2026-11-21T07:00:03Z", "InferenceService"),
        event("svc-decode-2", "BackOff", "again", "2026-11-21T07:00:02Z"),
        event("svc2-decode-1", "BackOff", "another service"),
        event("other", "BackOff", "another thing"),
        *(event("svc-router-1", f"R{i}", "x", f"2026-11-21T06:00:0{i}Z") for i in range(6)),
        {"involvedObject": None},
        Degraded=("True", "ContainerCrashing", CRASH),
    )
    assert found.events[:2] == (
        "2026-11-21T07:00:03Z InferenceService/svc: RolloutFailed: no progress",
        "2026-11-21T07:00:02Z Pod/svc-decode-2: BackOff: again",
    )
    assert [text.split()[2] for text in found.events[2:]] == ["R5:", "R4:", "R3:"]


# --- top --------------------------------------------------------------------------------------


METRICS = """\
# TYPE diptych:num_requests_running gauge
diptych:num_requests_running{{model_name="m",engine="prefill/p-0"}} 1.0
diptych:num_requests_running{{model_name="m",engine="decode/d-0"}} 3.0
# TYPE diptych:kv_cache_usage_perc gauge
diptych:kv_cache_usage_perc{{model_name="m",engine="decode/d-0"}} 0.25
# TYPE diptych:kv_transfer_leases_held gauge
diptych:kv_transfer_leases_held{{model_name="m",engine="prefill/p-0"}} 2.0
# TYPE diptych:engine_tokens_generated_total counter
diptych:engine_tokens_generated_total{{model_name="m",engine="decode/d-0"}} {generated}
# TYPE diptych:engine_prompt_tokens_computed_total counter
diptych:engine_prompt_tokens_computed_total{{model_name="m",engine="prefill/p-0"}} {prompt}
# TYPE diptych:generation_tokens_total counter
diptych:generation_tokens_total{{model_name="m"}} 5.0
"""


def samples(prompt: float, generated: float) -> dict[str, top.Sample]:
    return top.read_samples(top.items_of(METRICS.format(prompt=prompt, generated=generated)))


def test_load_is_read_off_two_samples() -> None:
    found = top.loads(samples(100, 40), samples(300, 60), 2.0)
    assert lines(top.table(found)) == [
        "ENGINE ROLE RUNNING WAITING QUEUED TOKENS KV PINNED LEASES TOKENS/S",
        "p-0 prefill 1 0 0 0% 0% 2 100.0",
        "d-0 decode 3 0 0 25% 0% 0 10.0",
    ]
    assert top.as_json(found)[1]["tokens_per_s"] == 10.0


def test_an_engine_that_is_new_has_no_rate_and_one_that_restarted_counts_from_zero() -> None:
    (prefill, decode) = top.loads({}, samples(1, 1), 2.0)
    assert (prefill.tokens_per_s, decode.tokens_per_s) == (None, None)
    (prefill, _) = top.loads(samples(100, 0), samples(10, 0), 2.0)
    assert prefill.tokens_per_s == 5.0


def test_an_engine_without_a_name_is_shown_by_its_address() -> None:
    metrics = 'diptych:num_requests_running{engine="decode/tcp://10.0.0.1:7000"} 1\n'
    assert [*top.read_samples(top.items_of(metrics)).values()] == [
        top.Sample("decode", "tcp://10.0.0.1:7000", 1)
    ]


def test_routers_complete_each_other() -> None:
    one, two = {"prefill/p-0": top.Sample("prefill", "p-0", 1)}, samples(1, 1)
    assert top.merged([one, two]) == {**two, **one}
    assert top.merged([]) == {}


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(ValueError, match="could not convert string to float"):
        top.read_samples(top.items_of("<html>not { metrics"))
    assert top.read_samples(top.items_of("")) == {}
    endless = 'diptych:num_requests_running{engine="decode/d"} +Inf\n'
    assert top.read_samples(top.items_of(endless)) == {}
