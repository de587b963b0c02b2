"""A real Prometheus scrapes a real service and the operator, as the chart's monitors would."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser_kit import Laptop, laptop, shown_service
from cluster_kit.charts import CHART, load_script
from cluster_kit.operators import Operator
from cluster_kit.prometheus import Prometheus, needs_prometheus, scraping
from cluster_kit.small_api import serving_api
from free_ports import free_port
from waits import PATIENCE_S, wait_until

DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
VARIABLES = {"$namespace": "laptop", "$service": "smollm2", "$__rate_interval": "30s"}
"""What Grafana puts in for those of the dashboard."""
PROMPT = "Say in one long sentence how a letter comes from one town to another."


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


QUERIES = [
    filled(target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
]


def targets(service: Laptop, operator: Operator) -> list[tuple[str, dict[str, str]]]:
    """With the labels that the chart's PodMonitor and ServiceMonitor have Prometheus give."""
    pods = [
        (
            f"127.0.0.1:{pod['ports']['http']}",
            {"namespace": "laptop", "diptych_dev_service": "smollm2", "pod": pod["name"],
             "diptych_dev_role": pod["role"]},
        )
        for pod in service.state()["pods"]
    ]  # fmt: skip
    own = {"namespace": "diptych-system", "service": "diptych-operator", "pod": operator.name}
    return [*pods, (f"127.0.0.1:{operator.port}", own)]


def chat(url: str) -> None:
    """A stream: times to a token are measured of nothing else."""
    body: dict[str, Any] = {
        "model": "smollm2", "max_tokens": 8, "stream": True,
        "messages": [{"role": "user", "content": PROMPT}],
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text


def look(service: Laptop, prometheus: Prometheus, count: int) -> None:
    wait_until(lambda: prometheus.values("up") == [1.0] * count)
    missing = list(QUERIES)

    def all_seen() -> bool:
        chat(service.url)
        missing[:] = [query for query in missing if not prometheus.values(query)]
        print("without data:", missing)
        return not missing

    wait_until(all_seen, "every query has data", seconds=3 * PATIENCE_S)

    def told() -> set[tuple[str, ...]]:
        """The alerts that wait or fire."""
        found = (each["labels"] for each in prometheus.ask("alerts")["alerts"])
        names = ("alertname", "namespace", "diptych_dev_service")
        return {tuple(labels.get(name, "") for name in names) for labels in found}

    # The operator's service, which has no pods, is the only one that is not well.
    wait_until(lambda: told() == {("DiptychServiceNotAvailable", "ns", "svc")})


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_prometheus
async def test_every_query_of_the_dashboard_has_data_and_alerts_name_the_service(
    tmp_path: Path, smollm2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "up"
    folder.mkdir()

    def watch(operator: Operator) -> None:
        with laptop(folder, shown_service(smollm2), free_port()) as service:
            scraped = targets(service, operator)
            with scraping(tmp_path, scraped, CHART / "files" / "alerts.yaml") as prometheus:
                look(service, prometheus, len(scraped))
            # What `helm test` asks of a service.
            monkeypatch.setenv("SERVICE", service.url)
            smoke = load_script(CHART / "files" / "smoke_test.py")
            assert "KV was handed over" in smoke.check_service()

    async with serving_api(tmp_path) as (api, kubeconfig):
        api.serves_crd = True
        api.add_service()
        operator = Operator(tmp_path / "log", ["--namespaces=ns"], kubeconfig)
        try:
            await asyncio.to_thread(watch, operator)
        finally:
            operator.process.kill()
            operator.process.wait(PATIENCE_S)
