"""Batches on a volume that two routers share: they outlive the pods that work on them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from e2e.conftest import image
from e2e.kubectl import Kubectl, Object, wait_for
from e2e.service import Service
from e2e.traffic import Client
from e2e.volume import SharedVolume

CLAIM = "batches"
NUM_REQUESTS = 60
MAX_TOKENS = 48
BEGUN_TIMEOUT_S = 120.0
END_TIMEOUT_S = 600.0
"""On a slow node the requests take minutes, and so do new routers."""


@pytest.fixture(scope="module")
def volume(kubectl: Kubectl) -> Iterator[SharedVolume]:
    volume = SharedVolume(kubectl, image("router"), CLAIM)
    volume.make()
    yield volume
    volume.remove()


@pytest.fixture(scope="module")
def running(volume: SharedVolume, smollm2: Service, example: Object) -> Service:
    """The example with two routers that keep batches on the volume."""
    router = {"replicas": 2, "batches": {"pvc": {"claimName": CLAIM}, "size": "512Mi"}}
    smollm2.apply({**example, "spec": {**example["spec"], "router": router}})
    smollm2.settled()
    return smollm2


def lines() -> str:
    bodies = (
        {
            "model": "smollm2",
            "messages": [{"role": "user", "content": f"Tell me something about number {number}."}],
            "max_tokens": MAX_TOKENS,
        }
        for number in range(NUM_REQUESTS)
    )
    return "\n".join(
        json.dumps(
            {
                "custom_id": f"n{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
        )
        for number, body in enumerate(bodies)
    )


def test_a_batch_outlives_every_router_that_works_on_it(
    running: Service, client: Client, kubectl: Kubectl
) -> None:
    file = json.loads(client.upload(f"{running.url}/files", lines(), purpose="batch"))
    asked = {
        "input_file_id": file["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch = json.loads(client.fetch(f"{running.url}/batches", asked))

    def counts(at_least: int) -> dict[str, int] | None:
        found = json.loads(client.fetch(f"{running.url}/batches/{batch['id']}"))["request_counts"]
        return found if found["completed"] >= at_least else None

    begun = wait_for("the batch has begun", lambda: counts(1), BEGUN_TIMEOUT_S)
    assert begun is not None
    assert begun["completed"] < NUM_REQUESTS, "too quick: nothing is left to go on with"
    killed = {pod["metadata"]["name"] for pod in running.pods("router")}
    assert len(killed) == 2
    kubectl.delete("pods", *killed, grace_s=0)
    # The status may still be that of before: what counts is that others are ready.
    wait_for(
        "two other routers are ready",
        lambda: len(set(running.ready_pods("router")) - killed) == len(killed),
        BEGUN_TIMEOUT_S,
    )
    assert counts(begun["completed"]), "what was answered before the kill is gone"
    wait_for("all requests are answered", lambda: counts(NUM_REQUESTS), END_TIMEOUT_S)

    def ended() -> Object | None:
        found: Object = json.loads(client.fetch(f"{running.url}/batches/{batch['id']}"))
        return found if found["status"] == "completed" else None

    done = wait_for("the batch has ended", ended, BEGUN_TIMEOUT_S)
    assert done is not None
    assert done["error_file_id"] is None
    answers = (
        client.fetch(f"{running.url}/files/{done['output_file_id']}/content").strip().splitlines()
    )
    found = [json.loads(answer) for answer in answers]
    assert sorted(answer["custom_id"] for answer in found) == sorted(
        f"n{number}" for number in range(NUM_REQUESTS)
    )
    assert {answer["response"]["status_code"] for answer in found} == {200}
