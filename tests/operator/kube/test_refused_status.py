"""An operator that may not write the status, as with a CRD that is older than it, works on."""

from __future__ import annotations

import pytest
from cluster_kit.reconciling import KEY, Store, operating

UNKNOWN = (
    "failed to create typed patch object (ns/svc; diptych.dev/v1alpha1, Kind=InferenceService): "
    ".status.new: field not declared in schema"
)


@pytest.mark.parametrize("refusal", [(500, UNKNOWN), (403, 'cannot patch "svc"')])
async def test_it_says_so_once_and_looks_as_often_as_ever(refusal: tuple[int, str]) -> None:
    store = Store()
    async with operating(store) as reconciler:
        store.refuses_status = refusal
        waits = [await reconciler.reconcile(KEY) for _ in range(3)]
        assert None not in waits
        assert store.deployments()
        (event,) = (o for o in store.objects.values() if o["kind"] == "Event")
        assert event["reason"] == "OperatorProblem"
        assert refusal[1] in event["message"]
        assert event["message"].endswith("apply the chart or crds/ of the operator's version")
        store.refuses_status = None
        await reconciler.reconcile(KEY)
        assert store.condition("Degraded")["status"] == "False"
