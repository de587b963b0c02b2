"""Alerts and dashboard ask for metrics that exist, of pods that carry the labels."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
import yaml
from cluster_kit.charts import CHART, Helm, of_kind, only
from prometheus_client import generate_latest

from diptych_frontend.observability.metrics import ServerMetrics
from diptych_operator.api.names import (
    ENGINE_PORTS,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ROLE_LABEL,
    ROUTER_PORTS,
    SERVICE_LABEL,
)
from diptych_operator.api.status import Condition, Status
from diptych_operator.metrics import OperatorMetrics
from diptych_operator.render.pods import SCHEME_ANNOTATION
from diptych_operator.status.reasons import ConditionType
from diptych_protocol import KVTransferStats, SchedulerStats

ALERTS = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
KINDS = {
    "serviceMonitor": "ServiceMonitor",
    "podMonitor": "PodMonitor",
    "prometheusRule": "PrometheusRule",
    "dashboard": "ConfigMap",
}
TARGET_LABELS = {"diptych_dev_service", "diptych_dev_role"}
"""Prometheus makes them of the pods' labels."""
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
EXPRESSIONS = [rule["expr"] for rule in RULES] + [
    target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
]


def names(exposition: bytes) -> set[str]:
    lines = exposition.decode().splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def exposed() -> set[str]:
    """The names of all samples that an engine, a router or the operator shows."""
    stats = SchedulerStats(kv_transfer=KVTransferStats(transport="tcp"))
    server = ServerMetrics("m", lambda: {"engine": stats})
    server.count_answer("/health", 200)
    text, _ = server.exposition("text/plain")
    return names(text) | names(generate_latest(operator_metrics().registry))


def operator_metrics() -> OperatorMetrics:
    """Those of an operator that looks after one service and has failed at it."""
    metrics = OperatorMetrics()
    with contextlib.suppress(OSError), metrics.timed():
        raise OSError
    condition = Condition(
        type=str(ConditionType.AVAILABLE), status="False", reason="Starting", message="",
        last_transition_time="2026-01-01T00:00:00Z",
    )  # fmt: skip
    metrics.saw(("default", "svc"), Status(conditions=[condition]))
    return metrics


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_each_expression_asks_for_metrics_that_exist(expression: str) -> None:
    asked = set(re.findall(r"\bdiptych[:_]\w+", expression)) - TARGET_LABELS
    assert asked
    assert asked <= exposed()


def test_alerts_on_the_operator_ask_for_labels_that_it_sets() -> None:
    text = generate_latest(operator_metrics().registry).decode()
    matchers = re.findall(r"diptych_operator_\w+{(.*?)}", " ".join(r["expr"] for r in RULES))
    assert matchers
    for name, value in re.findall(r'(\w+)=~?"(.*?)"', ",".join(matchers)):
        assert f'{name}="' in text
        if name == "result":
            assert f'{name}="{value}"' in text
        if name == "condition":
            assert value in {str(condition) for condition in ConditionType}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_each_alert_says_how_bad_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}


def test_the_alerts_cover_what_can_go_wrong_with_kv() -> None:
    assert {
        "DiptychLeasesExpire", "DiptychStaleReads", "DiptychHandOffsFail",
        "DiptychServiceNotAvailable", "DiptychVerificationFailed",
    } <= {rule["alert"] for rule in RULES}  # fmt: skip


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert max(x for x, _ in taken) < 24


@pytest.mark.parametrize("name", KINDS)
def test_monitoring_is_rendered_only_when_asked_for(helm: Helm, name: str) -> None:
    labels = {"release": "prometheus"}
    on = helm.render({"monitoring": {name: {"enabled": True, "labels": labels}}})
    assert only(on, KINDS[name])["metadata"]["labels"].items() >= labels.items()
    assert {o["kind"] for o in on} & set(KINDS.values()) == {KINDS[name]}
    assert not {o["kind"] for o in helm.render()} & set(KINDS.values())


def test_rules_and_dashboard_arrive_unchanged(helm: Helm) -> None:
    wanted = {"prometheusRule": {"enabled": True}, "dashboard": {"enabled": True}}
    objects = helm.render({"monitoring": wanted})
    assert only(objects, "PrometheusRule")["spec"] == ALERTS
    (text,) = only(objects, "ConfigMap")["data"].values()
    assert json.loads(text) == DASHBOARD


@pytest.mark.parametrize(
    ("values", "selected"),
    [
        ({}, {"any": True}),
        ({"scope": "namespaced", "namespaces": ["team-a"]}, {"matchNames": ["team-a"]}),
    ],
)
def test_pods_are_scraped_where_the_operator_serves(
    helm: Helm, values: dict[str, Any], selected: dict[str, Any]
) -> None:
    objects = helm.render(values | {"monitoring": {"podMonitor": {"enabled": True}}})
    (monitor,) = of_kind(objects, "PodMonitor")
    spec = monitor["spec"]
    assert spec["namespaceSelector"] == selected
    assert spec["selector"]["matchLabels"] == {MANAGED_BY_LABEL: MANAGED_BY}
    assert spec["podTargetLabels"] == [SERVICE_LABEL, ROLE_LABEL]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["port"] in ENGINE_PORTS
    assert endpoint["port"] in ROUTER_PORTS
    (scheme,) = endpoint["relabelings"]
    told = "__meta_kubernetes_pod_annotation_" + re.sub(r"\W", "_", next(iter(SCHEME_ANNOTATION)))
    assert scheme["sourceLabels"] == [told]
    assert re.fullmatch(scheme["regex"], SCHEME_ANNOTATION["prometheus.io/scheme"])
    # Prometheus turns what is no letter in a label into an underscore.
    for label in (SERVICE_LABEL, ROLE_LABEL):
        assert any(re.sub(r"\W", "_", label) in expression for expression in EXPRESSIONS)
