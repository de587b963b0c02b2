"""The operator's process on a real API server: at rest, restarted, in an election, ended.

Only where DIPTYCH_TEST_KUBECONFIG names an administrator's kubeconfig of a cluster that has the
CRDs.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from chaos_kit.namespaces import KUBECONFIG, Namespace, resting, until
from cluster_kit.operators import STUCK, Home, Identity, Operator, metric_change, running

from diptych_operator.kube.leader import LEASE_S, RETRY_S

pytestmark = pytest.mark.skipif(
    not KUBECONFIG, reason="DIPTYCH_TEST_KUBECONFIG names no cluster to run the operator against"
)


DONE = 'diptych_operator_reconcile_total{result="done"}'


# --- rest -------------------------------------------------------------------------------------


def test_at_rest_nothing_is_sent_but_renewals_of_the_lease(
    apart: tuple[Namespace, Identity], tmp_path: Path
) -> None:
    namespace, identity = apart
    operator = Operator(tmp_path / "log", identity.arguments, identity.kubeconfig)
    with running(operator):
        namespace.serve("quiet", suspend=True)
        namespace.settled("quiet")
        before = resting(namespace, "quiet")
        change, renewals = metric_change(operator, namespace, identity.lease, 20.0)
        assert 4 <= renewals <= 6
        assert change["diptych_operator_api_requests"] == renewals
        assert namespace.versions("quiet") == before
        assert operator.metrics()['diptych_operator_services{condition="Degraded",status="False"}']


def test_pods_that_stay_stuck_cost_no_request(
    apart: tuple[Namespace, Identity], tmp_path: Path
) -> None:
    namespace, identity = apart
    operator = Operator(tmp_path / "log", identity.arguments, identity.kubeconfig)
    with running(operator):
        namespace.serve("stuck", **STUCK)
        namespace.degraded("stuck", "Unschedulable")
        before = resting(namespace, "stuck")
        change, renewals = metric_change(operator, namespace, identity.lease, 8.0)
        assert change['diptych_operator_reconcile_total{result="done"}'] >= 3  # it does look
        assert change["diptych_operator_api_requests"] == renewals
        assert namespace.versions("stuck") == before
        # Nor does a template that is refused, but for asking again now and then.
        bad = {"spec": {"hostNetworking": True}}
        namespace.merge("InferenceService", "stuck", {"spec": {"decode": {"podTemplate": bad}}})
        namespace.degraded("stuck", "PodTemplateRejected")
        resting(namespace, "stuck")
        change, renewals = metric_change(operator, namespace, identity.lease, 8.0)
        # One that asks again, and one that news of a pod asked for: two Deployments are sent, and
        # the status may have learned that no node has room.
        assert change['diptych_operator_reconcile_total{result="done"}'] <= 2
        assert change["diptych_operator_api_requests"] <= renewals + 3


def test_a_restart_writes_nothing(apart: tuple[Namespace, Identity], tmp_path: Path) -> None:
    namespace, identity = apart
    first = Operator(tmp_path / "first", identity.arguments, identity.kubeconfig)
    with running(first):
        namespace.serve("same", **STUCK)
        namespace.degraded("same", "Unschedulable")
        before, children = resting(namespace, "same"), namespace.contents("same")
        first.tell(signal.SIGTERM)
        assert first.ended(5) == 0
    assert first.entries()[-1]["message"] == "stopped"
    second = Operator(tmp_path / "second", identity.arguments, identity.kubeconfig, "operator-1")
    with running(second):
        until("all is looked at", lambda: second.metrics().get(DONE))
        after = resting(namespace, "same")
        assert namespace.contents("same") == children
        assert after == before


# --- leadership -------------------------------------------------------------------------------


def test_another_takes_over_from_a_leader_that_dies_and_from_one_that_leaves(
    apart: tuple[Namespace, Identity], tmp_path: Path
) -> None:
    namespace, identity = apart

    def candidate(name: str) -> Operator:
        return Operator(tmp_path / name, identity.arguments, identity.kubeconfig, name)

    with running(candidate("first")) as first:
        namespace.serve("kept", suspend=True)
        namespace.settled("kept")
        before, children = resting(namespace, "kept"), namespace.contents("kept")
        with running(candidate("second"), leading=False) as second:
            until("it has seen the Lease", lambda: second.requests() >= 4)
            assert not second.leads()
            first.tell(signal.SIGKILL)
            until("the second leads", second.leads, LEASE_S + RETRY_S + 4)
            with running(candidate("third"), leading=False) as third:
                second.tell(signal.SIGTERM)
                assert second.ended(5) == 0
                until("the third leads", third.leads, RETRY_S + 4)
                until("all is looked at", lambda: third.metrics().get(DONE))
                after = resting(namespace, "kept")
                assert namespace.contents("kept") == children
                assert after == before
                holder = namespace.there("Lease", identity.lease)["spec"]
                assert holder["holderIdentity"] == "third"
                assert holder["leaseTransitions"] == 3


def test_a_leader_whose_lease_another_holds_ends(
    apart: tuple[Namespace, Identity], tmp_path: Path
) -> None:
    namespace, identity = apart
    operator = Operator(tmp_path / "log", identity.arguments, identity.kubeconfig)
    with running(operator):
        namespace.merge("Lease", identity.lease, {"spec": {"holderIdentity": "another"}})
        assert operator.ended(RETRY_S + 6) == 1
    words = f"the lease {identity.lease} is now held by another"
    assert operator.entries()[-1]["message"] == words
    # It does not free what is not its own.
    assert namespace.there("Lease", identity.lease)["spec"]["holderIdentity"] == "another"


def test_a_leader_whose_lease_is_deleted_leads_on_or_ends(
    apart: tuple[Namespace, Identity], tmp_path: Path
) -> None:
    namespace, identity = apart
    operator = Operator(tmp_path / "log", identity.arguments, identity.kubeconfig)
    with running(operator):
        namespace.delete("Lease", identity.lease)

        def look() -> bool:
            lease = namespace.get("Lease", identity.lease)
            holds = lease is not None and lease["spec"]["holderIdentity"] == operator.name
            return holds or operator.process.poll() == 1

        # API servers let it be made anew in the act of renewing; or they do not.
        until("it is known who leads", look, RETRY_S + 6)


# --- the process ------------------------------------------------------------------------------


def test_other_namespaces_are_not_its_business(home: Home) -> None:
    with Namespace("away") as away:
        away.serve("elsewhere", suspend=True)
        home.namespace.serve("here", suspend=True)
        home.namespace.settled("here")
        assert not away.status("elsewhere")
        assert not away.children("elsewhere")
    home.namespace.delete("InferenceService", "here")


def test_metrics_count_services_by_condition(
    apart: tuple[Namespace, Identity], tmp_path: Path
) -> None:
    namespace, identity = apart
    operator = Operator(tmp_path / "log", identity.arguments, identity.kubeconfig)
    with running(operator):
        namespace.serve("asleep", suspend=True)
        namespace.settled("asleep")
        namespace.serve("stuck", **STUCK)
        namespace.degraded("stuck", "Unschedulable")
        resting(namespace, "stuck")
        found = operator.metrics()
        services = "diptych_operator_services"
        assert found[f'{services}{{condition="Available",status="False"}}'] == 2
        assert found[f'{services}{{condition="Degraded",status="True"}}'] == 1
        assert found[f'{services}{{condition="Degraded",status="False"}}'] == 1
        assert found["diptych_operator_leader"] == 1
        assert found["diptych_operator_queue_length"] == 0
        passes = found['diptych_operator_reconcile_total{result="done"}']
        assert found["diptych_operator_reconcile_seconds_count"] == passes > 0
        assert found["process_resident_memory_bytes"] > 0
        namespace.delete("InferenceService", "stuck")
        one_left = f'{services}{{condition="Available",status="False"}}'
        until("it is forgotten", lambda: operator.metrics()[one_left] == 1)
