"""An operator that may not write the status, as with a CRD that is older than it, works on; what is
refused is not sent again and again."""

from __future__ import annotations

import pytest
from aiohttp import web
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


async def test_it_says_once_what_an_older_crd_drops_of_the_status() -> None:
    """Some API servers refuse what they do not know; others forget it, and a canary with it."""
    store = Store()
    async with operating(store) as reconciler:
        store.drops_of_status = frozenset({"images", "access"})
        for _ in range(3):
            await reconciler.reconcile(KEY)
        events = [o for o in store.objects.values() if o["kind"] == "Event"]
        (event,) = (o for o in events if o["reason"] == "OperatorProblem")
        assert "drops status.access, status.images;" in event["message"]
        assert event["message"].endswith("apply the chart or crds/ of the operator's version")
        assert store.condition("Degraded")["status"] == "False"


class Picky(Store):
    """It takes no template of decode pods that has a note, and counts what it is only asked."""

    num_asked = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.num_asked += "dryRun" in request.query
        noted = "noted" in await request.text() and "-decode-" in request.path
        self.refuses_pods = (422, "no such field") if noted else None
        return await super().answer(request)


async def test_while_one_template_is_refused_none_is_sent_to_be_checked_again() -> None:
    store = Picky()
    async with operating(store) as reconciler:
        await reconciler.reconcile(KEY)
        store.spec = {"decode": {"podTemplate": {"metadata": {"annotations": {"noted": "1"}}}}}
        await reconciler.reconcile(KEY)
        assert store.condition("Degraded")["reason"] == "PodTemplateRejected"
        asked = store.num_asked
        assert asked
        await reconciler.reconcile(KEY)
        assert store.num_asked == asked
