"""Alerts and dashboard ask for metrics that exist, of pods that carry the labels."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import each
from cluster_kit.charts import CHART, ROOT, Helm, of_kind, only
from cluster_kit.prometheus import needs_prometheus, promtool
from prometheus_client import generate_latest

from diptych_frontend.observability.metrics import ServerMetrics
from diptych_operator.api.names import (
    ENGINE_PORTS,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ROLE_LABEL,
    ROLES,
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
    with contextlib.suppress(OSError), metrics.timed(("default", "svc")):
        raise OSError
    metrics.saw(("default", "svc"), status_of("Starting"))
    return metrics


def status_of(reason: str) -> Status:
    """One of which no condition is True."""
    return Status(
        conditions=[
            Condition(str(kind), "False", reason, "", "2026-01-01T00:00:00Z")
            for kind in ConditionType
        ]
    )


def unwell(metrics: OperatorMetrics) -> set[str]:
    """The conditions by which the metrics name a service."""
    text = generate_latest(metrics.registry).decode()
    labels = re.findall(r"^diptych_operator_service_unwell{(.*)} 1.0$", text, re.M)
    assert all('namespace="default"' in each and 'service="svc"' in each for each in labels)
    return {found for each in labels for found in re.findall(r'condition="(\w+)"', each)}


def test_a_service_is_named_while_it_is_unwell_and_only_then() -> None:
    metrics, key = operator_metrics(), ("default", "svc")
    assert unwell(metrics) == {"Available", "KVTransferVerified", "Reconciled"}
    with metrics.timed(key):
        pass
    assert unwell(metrics) == {"Available", "KVTransferVerified"}
    metrics.saw(key, status_of("Suspended"))
    assert unwell(metrics) == set(), "that it does not serve is as somebody wished"
    metrics.saw(key, status_of("Starting"))
    metrics.forget(key)
    assert unwell(metrics) == set()


@each("expression", EXPRESSIONS)
def test_each_expression_asks_for_metrics_that_exist(expression: str) -> None:
    asked = set(re.findall(r"\bdiptych[:_]\w+", expression)) - TARGET_LABELS
    assert asked
    assert asked <= exposed()


def test_alerts_on_the_operator_ask_for_labels_that_it_sets() -> None:
    text = generate_latest(operator_metrics().registry).decode()
    matchers = re.findall(r"diptych_operator_\w+{(.*?)}", " ".join(r["expr"] for r in RULES))
    assert set(matchers) <= set(re.findall(r'condition="\w+"', text))
    assert len(matchers) == 3


@each("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_each_alert_says_how_bad_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    annotations = rule["annotations"]
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    page, _, section = annotations["runbook_url"].partition("#")
    home = yaml.safe_load((CHART / "Chart.yaml").read_text())["home"]
    assert page == f"{home}/blob/main/docs/runbook.md"
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.M)
    assert section == rule["alert"].lower()
    assert rule["alert"] in sections


@needs_prometheus
def test_prometheus_finds_nothing_wrong_with_the_rules() -> None:
    assert f"{len(RULES)} rules found" in promtool(
        "check", "rules", CHART / "files" / "alerts.yaml"
    )


@needs_prometheus
def test_each_alert_fires_for_what_it_is_about_and_names_service_and_namespace(
    tmp_path: Path,
) -> None:
    """With series of two services, of which one is well. The operator is about neither."""
    tests = yaml.safe_load((Path(__file__).parent / "alert_cases.yaml").read_text())
    tests["rule_files"] = [str(CHART / "files" / "alerts.yaml")]
    fired = set()
    for case in tests["tests"]:
        for expected in case["alert_rule_test"]:
            (rule,) = (rule for rule in RULES if rule["alert"] == expected["alertname"])
            for alert in expected["exp_alerts"]:
                fired.add(rule["alert"])
                alert["exp_labels"] |= rule["labels"]
                alert["exp_annotations"] = {
                    name: filled(text, alert["exp_labels"], alert.get("value", ""))
                    for name, text in rule["annotations"].items()
                }
                alert.pop("value", None)
                if rule["alert"] != "DiptychNoLeader":
                    assert "team-a/sick" in alert["exp_annotations"]["summary"]
    assert fired == {rule["alert"] for rule in RULES}
    path = tmp_path / "cases.yaml"
    path.write_text(yaml.safe_dump(tests))
    promtool("test", "rules", path)


def filled(text: str, labels: dict[str, str], value: str) -> str:
    """What Prometheus makes of an annotation."""
    for name in re.findall(r"\$labels\.(\w+)", text):
        text = text.replace(f"{{{{ $labels.{name} }}}}", labels.get(name, ""))
    return re.sub(r"{{ \$value.*? }}", value, text)


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
    (chosen,) = spec["selector"]["matchExpressions"]
    assert (chosen["key"], chosen["operator"]) == (ROLE_LABEL, "In")
    assert chosen["values"] == [*ROLES, "route"]
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
